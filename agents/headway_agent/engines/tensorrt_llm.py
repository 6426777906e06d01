"""TensorRT-LLM's own server (`trtllm-serve`). Prometheus text is at `/prometheus/metrics`; its `/metrics` is JSON that
reading takes away from others. The hit rate is a rate of the moment: hits stay unknown."""

from headway_agent.engines.scraped import Dialect, Metric

TENSORRT_LLM = Dialect(
    running=Metric.of("trtllm_num_requests_running", "trtllm:num_requests_running"),
    waiting=Metric.of("trtllm_num_requests_waiting", "trtllm:num_requests_waiting"),
    kv_use=Metric.of("trtllm_kv_cache_utilization", "trtllm:kv_cache_utilization"),
    counters=(Metric.of("trtllm_request_success_total", "trtllm:request_success_total"),),
    metrics_paths=("/prometheus/metrics", "/metrics"),
)
