"""`headway replay`: a trace's requests through gateway, scheduler and emulated engines."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_sim.driver import run_trace, summarise
from headway_sim.traces import TraceError, load_trace
from rich.console import Console
from rich.table import Table

from headway_cli.errors import CliError
from headway_cli.local.load import reservations_left, target_of
from headway_cli.local.progress import advancing, progress_bars
from headway_cli.local.stack import LocalStack, NodeOptions, StackOptions
from headway_cli.output import print_plain, show
from headway_cli.session import Output, Session

__all__ = ["ReplayOptions", "run_replay"]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay, how dense, on what. `rate` is in the engines' time, which runs `speedup` times faster."""

    data_dir: Path
    trace: Path
    limit: int | None
    rate: float
    strategy: str
    engines: int
    hardware: str
    speedup: float


def run_replay(options: ReplayOptions, session: Session, console: Console) -> int:
    """Replay; the result goes to standard output, progress to `console`. Returns the exit status."""
    try:
        requests = load_trace(options.trace, limit=options.limit)
    except (TraceError, OSError) as error:
        raise CliError("INVALID_TRACE", str(error)) from None
    nodes = (NodeOptions("node-a", "gold", options.engines),)
    stack_options = StackOptions(options.data_dir, nodes=nodes, hardware=options.hardware, speedup=options.speedup)
    with progress_bars(console) as progress, LocalStack(stack_options) as stack:
        stack.use_strategy(options.strategy)
        on_outcome = advancing(progress, f"replaying {options.trace.name}", len(requests))
        rate = options.rate * options.speedup
        result = asyncio.run(run_trace(target_of(stack), requests, rate=rate, on_outcome=on_outcome))
        left = reservations_left(lambda: stack.status().reservations)
    summary = summarise(result, speedup=options.speedup)
    figures: dict[str, Any] = {
        "requests": summary["requests"],
        "ok": summary["ok"],
        "refused": summary["refused"],
        "lost": summary["lost"],
        "reservations_left": left,
        "ttft_ms": summary["ttft_ms"],
        "hit_ratio": summary["hit_ratio"],
        "requests_per_s": summary["requests_per_s"],
        "statuses": summary["statuses"],
        "strategy": options.strategy,
        "rate": options.rate,
        "speedup": options.speedup,
    }
    if session.output is Output.TABLE:
        show(_table(figures))
    else:
        print_plain(session, figures)
    return 0 if summary["lost"] == 0 and left == 0 else 1


def _table(figures: dict[str, Any]) -> Table:
    table = Table("", title=f"{figures['strategy']}, rate {figures['rate']:g}", show_header=False, title_justify="left")
    table.add_column(justify="right")
    for name in ("requests", "ok", "refused", "lost", "reservations_left"):
        table.add_row(name.replace("_", " "), str(figures[name]))
    for quantile, value in figures["ttft_ms"].items():
        table.add_row(f"TTFT {quantile}, ms", "unknown" if value is None else f"{value:,.0f}")
    hits = figures["hit_ratio"]
    table.add_row("KV hit ratio, %", "unknown" if hits is None else f"{100 * hits:.1f}")
    return table
