"""What a tenant may use, in all and of each model: requests and tokens a minute, and requests in flight."""

from dataclasses import dataclass
from math import isinf
from typing import Final

import msgspec

from headway_scheduler.admission.saved import Level, SavedLevels
from headway_scheduler.domain.desired import Quotas, Tenant
from headway_scheduler.domain.rate_limits import RateLimit, RateLimits
from headway_scheduler.errors import TenantInflight, TenantRequests, TenantTokens

__all__ = ["QuotaBook"]

_NO_LIMITS: Final = Quotas()
_WHOLE: Final = ""
"""Stands for all of a tenant's models together."""


@dataclass(slots=True)
class _Bucket:
    """A token bucket: `per_minute` a minute, one minute's worth at most. It may go below zero, and then waits."""

    per_minute: float
    level: float
    at: float

    def refill(self, per_minute: float, now: float) -> None:
        if now == self.at and per_minute == self.per_minute:
            return
        self.per_minute = per_minute
        self.level = min(per_minute, self.level + max(0.0, now - self.at) * per_minute / 60)
        self.at = max(self.at, now)

    def give(self, amount: float) -> None:
        self.level = min(self.per_minute, self.level + amount)

    def owe(self, amount: float) -> None:
        """Take what was used already, whatever is there; nobody comes to owe more than a minute's worth by it."""
        self.level = max(self.level - amount, min(self.level, -self.per_minute))

    def wait_s(self, amount: float) -> float:
        """How long until `amount` is there; an amount above the whole bucket needs a full one."""
        if amount <= self.level:
            return 0.0
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * 60 / self.per_minute)


@dataclass(slots=True)
class _Account:
    """What one tenant uses, in all or of one model. `reserved`: tokens taken for what is in flight, by estimate."""

    inflight: int = 0
    reserved: float = 0.0
    requests: _Bucket | None = None
    tokens: _Bucket | None = None

    def limit(self, quotas: Quotas, now: float) -> None:
        """Set the buckets to these limits, and fill them by the time that passed."""
        if quotas.requests_per_minute or self.requests is not None:
            self.requests = _limited(self.requests, quotas.requests_per_minute, now)
        if quotas.tokens_per_minute or self.tokens is not None:
            self.tokens = _limited(self.tokens, quotas.tokens_per_minute, now)


class QuotaBook:
    """Every tenant's use. Each request that is admitted, or resumed, ends once: refunded, or settled.

    Tokens are taken on an estimate and settled when the request ends.
    """

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, str], _Account] = {}

    def admit(self, tenant: Tenant, model: str, tokens: float, now: float) -> None:
        """Take one request and `tokens` tokens, or raise what is used up; then nothing is taken."""
        whole = self._limited(tenant, _WHOLE, now)
        part = self._limited(tenant, model, now)
        _check(whole, tenant.id, _WHOLE, tenant.quotas, tokens)
        if model in tenant.model_quotas:
            _check(part, tenant.id, model, tenant.model_quotas[model], tokens)
        for account in (whole, part):
            account.inflight += 1
            account.reserved += tokens
            if account.requests is not None:
                account.requests.level -= 1
            if account.tokens is not None:
                account.tokens.level -= tokens

    def standing(self, tenant: str, now: float) -> RateLimits | None:
        """What the tenant has left in all; None: it has no quotas a minute."""
        account = self._accounts.get((tenant, _WHOLE))
        if account is None or (account.requests is None and account.tokens is None):
            return None
        return RateLimits(_limit_of(account.requests, now), _limit_of(account.tokens, now))

    def resume(self, tenant: Tenant, model: str, tokens: float, now: float, *, uncounted: bool) -> None:
        """Count what runs already. `uncounted`: no scheduler admitted it, so that it is one request more."""
        for account in (self._limited(tenant, _WHOLE, now), self._limited(tenant, model, now)):
            account.inflight += 1
            account.reserved += tokens
            if account.requests is not None and uncounted:
                account.requests.owe(1.0)
            if account.tokens is not None:
                account.tokens.owe(tokens)

    def refund(self, tenant: str, model: str, tokens: float) -> None:
        """The request was admitted and then not served: give back everything."""
        for key in ((tenant, _WHOLE), (tenant, model)):
            account = self._accounts.get(key)
            if account is not None and account.requests is not None:
                account.requests.give(1.0)
        self.settle(tenant, model, tokens, 0.0)

    def settle(self, tenant: str, model: str, estimated: float, actual: float) -> None:
        """It is over: give back what was estimated too much, or take what was too little. `actual` 0: it failed."""
        for key in ((tenant, _WHOLE), (tenant, model)):
            account = self._accounts.get(key)
            if account is None:
                continue
            account.inflight -= 1
            account.reserved = account.reserved - estimated if account.inflight else 0.0
            if account.tokens is not None:
                account.tokens.give(estimated - actual)
            elif account.requests is None and not account.inflight:
                del self._accounts[key]  # it says nothing any more

    def inflight(self, tenant: str, model: str = _WHOLE) -> int:
        """Requests admitted and not over, held ones among them."""
        account = self._accounts.get((tenant, model))
        return 0 if account is None else account.inflight

    def reserved(self, tenant: str, model: str = _WHOLE) -> float:
        """Tokens taken by estimate for what is in flight."""
        account = self._accounts.get((tenant, model))
        return 0.0 if account is None else account.reserved

    def dump(self, now: float, wall: float) -> bytes:
        """What is left, for another scheduler to go on from. What is in flight is not taken: its holders resume it."""
        levels = {
            f"{tenant}/{model}" if model else tenant: (
                _level(account.requests, 0.0, now, wall),
                _level(account.tokens, account.reserved, now, wall),
            )
            for (tenant, model), account in sorted(self._accounts.items())
            if account.requests is not None or account.tokens is not None
        }
        return msgspec.json.encode(SavedLevels(levels))

    def restore(self, state: bytes, now: float, wall: float) -> None:
        """Go on from what was saved; what has refilled since is added as each is used. Raises ValueError."""
        saved = msgspec.json.decode(state, type=SavedLevels)
        for name, (requests, tokens) in saved.levels.items():
            tenant, _, model = name.partition("/")
            account = self._accounts.setdefault((tenant, model), _Account())
            account.requests = _restored(requests, now, wall)
            account.tokens = _restored(tokens, now, wall)

    def _limited(self, tenant: Tenant, model: str, now: float) -> _Account:
        """The account, under the limits of now."""
        key = (tenant.id, model)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account()
        account.limit(tenant.model_quotas.get(model, _NO_LIMITS) if model else tenant.quotas, now)
        return account


def _limit_of(bucket: _Bucket | None, now: float) -> RateLimit | None:
    if bucket is None or isinf(bucket.per_minute):  # restored, and not used since: its quota is not known here
        return None
    bucket.refill(bucket.per_minute, now)
    return RateLimit(round(bucket.per_minute), max(0, int(bucket.level)), bucket.wait_s(bucket.per_minute))


def _check(account: _Account, tenant: str, model: str, quotas: Quotas, tokens: float) -> None:
    """Raise the quota that has no room for one more request of so many tokens."""
    if quotas.max_inflight and account.inflight >= quotas.max_inflight:
        who, facts = _named(tenant, model)
        message = f"{who} has {account.inflight} requests in flight, its limit"
        raise TenantInflight(message, retry_after_s=1.0, **facts)
    if account.requests is not None and (wait := account.requests.wait_s(1.0)) > 0:
        who, facts = _named(tenant, model)
        message = f"{who} has used its {quotas.requests_per_minute} requests a minute"
        raise TenantRequests(message, retry_after_s=wait, **facts)
    if account.tokens is not None and (wait := account.tokens.wait_s(tokens)) > 0:
        who, facts = _named(tenant, model)
        message = f"{who} has used its {quotas.tokens_per_minute} tokens a minute"
        raise TenantTokens(message, retry_after_s=wait, **facts)


def _named(tenant: str, model: str) -> tuple[str, dict[str, str]]:
    facts = {"tenant": tenant} | ({"model": model} if model else {})
    return f"tenant {tenant!r}" + (f", model {model!r}," if model else ""), facts


def _limited(bucket: _Bucket | None, per_minute: float, now: float) -> _Bucket | None:
    if not per_minute:
        return None
    if bucket is None:
        return _Bucket(per_minute, per_minute, now)
    bucket.refill(per_minute, now)
    return bucket


def _level(bucket: _Bucket | None, reserved: float, now: float, wall: float) -> Level | None:
    return None if bucket is None else (bucket.level + reserved, wall - (now - bucket.at))


def _restored(level: Level | None, now: float, wall: float) -> _Bucket | None:
    """Its limit is not known before it is used; a wall's clock that was set back refills nothing."""
    return None if level is None else _Bucket(float("inf"), level[0], now - max(0.0, wall - level[1]))
