"""The Tenants pages: who may use what, what they used of it, their quotas, and who changed what."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from aiohttp import web
from google.protobuf import json_format
from google.protobuf.field_mask_pb2 import FieldMask
from headway.admin.v1 import admin_pb2 as pb
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.desired import Binding, Tenant
from headway_scheduler.domain.names import TENANTS
from headway_scheduler.domain.rate_limits import RateLimit, RateLimits
from headway_scheduler.domain.usage import Interval, Usage
from headway_scheduler.errors import InvalidField, StoreDown, UnknownTenant
from markupsafe import Markup

from headway_console.charts import Line, chart
from headway_console.doorkeeper import Visit
from headway_console.pages import PREFIX, Pages, see_other
from headway_console.writing import Admin

__all__ = ["TenantPages"]

_Standing = tuple[float | None, float | None]
"""A tenant's share granted and its share used."""
_AT_ONCE: Final = 500
_MINUTES: Final = 60
_AUDIT_SIZE: Final = 50
_QUOTAS: Final = (
    ("requests_per_minute", "Requests a minute"),
    ("tokens_per_minute", "Tokens a minute"),
    ("max_inflight", "Requests in flight"),
)


@dataclass(frozen=True, slots=True)
class Meter:
    """A quota and what is used of it now; `limit` 0: none, and then `used` may be None: nobody counts."""

    field: str
    words: str
    used: int | None
    limit: int

    @property
    def share(self) -> float | None:
        """Of the limit, 0 to 1 and beyond."""
        return None if self.used is None or not self.limit else self.used / self.limit


@dataclass(frozen=True, slots=True)
class TenantRow:
    """A tenant in the list. Shares are of what the tenants that compete with it got since the scheduler's start.

    `granted` None: nobody competes with it. `used` None: none of them got anything yet.
    """

    tenant: Tenant
    bindings: tuple[Binding, ...]
    endpoints: int
    granted: float | None
    used: float | None
    requests: int
    tokens: int
    meters: tuple[Meter, ...]


class TenantPages:
    """Tenants, GPU groups and the audit trail. `now` is the wall's clock."""

    def __init__(self, scheduler: Scheduler, pages: Pages, admin: Admin, now: Callable[[], datetime]) -> None:
        self._scheduler, self._pages, self._admin, self._now = scheduler, pages, admin, now

    async def overview(self, visit: Visit) -> web.Response:
        """All tenants and groups."""
        usage = await self._usage(Interval.TOTAL)
        desired, fleet = self._scheduler.desired, self._scheduler.fleet
        members: dict[str, int] = defaultdict(int)
        for number, endpoint in enumerate(list(fleet.endpoints.values())):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)  # let decisions pass
            for group in fleet.groups_of(endpoint):
                members[group] += 1
        return await self._pages.page(
            visit,
            "tenants.html",
            rows=await self._rows(usage or ()),
            usage_known=usage is not None,
            groups=sorted(desired.groups.values(), key=lambda group: group.id),
            members=members,
            bindings=desired.bindings,
        )

    async def tenant(self, visit: Visit) -> web.Response:
        """One tenant: its groups, quotas and an hour of usage."""
        name = visit.request.match_info["tenant"]
        tenant = self._scheduler.desired.tenants.get(name)
        if tenant is None:
            raise UnknownTenant(f"{TENANTS}/{name}", "name")
        usage = await self._usage(Interval.MINUTE, name)
        return await self._pages.page(
            visit,
            "tenant.html",
            row=self._row(tenant, usage or (), self._shares()),
            usage_known=usage is not None,
            usage_chart=self._usage_chart(usage or ()),
            by_model=_by_model(usage or ()),
        )

    async def set_quotas(self, visit: Visit, form: Mapping[str, str]) -> web.Response:
        """Change a tenant's quotas and weight."""
        name = visit.request.match_info["tenant"]
        quotas = pb.Quotas(**{field: _whole(form, field) for field, _ in _QUOTAS})
        tenant = pb.Tenant(name=f"{TENANTS}/{name}", quotas=quotas, weight=_weight(form), etag=form.get("etag", ""))
        request = pb.UpdateTenantRequest(tenant=tenant, update_mask=FieldMask(paths=["quotas", "weight"]))
        await self._admin.call(visit.principal, "UpdateTenant", request)
        visit.session.notice = f"The limits of {name} hold from the next request on."
        return see_other(f"{PREFIX}/tenants/{name}")

    async def audit(self, visit: Visit) -> web.Response:
        """Who changed what."""
        request = pb.ListAuditEntriesRequest(page_size=_AUDIT_SIZE, page_token=visit.query.get("page", ""))
        answer = await self._admin.call(visit.principal, "ListAuditEntries", request)
        entries = [(entry, _changes(entry)) for entry in answer.audit_entries]
        return await self._pages.page(visit, "audit.html", entries=entries, next_page=answer.next_page_token)

    # Inside

    async def _usage(self, interval: Interval, tenant: str = "") -> Sequence[Usage] | None:
        """The last hour's, the minute that runs included; None: the database cannot be reached."""
        until = self._now().replace(second=0, microsecond=0) + timedelta(minutes=1)
        since = until - timedelta(minutes=_MINUTES)
        try:
            return await self._scheduler.store.usage(since=since, until=until, tenant=tenant, interval=interval)
        except StoreDown:
            return None

    async def _rows(self, usage: Iterable[Usage]) -> list[TenantRow]:
        of, shares = defaultdict[str, list[Usage]](list), self._shares()
        for each in usage:
            of[each.tenant].append(each)
        tenants = sorted(self._scheduler.desired.tenants.values(), key=lambda tenant: tenant.id)
        rows = []
        for tenant in tenants:
            rows.append(self._row(tenant, of[tenant.id], shares))
            await asyncio.sleep(0)
        return rows

    def _row(self, tenant: Tenant, usage: Sequence[Usage], shares: Mapping[str, _Standing]) -> TenantRow:
        bindings = (b for b in self._scheduler.desired.bindings if b.tenant == tenant.id)
        granted, used = shares.get(tenant.id, (None, None))
        return TenantRow(
            tenant=tenant,
            bindings=tuple(sorted(bindings, key=lambda binding: binding.order)),
            endpoints=len(self._scheduler.fleet.open_to(tenant.id)),
            granted=granted,
            used=used,
            requests=sum(each.requests for each in usage),
            tokens=sum(_tokens(each) for each in usage),
            meters=self._meters(tenant),
        )

    def _shares(self) -> dict[str, _Standing]:
        """What each tenant was granted, and what it got, of all that those it competes with got."""
        every = self._scheduler.dispatcher.fair.shares()
        weights, services = defaultdict[str, float](float), defaultdict[str, float](float)
        for share in every:
            weights[share.arena] += share.weight
            services[share.arena] += share.service
        return {
            share.tenant: (
                share.weight / weights[share.arena],
                share.service / services[share.arena] if services[share.arena] else None,
            )
            for share in every
        }

    def _meters(self, tenant: Tenant) -> tuple[Meter, ...]:
        """What is used of each limit now."""
        scheduler, quotas = self._scheduler, tenant.quotas
        book = scheduler.dispatcher.quotas
        standing = book.standing(tenant.id, scheduler.clock()) or RateLimits()
        used = {
            "requests_per_minute": _used(standing.requests),
            "tokens_per_minute": _used(standing.tokens),
            "max_inflight": book.inflight(tenant.id),
        }
        return tuple(
            Meter(field, words, 0 if used[field] is None and limit else used[field], limit)
            for field, words in _QUOTAS
            for limit in [getattr(quotas, field)]
        )

    def _usage_chart(self, usage: Iterable[Usage]) -> Markup:
        """Tokens a minute over the last hour."""
        first = self._now().replace(second=0, microsecond=0) - timedelta(minutes=_MINUTES - 1)
        prompt, cached, completion = ([0.0] * _MINUTES for _ in range(3))
        for each in usage:
            minute = int((each.minute - first).total_seconds() // 60)
            if 0 <= minute < _MINUTES:
                prompt[minute] += each.prompt_tokens
                cached[minute] += each.cached_tokens
                completion[minute] += each.completion_tokens
        lines = [Line("Prompt", prompt, 1), Line("Cached", cached, 2), Line("Answered", completion, 3)]
        return chart(lines, "Tokens a minute", span="1 hour ago")


def _used(limit: RateLimit | None) -> int | None:
    return None if limit is None else limit.limit - limit.remaining


def _by_model(usage: Iterable[Usage]) -> list[Usage]:
    models: dict[str, Usage] = {}
    for each in usage:
        before = models.get(each.model)
        models[each.model] = each if before is None else before.plus(each)
    return sorted(models.values(), key=_tokens, reverse=True)


def _tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens


def _whole(form: Mapping[str, str], field: str) -> int:
    text = form.get(field, "").strip() or "0"
    if not (text.isascii() and text.isdecimal() and int(text) < 2**32):
        raise InvalidField(f"tenant.quotas.{field}", f"{text!r} is no whole number from 0 on")
    return int(text)


def _weight(form: Mapping[str, str]) -> float:
    try:
        return float(form.get("weight", "1"))
    except ValueError:
        raise InvalidField("tenant.weight", "is no number") from None


def _changes(entry: pb.AuditEntry) -> list[tuple[str, str, str]]:
    """What a write changed: the field, before, after."""
    before, after = _flat(json_format.MessageToDict(entry.before)), _flat(json_format.MessageToDict(entry.after))
    return [
        (key, before.get(key, ""), after.get(key, ""))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and key not in ("etag", "updateTime", "update_time")
    ]


def _flat(value: Any, path: str = "") -> dict[str, str]:  # a JSON object
    if isinstance(value, dict) and value:
        return {key: text for name, each in value.items() for key, text in _flat(each, _joined(path, name)).items()}
    return {path: value if isinstance(value, str) else json.dumps(value)} if path else {}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
