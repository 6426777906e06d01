"""The demo's picture."""

from pathlib import Path
from typing import Final

from headway_cli.local.load import Run

__all__ = ["draw"]

_BEFORE: Final = "#9aa5b1"
_AFTER: Final = "#2a78d6"


def draw(runs: list[Run], title: str, path: Path) -> None:
    """Four panels, one bar a run: mean TTFT, p99 TTFT, requests a second, KV hit ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: tuple[tuple[str, list[float | None], str], ...] = (
        ("TTFT mean, ms (lower is better)", [run.summary["ttft_ms"]["mean"] for run in runs], "{:.0f}"),
        ("TTFT p99, ms (lower is better)", [run.summary["ttft_ms"]["p99"] for run in runs], "{:.0f}"),
        ("Requests a second", [run.summary["requests_per_s"] for run in runs], "{:.2f}"),
        ("KV hit ratio, %", [100 * (run.summary["hit_ratio"] or 0.0) for run in runs], "{:.0f}"),
    )
    figure = pyplot.figure(figsize=(12, 3.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    names = [run.strategy.replace("_", " ") for run in runs]
    for number, (label, values, form) in enumerate(panels, start=1):
        axis = figure.add_subplot(1, len(panels), number)
        known = [value or 0.0 for value in values]
        bars = axis.bar(names, known, color=[_BEFORE, _AFTER][: len(runs)], width=0.6)
        axis.bar_label(bars, [form.format(value) for value in known], padding=2)
        axis.set_title(label, fontsize=9)
        axis.set_ylim(0, max(known) * 1.15 or 1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_yticks([])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
