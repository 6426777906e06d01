"""THE list of strategies. A new one is a file beside this and a line here; third parties use the entry-point group."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Final

import structlog

from headway_scheduler.strategies.adaptive import Adaptive
from headway_scheduler.strategies.base import Strategy
from headway_scheduler.strategies.consistent_hash import ConsistentHash
from headway_scheduler.strategies.global_least_request import GlobalLeastRequest
from headway_scheduler.strategies.gpu_aware import GpuAware
from headway_scheduler.strategies.least_request import LeastRequest
from headway_scheduler.strategies.prefix_match import PrefixMatch
from headway_scheduler.strategies.random import Random
from headway_scheduler.strategies.round_robin import RoundRobin

__all__ = ["BUILT_IN", "ENTRY_POINTS", "algorithms"]

ENTRY_POINTS: Final = "headway.strategies"

log = structlog.get_logger()

BUILT_IN: Final[tuple[type[Strategy], ...]] = (
    RoundRobin,
    Random,
    LeastRequest,
    ConsistentHash,
    GlobalLeastRequest,
    PrefixMatch,
    GpuAware,
    Adaptive,
)


def algorithms() -> Mapping[str, type[Strategy]]:
    """Every algorithm by name: the built-in ones, then those that installed packages offer and that can be loaded."""
    found: dict[str, type[Strategy]] = {strategy.name: strategy for strategy in BUILT_IN}
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            found.setdefault(entry.name, entry.load())
        except Exception:  # anyone's code: it must not keep the scheduler from starting
            log.exception("strategy_not_loaded", algorithm=entry.name, source=entry.value)
    return found
