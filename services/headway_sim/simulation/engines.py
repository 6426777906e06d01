"""An engine in virtual time, run only as far as anyone looks."""

import math
from collections.abc import Callable

from headway_sim.engine import Engine, EngineRequest, EngineSequence, Snapshot, Step

__all__ = ["SimulatedEngine"]


class SimulatedEngine:
    """Steps the engine model up to a time; `wake_ms` is when the next request of it can begin to answer or end."""

    def __init__(self, engine: Engine, on_step: Callable[[Step], None]) -> None:
        """`on_step` hears of every step that brought a first token or an end, once its end has come."""
        self.engine = engine
        self._on_step = on_step
        self._step: Step | None = None
        self._clock_ms = 0.0
        self._busy_ms = 0.0

    def add(self, request: EngineRequest, now_ms: float) -> EngineSequence:
        """Queue a request now. Raises what `Engine.add` raises."""
        self.catch_up(now_ms)
        sequence = self.engine.add(request, now_ms)
        if self._step is None:
            self._clock_ms = now_ms
            self._begin(now_ms)
        return sequence

    def catch_up(self, now_ms: float) -> None:
        """Run every step that should have begun by now."""
        while (step := self._step) is not None and step.end_ms <= now_ms:
            self._busy_ms += step.end_ms - step.start_ms
            self._clock_ms = step.end_ms
            self._begin(now_ms)
            if step.first_tokens or step.finished:
                self._on_step(step)

    @property
    def wake_ms(self) -> float:
        """When to catch up at the latest so that no news comes late; infinite while idle."""
        step = self._step
        if step is None:
            return math.inf
        if step.first_tokens or step.finished:
            return step.end_ms
        quiet_ms = self.engine.quiet_until_ms(step.end_ms)
        return step.end_ms if quiet_ms == math.inf else quiet_ms

    def snapshot(self, now_ms: float) -> Snapshot:
        """The engine's numbers now."""
        self.catch_up(now_ms)
        return self.engine.snapshot()

    def busy_ms(self, now_ms: float) -> float:
        """How long it has computed until now."""
        current = 0.0 if self._step is None else max(0.0, now_ms - self._step.start_ms)
        return self._busy_ms + current

    def _begin(self, now_ms: float) -> None:
        self._step = self.engine.step(self._clock_ms, now_ms)
