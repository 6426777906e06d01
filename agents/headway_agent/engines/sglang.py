"""SGLang. Needs `--enable-metrics`; `sglang:cache_hit_rate` is a rate of the moment, so hits stay unknown without
`sglang:cached_tokens_total`."""

from headway_agent.devices.base import MissingReason
from headway_agent.engines.http import ERRORS, EngineHttp
from headway_agent.engines.scraped import About, Dialect, Geometry, Metric, Metrics, positive, product, total

_CACHE = Metric.of("sglang:cache_config_info")
_TOKENS = Metric.of("sglang:max_total_num_tokens")
_PROMPT = Metric.of("sglang:prompt_tokens_total")
_CACHED = Metric.of("sglang:cached_tokens_total")


def _geometry(metrics: Metrics) -> Geometry:
    infos = [one.labels for one in metrics.find(_CACHE)]
    page = positive(infos[0].get("page_size") or infos[0].get("block_size")) if infos else MissingReason.UNSUPPORTED
    pages = total(positive(labels.get("num_pages") or labels.get("num_gpu_blocks")) for labels in infos)
    return Geometry(page, product(page, pages)).over(Geometry(kv_capacity_tokens=metrics.total(_TOKENS)))


async def _about(http: EngineHttp) -> About:
    models = await http.models()
    info: object = None
    for path in ("/server_info", "/get_server_info"):
        try:
            info = await http.json(path)
            break
        except ERRORS:
            continue
    if not isinstance(info, dict):
        return About(models)
    geometry = Geometry(
        positive(info.get("page_size")),
        positive(info.get("max_total_num_tokens")),
        positive(info.get("max_running_requests")),
    )
    return About(models, str(info.get("version") or ""), geometry)


SGLANG = Dialect(
    running=Metric.of("sglang:num_running_reqs"),
    waiting=Metric.of("sglang:num_queue_reqs"),
    kv_use=Metric.of("sglang:token_usage"),
    prefix_queries=_PROMPT,
    prefix_hits=_CACHED,
    counters=(_PROMPT, Metric.of("sglang:generation_tokens_total"), _CACHED),
    more=(_CACHE, _TOKENS),
    rank_label="dp_rank",
    geometry=_geometry,
    about=_about,
)
