"""Engine ranks: who they are and what they last said."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from headway_scheduler.domain.measurement import UNKNOWN, Measurement
from headway_scheduler.domain.names import endpoint_id

__all__ = ["EndpointSpec", "EngineRole", "EngineSample", "SchedulingState"]


class EngineRole(StrEnum):
    """Which legs of a request the engine runs."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class SchedulingState(StrEnum):
    """An admin's word on a node or an endpoint."""

    ACTIVE = "active"
    CORDONED = "cordoned"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """One engine rank, keyed by (address, dp_rank). Two specs are equal when nothing changed."""

    address: str
    dp_rank: int = 0
    engine: str = ""
    engine_version: str = ""
    role: EngineRole = EngineRole.BOTH
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    device_uuids: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    kv_capacity_tokens: Measurement = UNKNOWN
    block_size_tokens: Measurement = UNKNOWN
    max_num_seqs: Measurement = UNKNOWN
    hardware: str = ""
    engine_boot_id: str = ""
    ready: bool = True
    pulls_prefixes: bool = False

    @property
    def id(self) -> str:
        """`10.0.0.1:8000@0`."""
        return endpoint_id(self.address, self.dp_rank)


class EngineSample(msgspec.Struct, frozen=True):
    """What an engine's metrics said: counts of requests, KV use 0 to 1, counters in tokens."""

    address: str
    dp_rank: int = 0
    running: Measurement = UNKNOWN
    waiting: Measurement = UNKNOWN
    kv_use: Measurement = UNKNOWN
    prefix_queries: Measurement = UNKNOWN
    prefix_hits: Measurement = UNKNOWN
    ready: bool = True

    @property
    def id(self) -> str:
        """The endpoint's id."""
        return endpoint_id(self.address, self.dp_rank)
