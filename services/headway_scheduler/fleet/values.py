"""Who has a place where, in values made and copied in C (ADR 25); ledger.py moves them on."""

import msgspec

from headway_scheduler.domain.endpoint import EngineRole
from headway_scheduler.domain.request import TaskClass

__all__ = ["Booking", "Leg", "Owner", "Reservation"]


class Booking(msgspec.Struct, frozen=True, gc=False):
    """What one leg adds to an endpoint's columns, in the columns' own units."""

    weight_micro: int
    prefill_us: int
    prefill_tokens: int
    context_tokens: int
    kv_tokens: int
    uncapped_micro: int = 0
    prefill_work_us: int = 0


class Leg(msgspec.Struct, eq=False, gc=False):
    """A place on one endpoint: `prefilling` until its first token."""

    slot: int
    booking: Booking
    role: EngineRole = EngineRole.BOTH
    prefilling: bool = True

    def booked(self) -> tuple[int, int, int, int, int, int, int, int, int]:
        """What it adds now, in the order of columns.BOOKED."""
        b = self.booking
        if self.prefilling:
            prefill = b.prefill_us, b.prefill_tokens
            return (1, b.weight_micro, *prefill, 0, b.kv_tokens, b.uncapped_micro, 0, b.prefill_work_us)
        return (1, b.weight_micro, 0, 0, b.context_tokens, b.kv_tokens, b.uncapped_micro, 1, 0)


class Owner(msgspec.Struct, eq=False):
    """Who holds reservations: a stream (they live while it is open) or a unary caller (they live by TTL).

    `sends_first_token` is learned from its reports.
    """

    principal: str
    stream: bool
    sends_first_token: bool = False
    reservations: set[str] = msgspec.field(default_factory=set)


class Reservation(msgspec.Struct, eq=False, gc=False):
    """A request's place: one leg, or two when prefill and decode are apart. Times: scheduler clock, seconds.

    `claims` counts its owner's calls that were answered with it. `prefill_due` and `expires_at` are when time itself
    moves it on, `placed_at` is when it got its present legs; `blamed`: that it failed there is counted.
    """

    id: str
    owner: Owner | None
    principal: str
    tenant: str
    request_id: str
    model: str
    task_class: TaskClass
    legs: list[Leg]
    began_at: float
    predicted_s: float
    ttl_s: float
    claims: int = 1
    prompt_tokens: int = 0
    matched_tokens: int = 0
    predicted_ttft_ms: float | None = None
    first_token_at: float | None = None
    placed_at: float = 0.0
    blamed: bool = False
    prefill_due: float | None = None
    expires_at: float | None = None
    expiry_queued: float | None = None
    attachment: object = None

    @property
    def slot(self) -> int:
        """The endpoint that answers: the last leg's."""
        return self.legs[-1].slot

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes Route idempotent."""
        return (self.principal, self.tenant, self.request_id)
