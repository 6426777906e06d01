"""THE list of peers. The first three are the scheduler's own classics; each other one is a file beside this."""

from collections.abc import Mapping
from typing import Final

from headway_scheduler.strategies.base import Strategy
from headway_scheduler.strategies.least_request import LeastRequest
from headway_scheduler.strategies.random import Random
from headway_scheduler.strategies.round_robin import RoundRobin

from headway_sim.policies.aibrix import Aibrix
from headway_sim.policies.chwbl import Chwbl
from headway_sim.policies.dynamo import Dynamo
from headway_sim.policies.higress_least import HigressLeast
from headway_sim.policies.higress_prefix import HigressPrefix
from headway_sim.policies.llmd import Llmd
from headway_sim.policies.lmetric import LMetric
from headway_sim.policies.lpwl import Lpwl
from headway_sim.policies.mooncake import Mooncake
from headway_sim.policies.power_of_two import PowerOfTwo
from headway_sim.policies.preble import Preble
from headway_sim.policies.sglang import Sglang
from headway_sim.policies.smetric import SMetric

__all__ = ["PEERS"]

_ALL: Final[tuple[type[Strategy], ...]] = (
    RoundRobin,
    Random,
    LeastRequest,
    PowerOfTwo,
    Chwbl,
    HigressLeast,
    HigressPrefix,
    Sglang,
    Aibrix,
    Llmd,
    Dynamo,
    LMetric,
    Lpwl,
    SMetric,
    Preble,
    Mooncake,
)

PEERS: Final[Mapping[str, type[Strategy]]] = {policy.name: policy for policy in _ALL}
"""Every peer by name, in the order of FIELD.md's table."""
