"""Triton with the TensorRT-LLM backend. Its metrics are on a port of their own, 8002 unless `metrics_url` says."""

from urllib.parse import urlsplit

from headway_agent.engines.http import ERRORS, EngineHttp, Model
from headway_agent.engines.scraped import About, Dialect, Geometry, Metric, Metrics, product

_METRICS_PORT = 8002
_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
_REQUESTS = "nv_trt_llm_request_metrics"
_TOKENS_PER = Metric.of(_BLOCKS, kv_cache_block_type="tokens_per")
_MAX_BLOCKS = Metric.of(_BLOCKS, kv_cache_block_type="max")
_MAX_REQUESTS = Metric.of(_REQUESTS, request_type="max")


def _metrics_url(base_url: str) -> str:
    parts = urlsplit(base_url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{_METRICS_PORT}"


def _geometry(metrics: Metrics) -> Geometry:
    tokens = metrics.total(_TOKENS_PER)
    return Geometry(tokens, product(tokens, metrics.total(_MAX_BLOCKS)), metrics.total(_MAX_REQUESTS))


async def _about(http: EngineHttp) -> About:
    """The OpenAI frontend's models, else the repository's that are ready."""
    server = await http.json("/v2")
    version = str(server.get("version", "")) if isinstance(server, dict) else ""
    try:
        return About(await http.models(), version)
    except ERRORS:
        index = await http.json("/v2/repository/index", post=True)
    entries = index if isinstance(index, list) else []
    ready = (e for e in entries if isinstance(e, dict) and e.get("state") == "READY" and "name" in e)
    return About(tuple(Model(str(e["name"])) for e in ready), version)


TRITON = Dialect(
    running=Metric.of(_REQUESTS, request_type="scheduled"),
    waiting=Metric.of(_REQUESTS, request_type="waiting"),
    kv_use=Metric.of(_BLOCKS, kv_cache_block_type="fraction"),
    counters=(Metric.of("nv_inference_request_success"), Metric.of("nv_inference_count")),
    more=(_TOKENS_PER, _MAX_BLOCKS, _MAX_REQUESTS),
    geometry=_geometry,
    about=_about,
    health_path="/v2/health/ready",
    metrics_url=_metrics_url,
)
