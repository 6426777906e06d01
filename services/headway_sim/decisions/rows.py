"""Rows of the table: what a setup came to, and whether that is what was promised."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from headway_sim.policies.catalog import PEERS
from headway_sim.simulation.compare import Comparison
from headway_sim.simulation.metrics import Figures, Measured
from headway_sim.simulation.policies import BASELINE
from headway_sim.simulation.search import Goodput

__all__ = [
    "FAVOURITE",
    "LMETRIC",
    "Judge",
    "Row",
    "against_best",
    "against_lmetric",
    "article",
    "best_peer",
    "goodput",
    "learned",
    "overload",
    "regret",
    "tail",
    "worst_regret",
]

FAVOURITE: Final = "adaptive"
LMETRIC: Final = "lmetric"
WARM_UP_S: Final = 300.0
_REFUSED_MORE: Final = 0.001
_REGRET: Final = 0.03
_LEARNED: Final = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `ratio` is adaptive over the peer it is held against, `lmetric` over LMetric.

    `met` and `aimed`: is the must reached, and the aim; None where there is none.
    """

    setup: str
    measure: str
    adaptive: str
    peer: str
    ratio: float | None
    lmetric: float | None
    must: str
    aim: str
    met: bool
    aimed: bool | None = None
    noise_floor: float | None = None


Judge = Callable[[str, Comparison], Row]


def best_peer(figures: Mapping[str, Figures]) -> str:
    """The peer with the lowest mean TTFT; one that refuses more than 2 % does not count, since it serves others."""
    peers = [name for name in figures if name in PEERS and figures[name]["rejected_ratio"] <= 0.02]
    peers = peers or [name for name in figures if name in PEERS]
    return min(peers, key=lambda name: _mean(figures[name]))


def against_best(must: float = 1.0, aim: float | None = None) -> Judge:
    """Mean TTFT against the best peer's, the noise floor allowed."""

    def judge(setup: str, found: Comparison) -> Row:
        peer = best_peer(found.figures)
        ours, ratio = found.figures[FAVOURITE], _ratio(found, peer)
        return Row(
            setup,
            "mean TTFT",
            _shown(ours),
            f"{peer} {_ms(_mean(found.figures[peer]))}",
            ratio,
            _ratio(found, LMETRIC),
            f"≤ {must:g} x best peer",
            "" if aim is None else f"{aim:g} x",
            ratio <= must + found.noise_floor and _refuses_no_more(found, peer),
            None if aim is None else ratio <= aim,
            found.noise_floor,
        )

    return judge


def against_lmetric(must: float, aim: float | None = None) -> Judge:
    """Mean TTFT against LMetric's."""

    def judge(setup: str, found: Comparison) -> Row:
        peer, ratio = best_peer(found.figures), _ratio(found, LMETRIC)
        return Row(
            setup,
            "mean TTFT",
            _shown(found.figures[FAVOURITE]),
            f"{peer} {_ms(_mean(found.figures[peer]))}",
            _ratio(found, peer),
            ratio,
            f"≤ {must:g} x LMetric",
            "" if aim is None else f"{aim:g} x",
            ratio <= must and _refuses_no_more(found, LMETRIC),
            None if aim is None else ratio <= aim,
            found.noise_floor,
        )

    return judge


def tail(setup: str, found: Comparison) -> Row:
    """The p99 of TTFT against that of the best peer."""
    peer = best_peer(found.figures)
    ours, theirs = found.figures[FAVOURITE]["ttft_ms"]["p99"] or 0.0, found.figures[peer]["ttft_ms"]["p99"] or 0.0
    lmetric = found.figures[LMETRIC]["ttft_ms"]["p99"] or 0.0
    return Row(
        setup,
        "p99 TTFT",
        _ms(ours),
        f"{peer} {_ms(theirs)}",
        ours / theirs,
        ours / lmetric,
        "≤ 1 x best peer",
        "",
        ours <= theirs,
        noise_floor=found.noise_floor,
    )


def article(setup: str, found: Comparison) -> Row:
    """Mean TTFT at most a quarter of round robin's, TPOT no worse (noise floor allowed)."""
    ours, theirs = found.figures[FAVOURITE], found.figures[BASELINE]
    ratio = _ratio(found, BASELINE)
    tpot, before = ours["tpot_ms"]["mean"] or 0.0, theirs["tpot_ms"]["mean"] or 0.0
    return Row(
        setup,
        "mean TTFT, TPOT",
        f"{_shown(ours)}, {tpot:.2f} ms",
        f"{BASELINE} {_ms(_mean(theirs))}, {before:.2f} ms",
        ratio,
        _ratio(found, LMETRIC),
        "≤ 0.25 x round robin, TPOT no worse",
        "0.2 x",
        ratio <= 0.25 and tpot <= before * (1 + found.noise_floor),
        ratio <= 0.20,
        found.noise_floor,
    )


def overload(setup: str, found: Comparison) -> Row:
    """Refused at most 2 % where round robin refuses 12 %; hits twice as high, or 40 points higher."""
    ours, theirs = found.figures[FAVOURITE], found.figures[BASELINE]
    hits, before = ours["hit_ratio"], theirs["hit_ratio"]
    return Row(
        setup,
        "refused, hits",
        f"{ours['rejected_ratio']:.1%}, {hits:.1%}",
        f"{BASELINE} {theirs['rejected_ratio']:.1%}, {before:.1%}",
        None,
        None,
        "refused ≤ 2 %; hits 2 x or + 40 points",
        "1 %",
        ours["rejected_ratio"] <= 0.02 and (hits >= 2 * before or hits >= before + 0.4),
        ours["rejected_ratio"] <= 0.01,
        found.noise_floor,
    )


def goodput(setup: str, found: Mapping[str, Goodput]) -> Row:
    """Requests a second within the objective, against round robin's."""
    ours, theirs = found[FAVOURITE].goodput_per_s, found[BASELINE].goodput_per_s
    lmetric = found[LMETRIC].goodput_per_s if LMETRIC in found else 0.0
    ratio = ours / theirs if theirs else None
    return Row(
        setup,
        "goodput",
        f"{ours:.2f}/s",
        f"{BASELINE} {theirs:.2f}/s",
        ratio,
        ours / lmetric if lmetric else None,
        "≥ 1.33 x round robin",
        "1.6 x",
        ratio is not None and ratio >= 1.33,
        ratio is not None and ratio >= 1.6,
    )


def learned(setup: str, wrong: Measured, right: Measured, noise_floor: float) -> Row:
    """Mean TTFT of what arrives after five minutes, priors wrong by two against perfect ones."""
    ours, theirs = _after(wrong, WARM_UP_S), _after(right, WARM_UP_S)
    ratio = ours / theirs if theirs else None
    return Row(
        setup,
        "mean TTFT from 5 min on",
        _ms(ours),
        f"perfect priors {_ms(theirs)}",
        ratio,
        None,
        "≤ 1.05 x perfect priors",
        "",
        ratio is not None and ratio <= 1 + _LEARNED + noise_floor,
        noise_floor=noise_floor,
    )


def regret(found: Comparison) -> float:
    """How much worse than the best peer, beyond the noise floor; negative: better."""
    return _ratio(found, best_peer(found.figures)) - 1.0 - found.noise_floor


def worst_regret(setups: Mapping[str, Comparison]) -> Row:
    """The largest regret of all setups compared by TTFT."""
    worst = max(setups, key=lambda name: regret(setups[name]))
    found = setups[worst]
    peer = best_peer(found.figures)
    return Row(
        f"worst regret: {worst}",
        "mean TTFT",
        _shown(found.figures[FAVOURITE]),
        f"{peer} {_ms(_mean(found.figures[peer]))}",
        _ratio(found, peer),
        _ratio(found, LMETRIC),
        "≤ noise floor + 3 %",
        "",
        regret(found) <= _REGRET,
        noise_floor=found.noise_floor,
    )


def _refuses_no_more(found: Comparison, peer: str) -> bool:
    """A low TTFT is worth nothing if it was got by refusing."""
    figures = found.figures
    return figures[FAVOURITE]["rejected_ratio"] <= figures[peer]["rejected_ratio"] + _REFUSED_MORE


def _after(run: Measured, start_s: float) -> float:
    late = run.ttft_ms[run.arrival_s >= start_s]
    return float(np.mean(late)) if len(late) else 0.0


def _ratio(found: Comparison, peer: str) -> float:
    return _mean(found.figures[FAVOURITE]) / _mean(found.figures[peer])


def _mean(figures: Figures) -> float:
    mean = figures["ttft_ms"]["mean"]
    return float("inf") if mean is None else mean


def _shown(figures: Figures) -> str:
    refused = figures["rejected_ratio"]
    return _ms(_mean(figures)) + (f" ({refused:.1%} refused)" if refused else "")


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 1000 else f"{value:,.0f} ms"
