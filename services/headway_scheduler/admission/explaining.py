"""Explain: the whole table of a decision, reserving nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway_scheduler.admission.choosing import Chooser
from headway_scheduler.admission.guards import marked
from headway_scheduler.admission.prefixes import Prefixes
from headway_scheduler.admission.values import Choice, Work
from headway_scheduler.domain.decision import Why
from headway_scheduler.errors import HeadwayError
from headway_scheduler.fleet.fleet import Fleet
from headway_scheduler.fleet.members import Endpoint

__all__ = ["Explanation", "Row", "rows_of"]


@dataclass(frozen=True, slots=True)
class Row:
    """One endpoint as a decision sees it. `details`: what closed a guard, by its name, where there is more to say."""

    endpoint: Endpoint
    chosen: bool
    hard_guards: tuple[str, ...]
    soft_guards: tuple[str, ...]
    cost: float | None
    predicted_ttft_ms: float | None
    matched_tokens: int
    details: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a Route would do now: the reasons, every endpoint, and the refusal if there would be one."""

    why: Why | None
    rows: tuple[Row, ...]
    refusal: HeadwayError | None
    would_hold: bool


def rows_of(
    fleet: Fleet, prefixes: Prefixes, chooser: Chooser, work: Work, choice: Choice | None, whole: bool, now: float
) -> tuple[Row, ...]:
    """Every endpoint of the pool that the tenant may use; `whole`: the others too.

    The pool's other endpoints say nothing of this tenant's prefixes: chains are rooted in its isolation domain.
    """

    request = work.request
    own, burst = fleet.candidates(request.tenant, request.model, request.adapter)
    usable = {*own.tolist(), *burst.tolist()}
    seen = fleet.pool(request.model, request.adapter).tolist() if whole else sorted(usable)
    kept = set(chooser.within(request, np.array(sorted(usable), np.int32)).tolist())
    lane = () if choice is None else chooser.lane(request, now).tiers
    in_split = {slot for tier in lane for slot in tier.pool.slots.tolist()}
    positions = {} if choice is None else {slot: n for n, slot in enumerate(choice.slots.tolist())}
    hits = prefixes.match(work, now).tokens(np.array(seen, np.int32), fleet.columns.capacity)
    rows = []
    for number, slot in enumerate(seen):
        endpoint, position = fleet.by_slot[slot], positions.get(slot)
        closed = fleet.why_closed(endpoint)
        hard, details = list(closed), {guard: detail for guard, detail in closed.items() if detail}
        if slot not in usable:
            hard.insert(0, "not_in_group")
        elif slot not in kept:
            hard.insert(0, "excluded")
        elif choice is not None and slot not in in_split and not hard:
            hard.append("other_split")
        if choice is None or position is None:
            rows.append(Row(endpoint, False, tuple(hard), (), None, None, int(hits[number]), details))
            continue
        ttft = choice.priced.costs.predicted_ttft_ms
        soft = marked(choice.marks.item(position), choice.bits)
        rows.append(
            Row(
                endpoint,
                position == choice.position and choice.dispatchable,
                tuple(hard),
                soft,
                float(choice.priced.costs.cost[position]),
                None if ttft is None else float(ttft[position]),
                int(hits[number]),
                details | chooser.guards.details(slot),
            )
        )
    return tuple(rows)
