"""Any server that speaks OpenAI's API and publishes no metrics we know: alive or not, and which models."""

import asyncio
import math
from dataclasses import dataclass, field

from headway_agent.config import EngineSettings
from headway_agent.devices.base import MissingReason
from headway_agent.engines.base import EngineContext, EngineFacts, EngineReading, EngineState, Patience
from headway_agent.engines.http import ERRORS, EngineHttp

_FACTS_S = 10.0


@dataclass(slots=True)
class OpenAiReader:
    """One server. Its load is unknown; the scheduler counts what it sends there."""

    settings: EngineSettings
    context: EngineContext
    _http: EngineHttp = field(init=False)
    _facts: EngineFacts = field(init=False)
    _facts_at: float = -math.inf
    _patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        """Know at first what the configuration says."""
        seqs = self.settings.max_num_seqs
        self._http = EngineHttp(self.context.session, self.settings)
        self._facts = EngineFacts(
            models=tuple(self.settings.models),
            max_num_seqs=MissingReason.UNSUPPORTED if seqs is None else float(seqs),
        )

    async def read(self, timeout_s: float) -> EngineState:
        """Health now (by `/v1/models` where there is no `/health`); models when they are due."""
        try:
            async with asyncio.timeout(timeout_s):
                reading = await self._read()
                return EngineState(self._facts, self._patience.answered(reading))
        except TimeoutError:
            return EngineState(self._facts, self._patience.late())
        except ERRORS:
            self._facts_at = -math.inf
            return EngineState(self._facts, self._patience.gone())

    async def _read(self) -> EngineReading:
        health = await self._http.status("/health")
        if health == 404 or self.context.clock() - self._facts_at > _FACTS_S:
            await self._refresh()
        return EngineReading(ready=(health < 400 or health == 404) and bool(self._facts.models))

    async def _refresh(self) -> None:
        listed = await self._http.models()
        self._facts = EngineFacts(
            version=await self._http.version(),
            models=tuple(self.settings.models) or tuple(m.name for m in listed if not m.parent),
            adapters=tuple(sorted(m.name for m in listed if m.parent)),
            max_num_seqs=self._facts.max_num_seqs,
        )
        self._facts_at = self.context.clock()
