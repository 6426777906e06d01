"""Hugging Face's Text Generation Inference. It does not tell how full its KV cache is, nor what hit."""

from headway_agent.engines.http import ERRORS, EngineHttp, Model
from headway_agent.engines.scraped import About, Dialect, Geometry, Metric, positive


async def _about(http: EngineHttp) -> About:
    """`/info`; the models by `/v1/models`, which older versions lack."""
    found = await http.json("/info")
    info = found if isinstance(found, dict) else {}
    try:
        models = await http.models()
    except ERRORS:
        models = (Model(str(info["model_id"])),) if info.get("model_id") else ()
    geometry = Geometry(kv_capacity_tokens=positive(info.get("max_batch_total_tokens")))
    return About(models, str(info.get("version") or ""), geometry)


TGI = Dialect(
    running=Metric.of("tgi_batch_current_size"),
    waiting=Metric.of("tgi_queue_size"),
    counters=(Metric.of("tgi_request_count"), Metric.of("tgi_request_success")),
    about=_about,
)
