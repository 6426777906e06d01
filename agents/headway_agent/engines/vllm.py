"""vLLM, and whatever speaks its metric names (Headway's emulator does)."""

import math

from headway_agent.engines.http import ERRORS, EngineHttp
from headway_agent.engines.metrics import numbers
from headway_agent.engines.scraped import Dialect, Geometry, Metric, Metrics, positive, product, total

_CACHE = Metric.of("vllm:cache_config_info")
_LORA = Metric.of("vllm:lora_requests_info")
_SLEEP = "vllm:engine_sleep_state"
_AWAKE = Metric.of(_SLEEP, sleep_state="awake")
_QUERIES = Metric.of(
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries",
)
_HITS = Metric.of(
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits",
)


def _geometry(metrics: Metrics) -> Geometry:
    sizes = [
        (positive(one.labels.get("block_size")), positive(one.labels.get("num_gpu_blocks")))
        for one in metrics.find(_CACHE)
    ]
    if not sizes:
        return Geometry()
    return Geometry(sizes[0][0], total(product(block_size, blocks) for block_size, blocks in sizes))


def _adapters(metrics: Metrics) -> set[str]:
    """Adapters with requests running or waiting, by the newest line: the value is its time."""
    lines = metrics.find(_LORA)
    if not lines:
        return set()
    newest = max(lines, key=lambda s: s.value if math.isfinite(s.value) else -math.inf).labels
    names = f"{newest.get('running_lora_adapters', '')},{newest.get('waiting_lora_adapters', '')}"
    return {name.strip() for name in names.split(",") if name.strip()}


async def _asleep(http: EngineHttp, metrics: Metrics) -> bool | None:
    """By its metric where it has one, else by `/is_sleeping`, which only its development mode serves."""
    states = numbers(metrics.find(_AWAKE))
    if states:
        return not all(states)
    try:
        answer = await http.json("/is_sleeping")
    except ERRORS:
        return None
    return answer.get("is_sleeping") is True if isinstance(answer, dict) else None


VLLM = Dialect(
    running=Metric.of("vllm:num_requests_running"),
    waiting=Metric.of("vllm:num_requests_waiting"),
    kv_use=Metric.of("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    prefix_queries=_QUERIES,
    prefix_hits=_HITS,
    counters=(_QUERIES, _HITS, Metric.of("vllm:prompt_tokens_total"), Metric.of("vllm:generation_tokens_total")),
    more=(_CACHE, _LORA, _AWAKE),
    rank_label="engine",
    geometry=_geometry,
    adapters=_adapters,
    asleep=_asleep,
)
