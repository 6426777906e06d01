"""What a tenant may use: requests and tokens a minute, and requests in flight."""

from dataclasses import dataclass
from math import isinf

import msgspec

from headway_scheduler.domain.desired import Tenant
from headway_scheduler.domain.rate_limits import RateLimit, RateLimits
from headway_scheduler.errors import TenantInflight, TenantRequests, TenantTokens

__all__ = ["QuotaBook"]


@dataclass(slots=True)
class _Bucket:
    """A token bucket: `per_minute` a minute, one minute's worth at most. It may go below zero, and then waits."""

    per_minute: float
    level: float
    at: float

    def refill(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self.level = min(per_minute, self.level + max(0.0, now - self.at) * per_minute / 60)
        self.at = max(self.at, now)

    def give(self, amount: float) -> None:
        self.level = min(self.per_minute, self.level + amount)

    def wait_s(self, amount: float) -> float:
        """How long until `amount` is there; an amount above the whole bucket needs a full one."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * 60 / self.per_minute)


class _Saved(msgspec.Struct):
    """What each tenant had left, `at` a time of the wall clock: (requests, tokens), None where it has no quota."""

    at: float
    levels: dict[str, tuple[float | None, float | None]]


class QuotaBook:
    """Every tenant's buckets. Tokens are taken on an estimate and settled when the request ends."""

    def __init__(self) -> None:
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}

    def admit(self, tenant: Tenant, tokens: float, inflight: int, now: float) -> None:
        """Take one request and `tokens` tokens, or raise what is used up; then nothing is taken."""
        quotas = tenant.quotas
        facts = {"tenant": tenant.id}
        if quotas.max_inflight and inflight >= quotas.max_inflight:
            message = f"tenant {tenant.id!r} has {inflight} requests in flight, its limit"
            raise TenantInflight(message, retry_after_s=1.0, **facts)
        requests = _bucket(self._requests, tenant.id, quotas.requests_per_minute, now)
        if requests is not None and (wait := requests.wait_s(1.0)) > 0:
            message = f"tenant {tenant.id!r} has used its {quotas.requests_per_minute} requests a minute"
            raise TenantRequests(message, retry_after_s=wait, **facts)
        budget = _bucket(self._tokens, tenant.id, quotas.tokens_per_minute, now)
        if budget is not None and (wait := budget.wait_s(tokens)) > 0:
            message = f"tenant {tenant.id!r} has used its {quotas.tokens_per_minute} tokens a minute"
            raise TenantTokens(message, retry_after_s=wait, **facts)
        if requests is not None:
            requests.level -= 1
        if budget is not None:
            budget.level -= tokens

    def standing(self, tenant: str, now: float) -> RateLimits | None:
        """What the tenant has left; None: it has no quotas a minute."""
        requests, tokens = self._requests.get(tenant), self._tokens.get(tenant)
        if requests is None and tokens is None:
            return None
        return RateLimits(_limit_of(requests, now), _limit_of(tokens, now))

    def refund(self, tenant: str, tokens: float) -> None:
        """The request was admitted and then not served: give back everything."""
        requests = self._requests.get(tenant)
        if requests is not None:
            requests.give(1.0)
        self.settle(tenant, tokens, 0.0)

    def settle(self, tenant: str, estimated: float, actual: float) -> None:
        """Give back what was estimated too much, or take what was too little. `actual` 0: the request failed."""
        budget = self._tokens.get(tenant)
        if budget is not None:
            budget.give(estimated - actual)

    def dump(self, now: float, wall: float) -> bytes:
        """What is left, for another scheduler to go on from."""
        books = (self._requests, self._tokens)
        tenants = {tenant for book in books for tenant in book}
        levels = {tenant: tuple(_level(book.get(tenant), now) for book in books) for tenant in sorted(tenants)}
        return msgspec.json.encode({"at": wall, "levels": levels})

    def restore(self, state: bytes, now: float, wall: float) -> None:
        """Go on from what was saved; what has refilled since is added as each is used. Raises ValueError."""
        saved = msgspec.json.decode(state, type=_Saved)
        since = now - max(0.0, wall - saved.at)
        for tenant, levels in saved.levels.items():
            for book, level in zip((self._requests, self._tokens), levels, strict=True):
                if level is not None:
                    book[tenant] = _Bucket(float("inf"), level, since)


def _limit_of(bucket: _Bucket | None, now: float) -> RateLimit | None:
    if bucket is None or isinf(bucket.per_minute):  # restored, and not used since: its quota is not known here
        return None
    bucket.refill(bucket.per_minute, now)
    return RateLimit(round(bucket.per_minute), max(0, int(bucket.level)), bucket.wait_s(bucket.per_minute))


def _level(bucket: _Bucket | None, now: float) -> float | None:
    if bucket is None:
        return None
    bucket.refill(bucket.per_minute, now)
    return bucket.level


def _bucket(buckets: dict[str, _Bucket], tenant: str, per_minute: float, now: float) -> _Bucket | None:
    if not per_minute:
        buckets.pop(tenant, None)
        return None
    bucket = buckets.get(tenant)
    if bucket is None:
        bucket = buckets[tenant] = _Bucket(per_minute, per_minute, now)
    bucket.refill(per_minute, now)
    return bucket
