"""What a strategy is: a pure function from a request and the candidates' columns to a cost for each.

No I/O, no clock, no randomness of its own: `now` and `View.random` are given. The core picks the lowest cost and
breaks ties; guards and holds are admission's.
"""

from enum import StrEnum
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import msgspec
from pydantic import BaseModel, ConfigDict

from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.columns import FloatColumn
from headway_scheduler.strategies.view import View

__all__ = ["SLOWED_DOWN", "BindsLate", "Costs", "Parameters", "Priced", "SoftGuard", "Strategy"]


class SoftGuard(StrEnum):
    """What can forbid dispatch for now."""

    __hash__ = str.__hash__  # an enumeration's own is Python code, and this one is looked up at every decision

    HEAT = "heat"
    """A device is above its slowdown temperature."""
    THROTTLE = "throttle"
    """A device says that its hardware slows it down."""
    POWER_BRAKE = "power_brake"
    """A device says that something outside it, such as its power supply, slows it down."""
    MEMORY_PRESSURE = "memory_pressure"
    KV_ROOM = "kv_room"


SLOWED_DOWN: Final = frozenset({SoftGuard.HEAT, SoftGuard.THROTTLE, SoftGuard.POWER_BRAKE})
"""The guards that say that a device is slower than it should be."""


class Parameters(BaseModel):
    """Base of a strategy's parameters: unknown keys are errors, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Costs(msgspec.Struct, frozen=True, gc=False):
    """One cost a candidate, lower is better; where the strategy predicts them, the TTFT and the own prefill there."""

    cost: FloatColumn
    predicted_ttft_ms: FloatColumn | None = None
    prefill_ms: FloatColumn | None = None


class Priced(msgspec.Struct, frozen=True, gc=False):
    """What a strategy, or what stood in for it, answered."""

    costs: Costs
    strategy: str
    guards: frozenset[SoftGuard]
    fell_back_from: str = ""
    fallback_reason: str = ""
    window_ms: float | None = None


class Strategy(Protocol):
    """A policy that prices endpoints.

    `name` is the algorithm's in the catalogue; `parameters_type` describes and checks what can be tuned; `classic`
    strategies need nothing learned and may stand in for others; `guards` are the soft guards it wants obeyed.
    """

    name: ClassVar[str]
    parameters_type: ClassVar[type[Parameters]]
    classic: ClassVar[bool]
    guards: ClassVar[frozenset[SoftGuard]]

    def __init__(self, parameters: Any) -> None:  # an instance of parameters_type
        ...

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate of `view`."""
        ...


@runtime_checkable
class BindsLate(Protocol):
    """A strategy that waits for the cheapest endpoint, where others take the cheapest that the guards allow."""

    @property
    def window_ms(self) -> float | None:
        """A request is given to its endpoint only while less prefill, in the engine's milliseconds, is queued there.

        None: bind at once, as all others do.
        """
        ...
