"""vLLM, and whatever speaks its metric names (Headway's emulator does).

Every look reads `/metrics` and `/health`; `/v1/models` and `/version` are read again every `_FACTS_S` seconds
and after a restart. Names differ by version: the newest that is there counts.
"""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from headway_agent.config import EngineSettings
from headway_agent.devices.base import Measurement, MissingReason
from headway_agent.engines.base import EngineContext, EngineFacts, EngineReading, EngineState
from headway_agent.engines.http import ERRORS, EngineHttp, Model
from headway_agent.engines.metrics import MetricsParser, Series, numbers

_RUNNING = ("vllm:num_requests_running",)
_WAITING = ("vllm:num_requests_waiting",)
_KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_QUERIES = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries",
)
_HITS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits",
)
_CACHE = ("vllm:cache_config_info",)
_LORA = ("vllm:lora_requests_info",)
_STARTED = ("process_start_time_seconds",)
_PROMPT_TOKENS = ("vllm:prompt_tokens_total",)
_GENERATED_TOKENS = ("vllm:generation_tokens_total",)

_GAUGES = (_RUNNING, _WAITING, _KV_USE, _CACHE, _LORA, _STARTED)
_COUNTERS = (_QUERIES, _HITS, _PROMPT_TOKENS, _GENERATED_TOKENS)
_PARSER = MetricsParser(name for names in (*_GAUGES, *_COUNTERS) for name in names)
_FACTS_S = 10.0


@dataclass(slots=True)
class VllmReader:
    """One vLLM rank."""

    settings: EngineSettings
    context: EngineContext
    _http: EngineHttp = field(init=False)
    _facts: EngineFacts = field(init=False)
    _facts_at: float = -math.inf
    _listed: tuple[Model, ...] = ()
    _seen_adapters: set[str] = field(default_factory=set)
    _counters: dict[tuple[str, ...], float] = field(default_factory=dict)
    _restarts: int = 0

    def __post_init__(self) -> None:
        """Know at first what the configuration says."""
        self._http = EngineHttp(self.context.session, self.settings)
        self._facts = EngineFacts(models=tuple(self.settings.models), max_num_seqs=_configured_seqs(self.settings))

    async def read(self, timeout_s: float) -> EngineState:
        """Metrics and health now; models and version when they are due."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read()
        except ERRORS:
            self._facts_at = -math.inf  # it may come back as something else
            return EngineState(self._facts, EngineReading.failed())

    async def _read(self) -> EngineState:
        text, health = await asyncio.gather(self._http.text("/metrics"), self._http.status("/health"))
        metrics = Metrics.of(text, self.settings.dp_rank)
        boot_id = self._boot(metrics)
        if boot_id != self._facts.boot_id or self.context.clock() - self._facts_at > _FACTS_S:
            await self._refresh(boot_id)
        self._facts = self._described(metrics, boot_id)
        healthy = health < 400 or health == 404  # a server without /health that serves its metrics
        reading = EngineReading(
            ready=healthy and bool(self._facts.models),
            running=metrics.total(_RUNNING),
            waiting=metrics.total(_WAITING),
            kv_use=metrics.mean_share(_KV_USE),
            prefix_queries=metrics.total(_QUERIES),
            prefix_hits=metrics.total(_HITS),
        )
        return EngineState(self._facts, reading)

    async def _refresh(self, boot_id: str) -> None:
        if boot_id != self._facts.boot_id:
            self._seen_adapters.clear()
            self._listed = ()
        try:
            listed = await self._http.models()
        except ERRORS:
            return  # what was listed still stands; asked again with the next look
        version = await self._http.version()
        unloaded = {m.name for m in self._listed if m.parent} - {m.name for m in listed if m.parent}
        self._seen_adapters -= unloaded
        self._listed, self._facts_at = listed, self.context.clock()
        self._facts = EngineFacts(version=version)

    def _described(self, metrics: "Metrics", boot_id: str) -> EngineFacts:
        self._seen_adapters |= metrics.adapters()
        adapters = self._seen_adapters | {m.name for m in self._listed if m.parent}
        models = self.settings.models or [m.name for m in self._listed if not m.parent]
        block_size, capacity = metrics.geometry()
        return EngineFacts(
            version=self._facts.version,
            models=tuple(models),
            adapters=tuple(sorted(adapters)),
            kv_capacity_tokens=capacity,
            block_size_tokens=block_size,
            max_num_seqs=_configured_seqs(self.settings),
            boot_id=boot_id,
        )

    def _boot(self, metrics: "Metrics") -> str:
        """The process's start where it is published; else a count of how often the counters went back."""
        started = metrics.total(_STARTED)
        if not isinstance(started, MissingReason):
            return f"{started:.3f}"
        now: dict[tuple[str, ...], float] = {
            names: value for names in _COUNTERS if not isinstance(value := metrics.total(names), MissingReason)
        }
        if any(value < self._counters.get(names, 0.0) for names, value in now.items()):
            self._restarts += 1
        self._counters = now
        return f"boot-{self._restarts}" if now else ""


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape: the series of one rank, or of all ranks together."""

    series: dict[str, list[Series]]
    rank: int | None

    @classmethod
    def of(cls, text: str, rank: int | None) -> "Metrics":
        """Parse a body of `/metrics`."""
        return cls(_PARSER.parse(text), rank)

    def total(self, names: Iterable[str]) -> Measurement:
        """The sum over models and ranks."""
        values = numbers(self._first(names))
        return sum(values) if values else MissingReason.UNSUPPORTED

    def mean_share(self, names: Iterable[str]) -> Measurement:
        """The mean of a share over ranks, 0 to 1."""
        values = numbers(self._first(names))
        return min(1.0, max(0.0, sum(values) / len(values))) if values else MissingReason.UNSUPPORTED

    def geometry(self) -> tuple[Measurement, Measurement]:
        """Tokens a block, and tokens in all."""
        block_sizes: list[int] = []
        capacities: list[int] = []
        for one in self._first(_CACHE):
            block_size, blocks = one.labels.get("block_size", ""), one.labels.get("num_gpu_blocks", "")
            if block_size.isdecimal() and int(block_size) > 0:
                block_sizes.append(int(block_size))
                if blocks.isdecimal() and int(blocks) > 0:
                    capacities.append(int(block_size) * int(blocks))
        return (
            float(block_sizes[0]) if block_sizes else MissingReason.UNSUPPORTED,
            float(sum(capacities)) if capacities else MissingReason.UNSUPPORTED,
        )

    def adapters(self) -> set[str]:
        """Adapters with requests running or waiting, by the newest line: the value is its time."""
        lines = self._first(_LORA)
        if not lines:
            return set()
        newest = max(lines, key=lambda s: s.value if math.isfinite(s.value) else -math.inf).labels
        names = f"{newest.get('running_lora_adapters', '')},{newest.get('waiting_lora_adapters', '')}"
        return {name.strip() for name in names.split(",") if name.strip()}

    def _first(self, names: Iterable[str]) -> list[Series]:
        """The series under the first of these names that is there, of our rank."""
        found = next((self.series[name] for name in names if name in self.series), [])
        if self.rank is None:
            return found
        ranks = {s.labels["engine"] for s in found if "engine" in s.labels}
        if len(ranks) <= 1 and str(self.rank) not in ranks:
            return found  # one rank only, which numbers itself as it likes
        return [s for s in found if s.labels.get("engine", str(self.rank)) == str(self.rank)]


def _configured_seqs(settings: EngineSettings) -> Measurement:
    return MissingReason.UNSUPPORTED if settings.max_num_seqs is None else float(settings.max_num_seqs)
