"""Where a request may go: lanes of a model's splits, each with tiers that are tried in order."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from headway_scheduler.fleet.columns import Pool, Slots

__all__ = ["Lane", "Tier", "narrowed", "within"]

_NONE: Final = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Tier:
    """Endpoints of equal standing for a tenant and model. `burst`: only borrowed, those who own them go first."""

    pool: Pool
    burst: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """The tiers of one of a model's splits, in order; a model without splits has one lane.

    `weight`: its share of the requests; 0: of none while another lane is there.
    """

    split: str
    weight: float
    tiers: tuple[Tier, ...]


def narrowed(lanes: Iterable[Lane], keep: Callable[[Slots], Slots]) -> tuple[Lane, ...]:
    """The lanes with what `keep` leaves of each tier's slots; what is empty then is left out."""
    found = []
    for lane in lanes:
        kept = ((keep(tier.pool.slots), tier.burst) for tier in lane.tiers)
        tiers = tuple(Tier(Pool.of(slots), burst) for slots, burst in kept if len(slots))
        if tiers:
            found.append(Lane(lane.split, lane.weight, tiers))
    return tuple(found)


def within(pool: Slots, allowed: frozenset[int]) -> Slots:
    """Those of a pool that are allowed."""
    if not allowed or not len(pool):
        return _NONE
    return np.array([slot for slot in pool.tolist() if slot in allowed], np.int32)
