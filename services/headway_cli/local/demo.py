"""`headway demo`: round robin against adaptive on eight emulated GPUs, then a flip under load."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from headway_sim.workloads import ArticleWorkload
from rich.console import Console
from rich.table import Table

from headway_cli.local.load import Run, flip_under_load, reservations_left, run_article
from headway_cli.local.picture import draw
from headway_cli.local.progress import advancing, progress_bars
from headway_cli.local.stack import LocalStack, StackOptions, TenantOptions
from headway_cli.output import console as output_console
from headway_cli.output import print_plain
from headway_cli.session import Output, Session

__all__ = ["DemoOptions", "run_demo"]

BASELINE: Final = "round_robin"
CHALLENGER: Final = "adaptive"
TENANTS: Final = (TenantOptions("acme", "gold"), TenantOptions("globex", "silver"))


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Where it works and writes, how fast the engines run, and the load."""

    data_dir: Path
    out: Path
    speedup: float
    workload: ArticleWorkload
    flip_workload: ArticleWorkload


def run_demo(options: DemoOptions, session: Session, console: Console) -> int:
    """Run it; the result goes to standard output, progress to `console`. Returns the exit status."""
    stack_options = StackOptions(options.data_dir, tenants=TENANTS, speedup=options.speedup)
    with progress_bars(console) as progress:
        starting = progress.add_task("starting 14 processes", total=1)
        with LocalStack(stack_options) as stack:
            progress.advance(starting)
            runs = []
            for number, strategy in enumerate((BASELINE, CHALLENGER)):
                # Other sessions in each run: neither may profit from what the other left anywhere.
                workload = replace(options.workload, seed=number)
                on_outcome = advancing(progress, strategy.replace("_", " "), workload.requests)
                runs.append(run_article(stack, strategy, workload, on_outcome))
            workload = options.flip_workload
            on_outcome = advancing(progress, "flipping the strategy", workload.requests)
            flipped, flips = flip_under_load(stack, (BASELINE, CHALLENGER), workload, on_outcome)
            left = reservations_left(lambda: stack.status().reservations)
    lost = sum(run.summary["lost"] for run in runs) + flipped["lost"]
    result: dict[str, Any] = {
        "runs": {run.strategy: _figures(run) for run in runs},
        "flip": {"requests": flipped["requests"], "flips": flips, "lost": flipped["lost"]},
        "lost": lost,
        "reservations_left": left,
        "speedup": options.speedup,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(runs, _title(options), options.out / "demo.png")
    if session.output is Output.TABLE:
        _print_table(runs, result, options)
    else:
        print_plain(session, result)
    return 0 if lost == 0 and left == 0 else 1


def _figures(run: Run) -> dict[str, Any]:
    summary = run.summary
    return {
        "ttft_ms": summary["ttft_ms"],
        "requests_per_s": summary["requests_per_s"],
        "hit_ratio": summary["hit_ratio"],
        "rejected_ratio": summary["rejected_ratio"],
        "requests": summary["requests"],
        "host_overhead_ms": run.overhead_ms,
    }


def _title(options: DemoOptions) -> str:
    load = options.workload
    return (
        f"{load.sessions} sessions of {load.turns} turns, {load.concurrency} at a time, "
        f"{load.input_tokens} tokens in, {load.output_tokens} out, 2 tenants on 4 emulated A100-40G each"
    )


def _print_table(runs: list[Run], result: dict[str, Any], options: DemoOptions) -> None:
    before, after = (run.summary for run in runs)
    table = Table(title=_title(options), title_justify="left")
    for name in ("", BASELINE, CHALLENGER, "change"):
        table.add_column(name, justify="left" if not name else "right")
    for quantile in ("mean", "p50", "p99"):
        old, new = before["ttft_ms"][quantile], after["ttft_ms"][quantile]
        table.add_row(f"TTFT {quantile}, ms", _number(old, 1), _number(new, 1), _percent(old, new))
    old_rate, new_rate = before["requests_per_s"], after["requests_per_s"]
    table.add_row("requests/s", _number(old_rate, 2), _number(new_rate, 2), _percent(old_rate, new_rate))
    old_hits, new_hits = 100 * (before["hit_ratio"] or 0), 100 * (after["hit_ratio"] or 0)
    table.add_row("KV hit ratio, %", _number(old_hits, 1), _number(new_hits, 1), f"{new_hits - old_hits:+.1f} points")
    old_refused, new_refused = 100 * before["rejected_ratio"], 100 * after["rejected_ratio"]
    points = f"{new_refused - old_refused:+.1f} points"
    table.add_row("refused, %", _number(old_refused, 1), _number(new_refused, 1), points)
    console = output_console()
    console.print(table)
    overheads = ", ".join(f"{_number(run.overhead_ms, 1)} ms under {run.strategy}" for run in runs)
    console.print(
        f"Times are the engines' own: they ran {options.speedup:g} times faster than life. In each TTFT this host's "
        f"own overhead (gateway, scheduler, two cores shared by all) is {overheads}.",
        highlight=False,
    )
    flip = result["flip"]
    console.print(
        f"Strategy changed {flip['flips']} times under {flip['requests']} requests: {flip['lost']} lost. "
        f"Lost in all: {result['lost']}; reservations left: {result['reservations_left']}.",
        highlight=False,
    )
    console.print(f"Written: {options.out / 'demo.json'}, {options.out / 'demo.png'}", highlight=False)


def _number(value: float | None, digits: int) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"


def _percent(old: float | None, new: float | None) -> str:
    return "unknown" if not old or new is None else f"{100 * (new / old - 1):+.0f} %"
