"""What the scheduler decided, and why."""

from collections.abc import Mapping

import msgspec

from headway_scheduler.domain.endpoint import EndpointSpec
from headway_scheduler.domain.rate_limits import RateLimits
from headway_scheduler.domain.request import TaskClass

__all__ = ["Decision", "Placement", "PrefixHolder", "Why"]


class Placement(msgspec.Struct, frozen=True, gc=False):
    """An endpoint as an answer names it. `headers`: what a request for it must carry, to reach its rank."""

    spec: EndpointSpec
    node: str
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class Why(msgspec.Struct, frozen=True, gc=False):
    """The reasons of a decision. `strategy` is a strategy's id, or a classic's algorithm when it stood in."""

    strategy: str
    fell_back_from: str
    fallback_reason: str
    prompt_tokens: int
    matched_tokens: int
    predicted_ttft_ms: float | None
    task_class: TaskClass
    task_weight: float
    candidates: int
    held_ms: float = 0.0


class PrefixHolder(msgspec.Struct, frozen=True, gc=False):
    """An endpoint that holds so many tokens of the prompt, from its beginning."""

    placement: Placement
    tokens: int


class Decision(msgspec.Struct, frozen=True, gc=False):
    """An endpoint chosen and a place reserved on it. `rate_limits`: of a tenant that has quotas."""

    request_id: str
    reservation_id: str
    ttl_s: float
    model: str
    endpoint: Placement
    prefill_endpoint: Placement | None
    fallbacks: tuple[Placement, ...]
    why: Why
    cache_salt: str = ""
    pull_from: PrefixHolder | None = None
    rate_limits: RateLimits | None = None
