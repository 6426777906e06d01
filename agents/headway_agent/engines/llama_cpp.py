"""llama.cpp's `llama-server`. Its `/metrics` needs `--metrics`, its `/slots` `--slots`; either tells the load."""

from dataclasses import replace

from headway_agent.devices.base import Measurement, MissingReason
from headway_agent.engines.base import EngineReading
from headway_agent.engines.http import ERRORS, EngineHttp
from headway_agent.engines.scraped import About, Dialect, Geometry, Metric, positive, product, total

_UNKNOWN = MissingReason.UNSUPPORTED


async def _about(http: EngineHttp) -> About:
    models = await http.models()
    try:
        props = await http.json("/props")
    except ERRORS:
        return About(models)
    if not isinstance(props, dict):
        return About(models)
    slots, settings = positive(props.get("total_slots")), props.get("default_generation_settings")
    context = positive(settings.get("n_ctx")) if isinstance(settings, dict) else _UNKNOWN
    geometry = Geometry(kv_capacity_tokens=product(slots, context), max_num_seqs=slots)
    return About(models, str(props.get("build_info") or ""), geometry)


async def _slots(http: EngineHttp, reading: EngineReading) -> EngineReading:
    """What `/slots` adds where the metrics are silent: who is busy, and in older versions how full they are."""
    if not isinstance(reading.running, MissingReason) and not isinstance(reading.kv_use, MissingReason):
        return reading
    try:
        found = await http.json("/slots")
    except ERRORS:
        return reading
    slots = [slot for slot in found if isinstance(slot, dict)] if isinstance(found, list) else []
    if isinstance(reading.running, MissingReason) and any("is_processing" in slot for slot in slots):
        reading = replace(reading, running=float(sum(slot.get("is_processing") is True for slot in slots)))
    if isinstance(reading.kv_use, MissingReason):
        reading = replace(reading, kv_use=_use(slots))
    return reading


def _use(slots: list[dict[str, object]]) -> Measurement:
    used = [slot.get("n_past") for slot in slots]
    room = total(positive(slot.get("n_ctx")) for slot in slots)
    if not used or isinstance(room, MissingReason):
        return _UNKNOWN
    known = [value for value in used if isinstance(value, int) and not isinstance(value, bool)]
    return min(1.0, sum(known) / room) if len(known) == len(used) else _UNKNOWN


_COMPUTED = Metric.of("llamacpp:prompt_tokens_total")

LLAMA_CPP = Dialect(
    running=Metric.of("llamacpp:requests_processing"),
    waiting=Metric.of("llamacpp:requests_deferred"),
    kv_use=Metric.of("llamacpp:kv_cache_usage_ratio"),
    prefix_hits=Metric.of("llamacpp:prompt_tokens_cached_total"),
    prefix_misses=_COMPUTED,
    counters=(_COMPUTED, Metric.of("llamacpp:tokens_predicted_total")),
    about=_about,
    supplement=_slots,
    metrics_required=False,
)
