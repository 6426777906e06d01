"""Routing without a scheduler, on the last view it gave.

The choice is the least in-flight: what the view counted, corrected by what this client began and ended since.
It never leaves the tenant's allowed endpoints; whoever is not in the view is not served.
"""

import hashlib
import random
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from headway.routing.v1 import routing_pb2 as pb

__all__ = ["FailOpenRouter", "tenant_id"]

_MAX_FALLBACKS = 2
_MAX_LEARNED = 10_000
_MAX_COMPARED = 64
"""A larger pool is sampled: the least of so many is nearly the least of all, at a bounded cost."""

_Key = TypeVar("_Key")


def tenant_id(name: str) -> str:
    """Return `acme` for `tenants/acme` and for `acme`."""
    return name.removeprefix("tenants/")


class FailOpenRouter:
    """Holds the view and what answered routes taught: aliases and cache salts."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._view: pb.FailOpenView | None = None
        self._pools: dict[tuple[str, str], list[pb.FailOpenView.Entry]] = {}
        self._own: Counter[str] = Counter()
        self._own_at_view: Counter[str] = Counter()
        self._aliases: OrderedDict[str, str] = OrderedDict()
        self._salts: OrderedDict[tuple[str, str], str] = OrderedDict()

    @property
    def view(self) -> pb.FailOpenView | None:
        """The last view, None before the first."""
        return self._view

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to route on: no view yet, or one of a fleet without endpoints."""
        return self._view is None or not self._view.endpoints

    def update(self, view: pb.FailOpenView) -> None:
        """Take a new view; its in-flight counts include what this client has running now.

        An empty one does not replace one that offers something: a scheduler that just started has met no agent yet,
        and the view counts only once it is gone again.
        """
        if not self.is_empty and not view.endpoints:
            return
        self._view = view
        self._own_at_view = self._own.copy()
        self._pools.clear()

    def learn(self, request: pb.RouteRequest, response: pb.RouteResponse) -> None:
        """Remember what an answer says about the model's name and the tenant's cache salt."""
        if response.model and response.model != request.model:
            _remember(self._aliases, request.model, response.model)
        if response.cache_salt:
            _remember(self._salts, (self._tenant(request.tenant), response.model), response.cache_salt)

    def begin(self, endpoint: str) -> None:
        """Count a reservation on this endpoint (a name)."""
        self._own[endpoint] += 1

    def end(self, endpoint: str) -> None:
        """Stop counting it."""
        self._own[endpoint] -= 1
        if self._own[endpoint] <= 0:
            del self._own[endpoint]

    def is_ours(self, request: pb.RouteRequest) -> bool:
        """Shall this request be placed here although a scheduler answers: bypassed, or beyond what it routes?"""
        view = self._view
        if view is None or not (view.bypassed or view.routed_percent):
            return False
        tenant = self._tenant(request.tenant)
        if any(name in ("*", tenant) for name in view.bypassed):
            return True
        percent = view.routed_percent.get(tenant, 100)
        return zlib.crc32((request.session_id or request.request_id).encode()) % 100 >= percent

    def models(self, tenant: str) -> list[str]:
        """Return the models this tenant may use, sorted."""
        return sorted({model for entry in self._allowed(tenant) for model in entry.models})

    def choose(self, request: pb.RouteRequest, reservation_id: str) -> pb.RouteResponse | None:
        """Return an answer as the scheduler would shape it, or None where the view offers nothing."""
        model = self._aliases.get(request.model, request.model)
        tenant = self._tenant(request.tenant)
        entries = self._pool(tenant, model)
        if request.excluded_endpoints or request.HasField("subset"):
            entries = [entry for entry in entries if _eligible(entry, request)]
        if not entries:
            return None
        compared = entries if len(entries) <= _MAX_COMPARED else self._rng.sample(entries, _MAX_COMPARED)
        ranked = sorted(compared, key=lambda entry: (self._load(entry), self._rng.random()))
        chosen, *others = [entry.endpoint for entry in ranked[: 1 + _MAX_FALLBACKS]]
        return pb.RouteResponse(
            request_id=request.request_id,
            endpoint=chosen,
            fallbacks=others,
            reservation_id=reservation_id,
            decision=pb.Decision(strategy="fail_open", candidates=len(entries), prompt_tokens=_prompt_tokens(request)),
            cache_salt=self._salt(tenant, model),
            model=model,
        )

    def _tenant(self, name: str) -> str:
        """Whom a request is for; without a name, as the scheduler said."""
        return tenant_id(name) or (self._view.default_tenant if self._view is not None else "")

    def _pool(self, tenant: str, model: str) -> list[pb.FailOpenView.Entry]:
        pool = self._pools.get((tenant, model))
        if pool is None:
            pool = [entry for entry in self._allowed(tenant) if model in entry.models]
            if len(self._pools) < _MAX_LEARNED:
                self._pools[tenant, model] = pool
        return pool

    def _allowed(self, tenant: str) -> Iterable[pb.FailOpenView.Entry]:
        wanted = self._tenant(tenant)
        for entry in self._view.endpoints if self._view is not None else ():
            if any(name == "*" or (wanted and tenant_id(name) == wanted) for name in entry.tenants):
                yield entry

    def _load(self, entry: pb.FailOpenView.Entry) -> int:
        own = self._own[entry.endpoint.name]
        return max(own, entry.inflight + own - self._own_at_view[entry.endpoint.name])

    def _salt(self, tenant: str, model: str) -> str:
        learned = self._salts.get((tenant, model))
        if learned is not None or not self._salts:
            return learned or ""
        # Isolation is on, but this tenant's salt is unknown: one of its own costs it hits, never secrecy.
        return "fail-open-" + hashlib.sha256(f"{tenant}\0{model}".encode()).hexdigest()[:24]


def _eligible(entry: pb.FailOpenView.Entry, request: pb.RouteRequest) -> bool:
    if request.subset.labels:  # The view has no labels, so none can be shown to match.
        return False
    if any(_names(entry.endpoint, name) for name in request.excluded_endpoints):
        return False
    subset = request.subset.endpoints
    return not subset or any(_names(entry.endpoint, name) for name in subset)


def _names(endpoint: pb.Endpoint, name: str) -> bool:
    host = endpoint.address.rpartition(":")[0]
    return name in (endpoint.name, endpoint.address, host)


def _remember(known: OrderedDict[_Key, str], key: _Key, value: str) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _MAX_LEARNED:
        known.popitem(last=False)


def _prompt_tokens(request: pb.RouteRequest) -> int:
    """Return the prompt's length; text counts four bytes a token, the scheduler's own prior."""
    match request.WhichOneof("prompt"):
        case "tokens":
            return len(request.tokens.ids)
        case "blocks":
            return request.blocks.prompt_tokens
        case "text":
            return -(-len(request.text.encode()) // 4)
        case "chat":
            return -(-sum(len(message.content.encode()) for message in request.chat.messages) // 4)
        case _:
            return 0
