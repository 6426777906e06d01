"""What readers have in common: an engine that is read from its metrics, its health and a few pages about itself.

Every look reads the metrics and the health; what the engine says of itself (models, version) is read again every
`_FACTS_S` seconds and after a restart. How an engine calls these things is its `Dialect`: the file beside this one that
bears its name. Names differ by version: the newest that is there counts, and one that is absent is unknown.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from headway_agent.config import EngineSettings
from headway_agent.devices.base import Measurement, MissingReason
from headway_agent.engines.base import EngineContext, EngineFactory, EngineFacts, EngineReading, EngineState, Patience
from headway_agent.engines.http import ERRORS, EngineHttp, Model
from headway_agent.engines.metrics import MetricsParser, Series, numbers

_FACTS_S = 10.0
_UNKNOWN = MissingReason.UNSUPPORTED
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Metric:
    """What an engine calls one number: its names, newest first; with `label`, only the series that bear it."""

    names: tuple[str, ...] = ()
    label: tuple[str, str] | None = None

    @classmethod
    def of(cls, *names: str, **label: str) -> "Metric":
        """`Metric.of("new", "old", kind="waiting")`."""
        return cls(names, next(iter(label.items()), None))


_NONE = Metric()


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape: the series of one rank, or of all ranks together."""

    series: dict[str, list[Series]]
    rank_label: str
    rank: int | None

    def total(self, metric: Metric) -> Measurement:
        """The sum over models and ranks."""
        values = numbers(self.find(metric))
        return sum(values) if values else _UNKNOWN

    def mean_share(self, metric: Metric) -> Measurement:
        """The mean of a share over ranks, 0 to 1."""
        values = numbers(self.find(metric))
        return min(1.0, max(0.0, sum(values) / len(values))) if values else _UNKNOWN

    def find(self, metric: Metric) -> list[Series]:
        """The series under the first of its names that is there, of our rank."""
        found = next((self.series[name] for name in metric.names if name in self.series), [])
        if metric.label is not None:
            name, value = metric.label
            found = [s for s in found if s.labels.get(name) == value]
        return self._of_rank([s for s in found if _first_shard(s)])

    def _of_rank(self, found: list[Series]) -> list[Series]:
        if self.rank is None or not self.rank_label:
            return found
        ranks = {s.labels[self.rank_label] for s in found if self.rank_label in s.labels}
        if len(ranks) <= 1 and str(self.rank) not in ranks:
            return found  # one rank only, which numbers itself as it likes
        return [s for s in found if s.labels.get(self.rank_label, str(self.rank)) == str(self.rank)]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV cache and the batch, in tokens and sequences."""

    block_size_tokens: Measurement = _UNKNOWN
    kv_capacity_tokens: Measurement = _UNKNOWN
    max_num_seqs: Measurement = _UNKNOWN

    def over(self, other: "Geometry") -> "Geometry":
        """What is known here, else what `other` knows."""
        return Geometry(
            _either(self.block_size_tokens, other.block_size_tokens),
            _either(self.kv_capacity_tokens, other.kv_capacity_tokens),
            _either(self.max_num_seqs, other.max_num_seqs),
        )


@dataclass(frozen=True, slots=True)
class About:
    """What an engine's pages say of itself."""

    models: tuple[Model, ...] = ()
    version: str = ""
    geometry: Geometry = Geometry()


async def openai_pages(http: EngineHttp) -> About:
    """`/v1/models` and `/version`. Raises one of ERRORS where there are no models."""
    return About(await http.models(), await http.version())


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one engine says things."""

    running: Metric = _NONE
    waiting: Metric = _NONE
    kv_use: Metric = _NONE
    """0 to 1."""
    prefix_queries: Metric = _NONE
    prefix_hits: Metric = _NONE
    prefix_misses: Metric = _NONE
    """Tokens that were computed, where the engine counts these and hits, not queries."""
    counters: tuple[Metric, ...] = ()
    """Numbers that only grow while the engine lives."""
    more: tuple[Metric, ...] = ()
    """Others that `geometry` and `adapters` look at."""
    rank_label: str = ""
    """The label that tells data-parallel ranks apart."""
    geometry: Callable[[Metrics], Geometry] | None = None
    adapters: Callable[[Metrics], set[str]] | None = None
    """Adapters that the metrics name."""
    about: Callable[[EngineHttp], Awaitable[About]] = openai_pages
    asleep: Callable[[EngineHttp, Metrics], Awaitable[bool | None]] | None = None
    """Does it sleep? None: it does not tell, and is not asked again until its facts are."""
    supplement: Callable[[EngineHttp, EngineReading], Awaitable[EngineReading]] | None = None
    """What other pages add to a reading."""
    health_path: str = "/health"
    metrics_paths: tuple[str, ...] = ("/metrics",)
    """The first that answers is read."""
    metrics_url: Callable[[str], str] = lambda base_url: base_url
    """Where the metrics are, from where the engine is, unless configured."""
    metrics_required: bool = True
    """Without: an engine that publishes none is only unknown."""

    @property
    def parser(self) -> MetricsParser:
        """A parser of all of them."""
        load = (self.running, self.waiting, self.kv_use)
        prefixes = (self.prefix_queries, self.prefix_hits, self.prefix_misses)
        metrics = (*load, *prefixes, *self.counters, *self.more)
        return MetricsParser({_STARTED, *(name for metric in metrics for name in metric.names)})

    def reader(self) -> EngineFactory:
        """What the catalogue lists. The parser is compiled here, once."""
        parser = self.parser
        return lambda settings, context: ScrapedReader(settings, context, self, parser)


@dataclass(slots=True)
class ScrapedReader:
    """One engine rank."""

    settings: EngineSettings
    context: EngineContext
    dialect: Dialect
    parser: MetricsParser
    _http: EngineHttp = field(init=False)
    _metrics_http: EngineHttp = field(init=False)
    _metrics_path: str = ""
    _facts: EngineFacts = field(init=False)
    _about: About = About()
    _about_at: float = -math.inf
    _seen_adapters: set[str] = field(default_factory=set)
    _counters: dict[Metric, float] = field(default_factory=dict)
    _restarts: int = 0
    _tells_sleep: bool = True
    _asleep: bool = False
    _sleeps: int = 0
    _patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        """Know at first what the configuration says."""
        self._http = EngineHttp(self.context.session, self.settings)
        url = self.settings.metrics_url or self.dialect.metrics_url(self.settings.base_url)
        self._metrics_http = EngineHttp(self.context.session, self.settings.model_copy(update={"url": url}))
        seqs = self.settings.max_num_seqs
        self._facts = EngineFacts(
            models=tuple(self.settings.models), max_num_seqs=_UNKNOWN if seqs is None else float(seqs)
        )

    async def read(self, timeout_s: float) -> EngineState:
        """Metrics and health now; models and version when they are due."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read()
        except TimeoutError:
            return EngineState(self._facts, self._patience.late())
        except ERRORS:
            self._about_at = -math.inf  # it may come back as something else
            return EngineState(self._facts, self._patience.gone())

    async def _read(self) -> EngineState:
        text, health = await asyncio.gather(self._scrape(), self._http.status(self.dialect.health_path))
        metrics = Metrics(self.parser.parse(text), self.dialect.rank_label, self.settings.dp_rank)
        awake = await self._awake(metrics)
        boot_id = self._boot(metrics)
        if boot_id != self._facts.boot_id or self.context.clock() - self._about_at > _FACTS_S:
            await self._refresh(boot_id)
        self._facts = self._described(metrics, boot_id)
        healthy = health < 400 or health == 404  # a server without such a page that serves its metrics
        reading = await self._reading(metrics, healthy and awake and bool(self._facts.models))
        return EngineState(self._facts, self._patience.answered(reading))

    async def _scrape(self) -> str:
        """The text of the first page of metrics that answers; which one that is stays known until it fails."""
        problem: Exception = ValueError("no metrics page")
        for path in (self._metrics_path,) if self._metrics_path else self.dialect.metrics_paths:
            try:
                text = await self._metrics_http.text(path)
            except ERRORS as error:
                self._metrics_path, problem = "", error
            else:
                self._metrics_path = path
                return text
        if self.dialect.metrics_required:
            raise problem
        return ""

    async def _awake(self, metrics: Metrics) -> bool:
        """Is it awake? Falling asleep loses the KV cache, whatever its level: that counts as a restart."""
        if self._tells_sleep and self.dialect.asleep is not None:
            asleep = await self.dialect.asleep(self._http, metrics)
            self._tells_sleep = asleep is not None
            self._sleeps += bool(asleep) and not self._asleep
            self._asleep = bool(asleep)
        return not self._asleep

    async def _reading(self, metrics: Metrics, ready: bool) -> EngineReading:
        dialect = self.dialect
        reading = EngineReading(
            ready=ready,
            running=metrics.total(dialect.running),
            waiting=metrics.total(dialect.waiting),
            kv_use=metrics.mean_share(dialect.kv_use),
            prefix_queries=_either(
                metrics.total(dialect.prefix_queries),
                _both(metrics.total(dialect.prefix_hits), metrics.total(dialect.prefix_misses)),
            ),
            prefix_hits=metrics.total(dialect.prefix_hits),
        )
        return reading if dialect.supplement is None else await dialect.supplement(self._http, reading)

    async def _refresh(self, boot_id: str) -> None:
        if boot_id != self._facts.boot_id:
            self._seen_adapters.clear()
            self._about = About()
        self._tells_sleep = True
        try:
            about = await self.dialect.about(self._http)
        except ERRORS:
            return  # what was listed still stands; asked again with the next look
        self._seen_adapters -= _adapters(self._about.models) - _adapters(about.models)
        self._about, self._about_at = about, self.context.clock()

    def _described(self, metrics: Metrics, boot_id: str) -> EngineFacts:
        dialect = self.dialect
        if dialect.adapters is not None:
            self._seen_adapters |= dialect.adapters(metrics)
        listed = self._about.models
        seqs = self.settings.max_num_seqs
        configured = Geometry(max_num_seqs=_UNKNOWN if seqs is None else float(seqs))
        measured = Geometry() if dialect.geometry is None else dialect.geometry(metrics)
        geometry = configured.over(measured).over(self._about.geometry)
        return EngineFacts(
            version=self._about.version,
            models=tuple(self.settings.models or [m.name for m in listed if not m.parent]),
            adapters=tuple(sorted(self._seen_adapters | _adapters(listed))),
            kv_capacity_tokens=geometry.kv_capacity_tokens,
            block_size_tokens=geometry.block_size_tokens,
            max_num_seqs=geometry.max_num_seqs,
            boot_id=boot_id,
        )

    def _boot(self, metrics: Metrics) -> str:
        """The process's start where it is published; else a count of how often the counters went back."""
        slept = f"+slept-{self._sleeps}" if self._sleeps else ""
        started = metrics.total(Metric((_STARTED,)))
        if not isinstance(started, MissingReason):
            return f"{started:.3f}{slept}"
        now = {
            metric: value
            for metric in self.dialect.counters
            if not isinstance(value := metrics.total(metric), MissingReason)
        }
        if any(value < self._counters.get(metric, 0.0) for metric, value in now.items()):
            self._restarts += 1
        self._counters = now
        return f"boot-{self._restarts}{slept}" if now else slept


def positive(value: object) -> Measurement:
    """A size out of JSON or a label: a positive number, or unknown."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _UNKNOWN
    return float(value) if 0 < value < math.inf else _UNKNOWN


def product(one: Measurement, other: Measurement) -> Measurement:
    """Of two numbers; unknown where either is."""
    if isinstance(one, MissingReason) or isinstance(other, MissingReason):
        return _UNKNOWN
    return one * other


def _both(one: Measurement, other: Measurement) -> Measurement:
    """The sum of two numbers; unknown where either is."""
    if isinstance(one, MissingReason) or isinstance(other, MissingReason):
        return _UNKNOWN
    return one + other


def total(values: Iterable[Measurement]) -> Measurement:
    """The sum of those that are known; unknown where none is."""
    known = [value for value in values if not isinstance(value, MissingReason)]
    return sum(known) if known else _UNKNOWN


def _either(one: Measurement, other: Measurement) -> Measurement:
    return other if isinstance(one, MissingReason) else one


def _adapters(models: Iterable[Model]) -> set[str]:
    return {model.name for model in models if model.parent}


def _first_shard(series: Series) -> bool:
    """Shards of one rank repeat its numbers: the first one's count."""
    return series.labels.get("tp_rank", "0") == "0" and series.labels.get("pp_rank", "0") == "0"
