"""The engine's numbers in Prometheus text, under vLLM's names."""

from dataclasses import dataclass

from headway_sim.engine import BLOCK_TOKENS, Snapshot


@dataclass(slots=True)
class RequestCounts:
    """Requests that ended, by how."""

    stop: int = 0
    length: int = 0
    abort: int = 0


def render_metrics(
    snapshot: Snapshot, counts: RequestCounts, *, model: str, started_unix_s: float, kv_blocks: int
) -> str:
    """One scrape."""
    labels = f'engine="0",model_name="{_escape(model)}"'
    cache_labels = (
        f'block_size="{BLOCK_TOKENS}",cache_dtype="auto",enable_prefix_caching="True",engine="0",'
        f'num_gpu_blocks="{kv_blocks}"'
    )
    rows = [
        ("vllm:num_requests_running", "gauge", labels, snapshot.running),
        ("vllm:num_requests_waiting", "gauge", labels, snapshot.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", labels, snapshot.kv_use),
        ("vllm:cache_config_info", "gauge", cache_labels, 1),
        ("vllm:prefix_cache_queries_total", "counter", labels, snapshot.prefix_query_tokens),
        ("vllm:prefix_cache_hits_total", "counter", labels, snapshot.prefix_hit_tokens),
        ("vllm:prompt_tokens_total", "counter", labels, snapshot.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", labels, snapshot.generated_tokens),
        ("vllm:num_preemptions_total", "counter", labels, snapshot.preemptions),
        ("process_start_time_seconds", "gauge", "", started_unix_s),
    ]
    lines = []
    for name, kind, row_labels, value in rows:
        lines.append(f"# TYPE {name} {kind}")
        lines.append(f"{name}{{{row_labels}}} {value}" if row_labels else f"{name} {value}")
    lines.append("# TYPE vllm:request_success_total counter")
    for reason in ("stop", "length", "abort"):
        row_labels = f'{labels},finished_reason="{reason}"'
        lines.append(f"vllm:request_success_total{{{row_labels}}} {getattr(counts, reason)}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
