"""The emulator's command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway_sim.emulator.kv_events import Encoding
from headway_sim.engine import BLOCK_TOKENS, HARDWARE, Hardware


@dataclass(frozen=True, slots=True)
class EmulatorConfig:
    """What to emulate and where to listen: one engine per port, all in this process."""

    hardware: Hardware
    models: tuple[str, ...]
    host: str
    ports: tuple[int, ...]
    speedup: float = 1.0
    waiting_limit: int | None = None
    kv_tokens: int | None = None
    stream_interval_ms: float = 20.0
    port_file: Path | None = None
    kv_events_port: int | None = None
    kv_events_encoding: Encoding = Encoding.ARRAY


def parse_arguments(arguments: Sequence[str] | None = None) -> EmulatorConfig:
    """The configuration of a command line; argparse reports what is wrong and exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m headway_sim.emulator", description=__doc__)
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="a100-40g-8b")
    parser.add_argument("--model", action="append", help="a served model's name; repeatable (default: demo)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port",
        type=int,
        action="append",
        help="repeat for several engines; 0, the default, picks a free one",
    )
    parser.add_argument("--engines", type=int, help="how many, on consecutive ports from --port")
    parser.add_argument("--speedup", type=_positive, default=1.0, help="divides every time of the hardware")
    parser.add_argument("--waiting-limit", type=_count, help="refuse with 503 when this many requests wait")
    parser.add_argument("--kv-tokens", type=_count, help="KV cache in tokens, instead of the hardware's")
    parser.add_argument(
        "--stream-interval-ms", type=_positive, default=20.0, help="real time between events of one stream"
    )
    parser.add_argument("--port-file", type=Path, help="written once all listen: one port per line")
    parser.add_argument(
        "--kv-events-port",
        type=int,
        help="publish KV events here, and replay them on the next port; 2 more for each further engine; 0: free ones",
    )
    parser.add_argument("--kv-events-encoding", choices=[each.value for each in Encoding], default="array")
    given = parser.parse_args(arguments)
    if given.kv_tokens is not None and given.kv_tokens < BLOCK_TOKENS:
        parser.error(f"--kv-tokens must be at least {BLOCK_TOKENS}")
    ports = tuple(given.port or (0,))
    if any(not 0 <= port <= 65535 for port in ports):
        parser.error("--port must be between 0 and 65535")
    if given.engines is not None:
        if len(ports) != 1 or given.engines < 1:
            parser.error("--engines must be positive and goes with one --port")
        ports = tuple(ports[0] + index if ports[0] else 0 for index in range(given.engines))
    return EmulatorConfig(
        hardware=HARDWARE[given.hardware],
        models=tuple(given.model or ("demo",)),
        host=given.host,
        ports=ports,
        speedup=given.speedup,
        waiting_limit=given.waiting_limit,
        kv_tokens=given.kv_tokens,
        stream_interval_ms=given.stream_interval_ms,
        port_file=given.port_file,
        kv_events_port=given.kv_events_port,
        kv_events_encoding=Encoding(given.kv_events_encoding),
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be positive")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
