"""What timing.py follows, in values made and copied in C (ADR 25)."""

import msgspec

__all__ = ["Done", "Flight", "Observation", "Period"]


class Observation(msgspec.Struct, frozen=True, gc=False):
    """So much work took `actual_ms`; amounts in the order of COEFFICIENTS, and how uncertain it is."""

    amounts: tuple[float, float, float, float, float]
    actual_ms: float
    noise_ms: float


class Flight(msgspec.Struct, eq=False):
    """A request on its way through an engine. Times: scheduler clock, seconds. `usable`: its times mean something."""

    slot: int
    sent_at: float
    uncached: float
    hit: float
    alone: bool
    usable: bool = True
    counted: bool = False
    over: bool = False
    first_at: float | None = None
    period: "Period | None" = None
    seen: "Done | None" = None


class Done(msgspec.Struct, eq=False):
    """What an endpoint has done so far: prefill in tokens and pairs, and context and batch times seconds of decode."""

    tokens: float = 0.0
    pairs: float = 0.0
    context_s: float = 0.0
    batch_s: float = 0.0


class Period(msgspec.Struct, eq=False):
    """A busy period. `stages`: steps that brought first tokens. `cut`: it goes on from where another one was cut."""

    start: float
    end: float
    cut: bool
    usable: bool
    decoding: bool
    stages: int = 0
    context_s: float = 0.0
    batch_s: float = 0.0
    members: list[Flight] = msgspec.field(default_factory=list)
    open: bool = True
