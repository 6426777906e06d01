"""Synthetic workloads: pure objects, driven by the HTTP driver or by the simulator."""

from headway_sim.workloads.article import ArticleWorkload, Message, SessionTurns, Turn
from headway_sim.workloads.base import Workload
from headway_sim.workloads.catalog import EQUALS, FLOOD, MIXED, OVERLOAD, QUIET, WORKLOADS, NamedWorkload
from headway_sim.workloads.overload import ArticleOverload
from headway_sim.workloads.sessions import Lengths, OpenWorkload, SessionKind

__all__ = [
    "EQUALS",
    "FLOOD",
    "MIXED",
    "OVERLOAD",
    "QUIET",
    "WORKLOADS",
    "ArticleOverload",
    "ArticleWorkload",
    "Lengths",
    "Message",
    "NamedWorkload",
    "OpenWorkload",
    "SessionKind",
    "SessionTurns",
    "Turn",
    "Workload",
]
