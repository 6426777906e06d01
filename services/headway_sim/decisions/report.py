"""The table as text, Markdown and JSON, and its pictures."""

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # before pyplot: no display is needed

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from headway_sim.decisions.rows import FAVOURITE, LMETRIC, Row, best_peer
from headway_sim.decisions.run import Found, Results
from headway_sim.simulation.policies import BASELINE

__all__ = ["HEADINGS", "cells", "markdown", "write"]

HEADINGS = ("setup", "measure", "adaptive", "best peer", "ratio", "/ LMetric", "noise", "must", "met", "aim", "reached")
_DPI = 80
_LIMIT_S = 30.0
_URGENT_S = 5.0


def cells(row: Row) -> tuple[str, ...]:
    """A row as it is shown, in the order of HEADINGS."""
    return (
        row.setup,
        row.measure,
        row.adaptive,
        row.peer,
        _number(row.ratio),
        _number(row.lmetric),
        "" if row.noise_floor is None else f"{row.noise_floor:.1%}",
        row.must,
        "yes" if row.met else "NO",
        row.aim,
        "" if row.aimed is None else "yes" if row.aimed else "no",
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *(cells(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(folder: Path, results: Results) -> None:
    """decisions.json, decisions.md and the pictures, over whatever an earlier run left."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "decisions.json").write_text(json.dumps(results.document(), indent=1) + "\n")
    (folder / "decisions.md").write_text(markdown(results.table))
    if results.setups:
        _ratios(folder / "decisions-ratios.png", results.setups)
        _holds(folder / "decisions-holds.png", results.setups)
        _distributions(folder / "decisions-ttft.png", results.setups)


def _ratios(path: Path, setups: dict[str, Found]) -> None:
    """Every peer's mean TTFT over adaptive's, a line a setup."""
    names = list(setups)
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(names) + 1.4))
    for place, name in enumerate(names):
        figures = setups[name].comparison.figures
        means = {policy: each["ttft_ms"]["mean"] for policy, each in figures.items()}
        ours = means.pop(FAVOURITE) or 1.0
        others = [mean / ours for mean in means.values() if mean is not None]
        axes.scatter(others, [place] * len(others), s=14, color="#9aa5b1", zorder=2)
        for peer, colour in ((BASELINE, "#d1495b"), (LMETRIC, "#00798c"), (best_peer(figures), "#1b1f24")):
            axes.scatter((means[peer] or 0.0) / ours, place, s=26, color=colour, zorder=3)
    for colour, label in (("#d1495b", "round robin"), ("#00798c", "LMetric"), ("#1b1f24", "best peer")):
        axes.scatter([], [], s=26, color=colour, label=label)
    axes.axvline(1.0, color="#1b1f24", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("mean TTFT / adaptive's (right of the line: adaptive is better)")
    axes.legend(fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    _save(figure, path)


def _holds(path: Path, setups: dict[str, Found]) -> None:
    """How long adaptive held requests: the share held longer than that."""
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for name, found in setups.items():
        held = np.sort(found.holds_ms[found.holds_ms > 0]) / 1e3
        if len(held):
            share = np.arange(len(held), 0, -1) / len(found.holds_ms)
            axes.step(held, share, label=f"{name} (longest {held[-1]:.1f} s)", linewidth=1.1)
    axes.axvline(_URGENT_S, color="#9aa5b1", linestyle=":", linewidth=1)
    axes.axvline(_LIMIT_S, color="#1b1f24", linestyle="--", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("held longer than, s (dotted: before all others; dashed: the most a call allows)")
    axes.set_ylabel("share of requests")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=6)
    axes.grid(alpha=0.3)
    _save(figure, path)


def _distributions(path: Path, setups: dict[str, Found]) -> None:
    """TTFT's distribution in every setup: adaptive, the best peer, round robin."""
    columns = 3
    lines = -(-len(setups) // columns)
    figure, panels = plt.subplots(lines, columns, figsize=(10, 2.3 * lines), squeeze=False)
    for axes in panels.flat[len(setups) :]:
        axes.axis("off")
    for axes, (name, found) in zip(panels.flat, setups.items(), strict=False):
        for policy in dict.fromkeys((FAVOURITE, best_peer(found.comparison.figures), BASELINE)):
            samples = np.sort(np.concatenate([run.ttft_ms for run in found.comparison.runs[policy]]))
            axes.plot(samples, np.arange(1, len(samples) + 1) / max(1, len(samples)), label=policy, linewidth=1)
        axes.set_xscale("log")
        axes.set_title(name, fontsize=8)
        axes.tick_params(labelsize=6)
        axes.legend(fontsize=6)
        axes.grid(alpha=0.3)
    figure.supxlabel("TTFT, ms", fontsize=8)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
