"""What tenants do to each other: a quiet one beside a flood, and equal ones that all ask for too much.

Each order of holds is run on the same requests: fair share, none (`shortest`, the best without it), first come first
served (`arrival`), and the counters' paper's own order, in which nobody overtakes (`strict`).
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, TypedDict

from headway_scheduler.admission.holds import HoldOrder

from headway_sim.simulation.metrics import Figures, figures
from headway_sim.simulation.router import Policy
from headway_sim.simulation.scenario import Runner, Scenario, Task
from headway_sim.workloads import EQUALS, FLOOD, QUIET

__all__ = ["FLEET", "OrderFigures", "Tenancy", "compare_tenants", "jain"]

FLEET: Final = "4xa100-40g-8b"
_DEDICATED: Final = (("quiet", 2),)
_WARMUP_S: Final = 8.0
_UNTIL_S: Final = 30.0
"""When sessions no longer start: what arrives later meets a fleet that is emptying."""
_WINDOW_MS: Final = 200.0
_UNFAIR: Final = (HoldOrder.SHORTEST, HoldOrder.ARRIVAL)


class QuietFigures(TypedDict):
    """The quiet tenant's p99 TTFT: alone, beside the flood, the second over the first; on a fleet of each kind.

    `shared_limit_ms`: one and a half times what it is alone, and one dispatch window.
    """

    ttft_p99_alone_ms: dict[str, float]
    ttft_p99_ms: dict[str, float]
    ttft_p99_vs_alone: dict[str, float]
    shared_limit_ms: float


class OrderFigures(TypedDict):
    """What an order of holds came to, on the shared fleet. `jain`: of the equal tenants' service."""

    quiet_ttft_p99_ms: float
    quiet_rejected_ratio: float
    noisy_ttft_p99_ms: float
    tokens_per_s: float
    equal_tokens_per_s: float
    requests_per_s: float
    hit_ratio: float
    equal_hit_ratio: float
    jain: float


class Tenancy(TypedDict):
    """The whole comparison. `throughput_vs_unfair` and `hit_points_vs_unfair` are the worse of flood and equals.

    Throughput is of tokens, against the best unfair order; hits are percentage points above the same strategy without
    fair share.
    """

    quiet: QuietFigures
    orders: dict[str, OrderFigures]
    throughput_vs_unfair: float
    hit_points_vs_unfair: float
    jain: float


def compare_tenants(policy: Policy, seeds: int, run: Runner, fleet: str = FLEET) -> Tenancy:
    """Run it all: two kinds of fleet with the quiet tenant alone and beside the flood, every order, equal tenants."""
    alone = [_scenario(QUIET, fleet), _scenario(QUIET, fleet, dedicated=True)]
    beside = [_scenario(FLOOD, fleet, dedicated=True)]
    ordered = [_scenario(workload, fleet, order) for workload in (FLOOD, EQUALS) for order in HoldOrder]
    scenarios = [*alone, *beside, *ordered]
    results = iter(run([Task(scenario, policy, seed) for scenario in scenarios for seed in range(seeds)]))
    found = [figures(list(islice(results, seeds)), None) for _ in scenarios]
    shared_alone, dedicated_alone, dedicated = (_p99(each, "quiet") for each in found[:3])
    floods = dict(zip(HoldOrder, found[3 : 3 + len(HoldOrder)], strict=True))
    equals = dict(zip(HoldOrder, found[3 + len(HoldOrder) :], strict=True))
    shared = _p99(floods[HoldOrder.FAIR], "quiet")
    return Tenancy(
        quiet=QuietFigures(
            ttft_p99_alone_ms={"shared": shared_alone, "dedicated": dedicated_alone},
            ttft_p99_ms={"shared": shared, "dedicated": dedicated},
            ttft_p99_vs_alone={"shared": shared / shared_alone, "dedicated": dedicated / dedicated_alone},
            shared_limit_ms=1.5 * shared_alone + _WINDOW_MS,
        ),
        orders={order.value: _order_figures(floods[order], equals[order]) for order in HoldOrder},
        throughput_vs_unfair=min(_throughput_ratio(each) for each in (floods, equals)),
        hit_points_vs_unfair=100
        * min(each[HoldOrder.FAIR]["hit_ratio"] - each[HoldOrder.SHORTEST]["hit_ratio"] for each in (floods, equals)),
        jain=_jain_of(equals[HoldOrder.FAIR]),
    )


def jain(shares: Iterable[float]) -> float:
    """Jain's index: 1 where all get the same, 1/n where one gets everything (Jain, Chiu, Hawe, 1984)."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _scenario(workload: str, fleet: str, order: HoldOrder = HoldOrder.FAIR, *, dedicated: bool = False) -> Scenario:
    return Scenario(
        workload=workload,
        fleet=fleet,
        warmup_s=_WARMUP_S,
        until_s=_UNTIL_S,
        hold_order=order,
        dedicated=_DEDICATED if dedicated else (),
    )


def _order_figures(flood: Figures, equals: Figures) -> OrderFigures:
    return OrderFigures(
        quiet_ttft_p99_ms=_p99(flood, "quiet"),
        quiet_rejected_ratio=flood["tenants"]["quiet"]["rejected_ratio"],
        noisy_ttft_p99_ms=_p99(flood, "noisy"),
        tokens_per_s=flood["tokens_per_s"],
        equal_tokens_per_s=equals["tokens_per_s"],
        requests_per_s=flood["requests_per_s"],
        hit_ratio=flood["hit_ratio"],
        equal_hit_ratio=equals["hit_ratio"],
        jain=_jain_of(equals),
    )


def _p99(found: Figures, tenant: str) -> float:
    return found["tenants"][tenant]["ttft_ms"]["p99"] or 0.0


def _jain_of(found: Figures) -> float:
    return jain(tenant["service_per_s"] for tenant in found["tenants"].values())


def _throughput_ratio(by_order: dict[HoldOrder, Figures]) -> float:
    best = max(_rates(by_order, _UNFAIR))
    return by_order[HoldOrder.FAIR]["tokens_per_s"] / best if best else 1.0


def _rates(by_order: dict[HoldOrder, Figures], orders: Sequence[HoldOrder]) -> list[float]:
    return [by_order[order]["tokens_per_s"] for order in orders]
