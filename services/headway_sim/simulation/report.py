"""Results as files: JSON, plots, and one page that needs nothing else."""

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot: no display is needed

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headway_sim.simulation.compare import Comparison, LoadPoint
from headway_sim.simulation.metrics import Samples
from headway_sim.simulation.scenario import Scenario

__all__ = ["describe", "write_report"]

_DPI = 110
_MOST_LINES = 20


def describe(scenario: Scenario) -> str:
    """A scenario in a few words."""
    what = scenario.workload or (scenario.trace.name if scenario.trace is not None else "")
    cache = f", cache-scale {scenario.cache_scale:g}" if scenario.cache_scale != 1 else ""
    return f"{what} on {scenario.fleet}{cache}, rate {scenario.rate:.3g}"


def write_report(folder: Path, title: str, comparison: Comparison, loads: Sequence[LoadPoint]) -> None:
    """Write results.json, the plots as PNG, and index.html, which holds them all."""
    folder.mkdir(parents=True, exist_ok=True)
    document = comparison.document()
    (folder / "results.json").write_text(json.dumps(document, indent=2) + "\n")
    plots = {
        "ttft_cdf": ("Time to first token", _ttft_cdf(comparison)),
        "load_over_time": ("Requests in flight, by endpoint", _load_over_time(comparison)),
    }
    if loads:
        plots["ttft_by_load"] = ("Mean TTFT against load", _ttft_by_load(loads))
    if any(figures["hold_ms"]["max"] for figures in comparison.figures.values()):
        plots["holds"] = ("How long the scheduler held requests", _holds(comparison))
    for name, (_, figure) in plots.items():
        figure.savefig(folder / f"{name}.png", dpi=_DPI)
        plt.close(figure)
    images = {name: (heading, (folder / f"{name}.png").read_bytes()) for name, (heading, _) in plots.items()}
    (folder / "index.html").write_text(_page(title, document, images))


def _ttft_cdf(comparison: Comparison) -> Figure:
    figure, axes = _axes("TTFT, ms", "share of requests")
    for name, runs in comparison.runs.items():
        _cdf(axes, np.concatenate([run.ttft_ms for run in runs]), name)
    return _finished(figure, axes, logarithmic=True)


def _holds(comparison: Comparison) -> Figure:
    figure, axes = _axes("held, ms", "share of requests")
    for name, runs in comparison.runs.items():
        held = np.concatenate([run.hold_ms for run in runs])
        if held.any():
            _cdf(axes, held, name)
    return _finished(figure, axes)


def _ttft_by_load(loads: Sequence[LoadPoint]) -> Figure:
    figure, axes = _axes("rate", "mean TTFT, ms")
    for name in dict.fromkeys(point.policy for point in loads):
        points = [point for point in loads if point.policy == name]
        axes.plot([point.rate for point in points], [point.ttft_ms for point in points], marker="o", label=name)
    axes.set_yscale("log")
    return _finished(figure, axes)


def _load_over_time(comparison: Comparison) -> Figure:
    """Per policy a panel: the mean load, and the band from the least to the most loaded endpoint."""
    names = list(comparison.runs)[:_MOST_LINES]
    figure, panels = plt.subplots(len(names), 1, figsize=(8, 1.6 * len(names) + 0.6), sharex=True, squeeze=False)
    for axes, name in zip(panels[:, 0], names, strict=True):
        run = comparison.runs[name][0]
        axes.fill_between(run.load_times_s, run.load.min(axis=1), run.load.max(axis=1), alpha=0.35)
        axes.plot(run.load_times_s, run.load.mean(axis=1), linewidth=1)
        axes.set_title(name, fontsize=8, loc="left")
        axes.grid(alpha=0.3)
    panels[-1, 0].set_xlabel("time, s")
    figure.tight_layout()
    return figure


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _cdf(axes: Axes, samples: Samples, label: str) -> None:
    if len(samples):
        axes.plot(np.sort(samples), np.arange(1, len(samples) + 1) / len(samples), label=label, linewidth=1.2)


def _finished(figure: Figure, axes: Axes, *, logarithmic: bool = False) -> Figure:
    if logarithmic:
        axes.set_xscale("log")
    if axes.has_data():
        axes.legend(fontsize=7)
    figure.tight_layout()
    return figure


def _page(title: str, document: dict[str, Any], images: dict[str, tuple[str, bytes]]) -> str:
    """One page with every figure and plot inside. `document` is JSON."""
    rows = []
    for name, figures in sorted(document["policies"].items(), key=lambda item: item[1]["ttft_ms"]["mean"] or 0.0):
        ttft, ratio = figures["ttft_ms"], figures["vs_round_robin"]
        cells = [
            *(_number(ttft[key]) for key in ("mean", "p50", "p90", "p99", "max")),
            _number(figures["tpot_ms"]["mean"]),
            _number(figures["e2e_ms"]["mean"]),
            f"{figures['hit_ratio']:.1%}",
            f"{figures['rejected_ratio']:.1%}",
            f"{figures['requests_per_s']:.2f}",
            f"{figures['kv_use_mean']:.0%}",
            f"{figures['spread']:.2f}",
            _number(figures["hold_ms"]["max"]),
            "" if ratio is None else f"{ratio:.3f}",
        ]
        rows.append(f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    headings = (
        "policy|TTFT mean ms|p50|p90|p99|max|TPOT ms|E2E ms|hits|refused|req/s|KV use|spread|longest hold ms|"
        "TTFT / round robin"
    )
    pictures = "".join(
        f'<h2>{html.escape(heading)}</h2><img alt="{html.escape(heading)}" src="data:image/png;base64,'
        f'{base64.b64encode(data).decode()}">'
        for heading, data in images.values()
    )
    bound = document["lower_bound"]["ttft_ms"]["mean"]
    return _TEMPLATE.format(
        title=html.escape(title),
        floor=f"{document['noise_floor']:.1%}",
        bound=_number(bound),
        headings="".join(f"<th>{heading}</th>" for heading in headings.split("|")),
        rows="".join(rows),
        pictures=pictures,
        data=json.dumps(document).replace("<", "\\u003c"),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1b1f24 }}
table {{ border-collapse: collapse; font-size: 13px }}
td, th {{ padding: .3rem .6rem; border-bottom: 1px solid #d8dee4; text-align: right }}
th:first-child {{ text-align: left }}
img {{ max-width: 100% }}
</style></head><body>
<h1>{title}</h1>
<p>Noise floor: {floor} of the mean TTFT. Lower bound (no queueing, every earlier prefix cached everywhere):
mean TTFT {bound} ms.</p>
<table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>
{pictures}
<script type="application/json" id="results">{data}</script>
</body></html>
"""
