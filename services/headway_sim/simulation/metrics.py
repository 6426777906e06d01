"""From runs to the figures one compares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import numpy.typing as npt
from headway_scheduler.admission.fairness import DEFAULT_WEIGHTS

from headway_sim.simulation.records import Record, Run

__all__ = ["Distribution", "Figures", "Measured", "OfTenant", "TenantFigures", "distribution", "figures", "measure"]

Samples = npt.NDArray[np.float64]


class Distribution(TypedDict):
    """A distribution; None without samples. Percentiles by nearest rank."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class TenantFigures(TypedDict):
    """What one tenant came to. `service_per_s`: as fair share counts it, of what was dispatched while requests came."""

    ttft_ms: Distribution
    requests: int
    rejected_ratio: float
    hit_ratio: float
    service_per_s: float


class Figures(TypedDict):
    """What a policy came to, over all its seeds.

    `hit_ratio`: cached prompt tokens over prompt tokens. `rejected_ratio`: refused by the scheduler or an engine.
    `kv_use_mean`: over engines and time. `spread`: the most loaded endpoint's mean in-flight over the mean of all.
    `vs_round_robin`: mean TTFT over round robin's. `hold_ms`: how long the scheduler kept requests, over all it
    answered; TTFT and E2E hold it. `refusals`: by reason. `tokens_per_s`: of prompts and answers that were complete
    while requests still came.
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
    tokens_per_s: float
    tenants: dict[str, TenantFigures]


@dataclass(frozen=True, slots=True)
class OfTenant:
    """One tenant's part of a run."""

    ttft_ms: Samples
    requests: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    service: float


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
    arriving_s: float = 0.0
    tokens: int = 0
    tenants: dict[str, OfTenant] = field(default_factory=dict)


def measure(run: Run, warmup_ms: float = 0.0, until_ms: float | None = None) -> Measured:
    """Reduce a run to what results need, without the requests that arrived in the first `warmup_ms` or later."""
    last_ms = math.inf if until_ms is None else until_ms
    records = [record for record in run.records if warmup_ms <= record.arrival_ms <= last_ms]
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
    last_arrival_ms = max((record.arrival_ms for record in records), default=0.0)
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
        arriving_s=(last_arrival_ms - start_ms) / 1e3,
        tokens=sum(
            record.prompt_tokens + record.output_tokens
            for record in done
            if (record.finished_ms or 0) <= last_arrival_ms
        ),
        tenants={
            tenant: _of_tenant([record for record in records if record.tenant == tenant], last_arrival_ms)
            for tenant in sorted({record.tenant for record in records})
        },
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
        tokens_per_s=_ratio(sum(run.tokens for run in runs), sum(run.arriving_s for run in runs)),
        tenants={tenant: _tenant_figures(runs, tenant) for tenant in sorted({t for run in runs for t in run.tenants})},
    )


def _of_tenant(records: Sequence[Record], last_arrival_ms: float) -> OfTenant:
    done = [record for record in records if record.finished_ms is not None]
    ttft_ms = [(record.first_token_ms or 0.0) - record.arrival_ms for record in done]
    early = [record for record in done if record.arrival_ms + record.held_ms <= last_arrival_ms]
    return OfTenant(
        ttft_ms=np.array(ttft_ms, np.float64),
        requests=len(records),
        refused=sum(bool(record.refused) for record in records),
        prompt_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(record.cached_tokens for record in done),
        service=sum(
            DEFAULT_WEIGHTS.service(record.prompt_tokens, record.cached_tokens, record.output_tokens)
            for record in early
        ),
    )


def _tenant_figures(runs: Sequence[Measured], tenant: str) -> TenantFigures:
    parts = [run.tenants[tenant] for run in runs if tenant in run.tenants]
    return TenantFigures(
        ttft_ms=distribution(np.concatenate([part.ttft_ms for part in parts])),
        requests=sum(part.requests for part in parts),
        rejected_ratio=_ratio(sum(part.refused for part in parts), sum(part.requests for part in parts)),
        hit_ratio=_ratio(sum(part.cached_tokens for part in parts), sum(part.prompt_tokens for part in parts)),
        service_per_s=_ratio(sum(part.service for part in parts), sum(run.arriving_s for run in runs)),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


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
