"""Idle vLLM engines as agents see them: one server on every loopback address.

`python -m headway_bench.idle_engine` prints its port. The metrics have the names and about the size of a real one's.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Final, cast

import uvloop

__all__ = ["main"]

_MODEL: Final = "m"
_GAUGES: Final = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "lora_requests_info")
_COUNTERS: Final = (
    *("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"),
    *("request_success", "mm_cache_queries", "mm_cache_hits"),
)
_HISTOGRAMS: Final = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
    *("request_params_max_tokens", "iteration_tokens_total"),
)
_BUCKETS: Final = 24


def _lines() -> Iterator[str]:
    yield "process_start_time_seconds 1.76e+09"
    yield 'vllm:cache_config_info{block_size="16",num_gpu_blocks="8800",engine="0"} 1.0'
    labels = f'engine="0",model_name="{_MODEL}"'
    for name in _GAUGES:
        yield f"# HELP vllm:{name} What it is.\n# TYPE vllm:{name} gauge\nvllm:{name}{{{labels}}} 0.0"
    for name in _COUNTERS:
        yield f"# HELP vllm:{name} What it is.\n# TYPE vllm:{name} counter\nvllm:{name}_total{{{labels}}} 0.0"
        yield f"vllm:{name}_created{{{labels}}} 1.76e+09"
    for name in _HISTOGRAMS:
        yield f"# HELP vllm:{name} What it is.\n# TYPE vllm:{name} histogram"
        for bucket in range(_BUCKETS):
            yield f'vllm:{name}_bucket{{{labels},le="{2.0**bucket / 1000:g}"}} 0.0'
        yield f"vllm:{name}_count{{{labels}}} 0.0\nvllm:{name}_sum{{{labels}}} 0.0"


def _answer(kind: str, body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


_PAGES: Final = {
    b"/metrics": _answer("text/plain; version=0.0.4", "\n".join([*_lines(), ""]).encode()),
    b"/health": _answer("text/plain", b""),
    b"/version": _answer("application/json", b'{"version":"0.32.0"}'),
    b"/v1/models": _answer("application/json", json.dumps({"data": [{"id": _MODEL, "max_model_len": 8192}]}).encode()),
}
_ABSENT: Final = _answer("text/plain", b"", "404 Not Found")


class _Server(asyncio.Protocol):
    def __init__(self) -> None:
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # also uvloop's, which does not say so

    def data_received(self, data: bytes) -> None:
        *requests, self._unread = (self._unread + data).split(b"\r\n\r\n")
        for request in requests:
            path = request.split(b" ", 2)[1]
            self._transport.write(_PAGES.get(path, _ABSENT))


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Server, "0.0.0.0", 0)  # noqa: S104  all of 127.0.0.0/8
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    uvloop.run(_serve())


if __name__ == "__main__":
    main()
