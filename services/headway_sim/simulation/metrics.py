"""From runs to the figures one compares."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from headway_sim.simulation.records import Run

__all__ = ["Distribution", "Figures", "Measured", "distribution", "figures", "measure"]

Samples = npt.NDArray[np.float64]


class Distribution(TypedDict):
    """A distribution; None without samples. Percentiles by nearest rank."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class Figures(TypedDict):
    """What a policy came to, over all its seeds.

    `hit_ratio`: cached prompt tokens over prompt tokens. `rejected_ratio`: refused by the scheduler or an engine.
    `kv_use_mean`: over engines and time. `spread`: the most loaded endpoint's mean in-flight over the mean of all.
    `vs_round_robin`: mean TTFT over round robin's. `hold_ms`: how long the scheduler kept requests, over all it
    answered; TTFT and E2E hold it. `refusals`: by reason.
    """

    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    hold_ms: Distribution
    hit_ratio: float
    rejected_ratio: float
    requests_per_s: float
    kv_use_mean: float
    spread: float
    vs_round_robin: float | None
    requests: int
    refusals: dict[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run in numbers, small enough to be sent between processes. `load` has a row a point of time.

    `arrival_s`, beside `ttft_ms`: when each answered request arrived, since the first one did.
    """

    ttft_ms: Samples
    tpot_ms: Samples
    e2e_ms: Samples
    hold_ms: Samples
    requests: int
    refusals: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    duration_s: float
    kv_use_mean: float
    load_times_s: Samples
    load: Samples
    arrival_s: Samples


def measure(run: Run, warmup_ms: float = 0.0) -> Measured:
    """Reduce a run to what results need, without the requests that arrived in the first `warmup_ms`."""
    records = [record for record in run.records if record.arrival_ms >= warmup_ms] if warmup_ms else run.records
    done = [record for record in records if record.finished_ms is not None]
    refusals: dict[str, int] = {}
    for record in records:
        if record.refused:
            refusals[record.refused] = refusals.get(record.refused, 0) + 1
    first = np.array([record.first_token_ms for record in done], np.float64)
    last = np.array([record.finished_ms for record in done], np.float64)
    arrival = np.array([record.arrival_ms for record in done], np.float64)
    following = np.array([record.output_tokens - 1 for record in done], np.float64)
    several = following > 0
    start_ms = min((record.arrival_ms for record in records), default=0.0)
    return Measured(
        ttft_ms=first - arrival,
        tpot_ms=(last - first)[several] / following[several],
        e2e_ms=last - arrival,
        hold_ms=np.array([record.held_ms for record in done], np.float64),
        requests=len(records),
        refusals=refusals,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(record.cached_tokens for record in done),
        duration_s=(float(last.max(initial=start_ms)) - start_ms) / 1e3,
        kv_use_mean=float(np.mean(run.timeline.kv_uses)),
        load_times_s=np.array(run.timeline.times_ms) / 1e3,
        load=np.array(run.timeline.loads, np.float64),
        arrival_s=(arrival - start_ms) / 1e3,
    )


def figures(runs: Sequence[Measured], baseline_ttft_ms: float | None) -> Figures:
    """All runs of one policy as one: samples pooled, ratios over the totals."""
    requests = sum(run.requests for run in runs)
    refusals: dict[str, int] = {}
    for run in runs:
        for reason, count in run.refusals.items():
            refusals[reason] = refusals.get(reason, 0) + count
    ttft = np.concatenate([run.ttft_ms for run in runs])
    duration_s = sum(run.duration_s for run in runs)
    load = np.concatenate([run.load for run in runs]).mean(axis=0)
    prompt_tokens = sum(run.prompt_tokens for run in runs)
    return Figures(
        ttft_ms=distribution(ttft),
        tpot_ms=distribution(np.concatenate([run.tpot_ms for run in runs])),
        e2e_ms=distribution(np.concatenate([run.e2e_ms for run in runs])),
        hold_ms=distribution(np.concatenate([run.hold_ms for run in runs])),
        hit_ratio=sum(run.cached_tokens for run in runs) / prompt_tokens if prompt_tokens else 0.0,
        rejected_ratio=sum(refusals.values()) / requests if requests else 0.0,
        requests_per_s=len(ttft) / duration_s if duration_s else 0.0,
        kv_use_mean=float(np.mean([run.kv_use_mean for run in runs])),
        spread=float(load.max() / load.mean()) if load.any() else 1.0,
        vs_round_robin=float(ttft.mean()) / baseline_ttft_ms if baseline_ttft_ms and len(ttft) else None,
        requests=requests,
        refusals=refusals,
    )


def distribution(samples: Samples) -> Distribution:
    """Mean, percentiles and largest."""
    if not len(samples):
        return Distribution(mean=None, p50=None, p90=None, p99=None, max=None)
    ordered = np.sort(samples)
    return Distribution(
        mean=float(ordered.mean()),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
        max=float(ordered[-1]),
    )


def percentile(ordered: Samples, percent: int) -> float:
    """The nearest rank in sorted samples."""
    return float(ordered[max(0, -(-percent * len(ordered) // 100) - 1)])
