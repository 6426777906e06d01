"""What every kind of resource has in common: get, list, create, update and delete, as the AIPs have it."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import structlog
from google.protobuf.message import Message

from headway_scheduler.domain.desired import Binding, DesiredState, GpuGroup, Model, StrategyConfig
from headway_scheduler.domain.resources import Resource, by_key, key_of, unknown
from headway_scheduler.errors import DuplicateName, InvalidField, StaleEtag, StoreDown, UnknownResource
from headway_scheduler.rpc.authentication import current_principal
from headway_scheduler.rpc.convert.admin import Kind
from headway_scheduler.rpc.paging import page_of
from headway_scheduler.store.base import DesiredStore, Write

__all__ = ["Resources", "write_of"]

R = TypeVar("R", bound=Resource)
M = TypeVar("M", bound=Message)
Request = Any  # a request of any of the seven kinds: they have the same fields by convention, and no common type

_ATTEMPTS: Final = 5
_LONGEST_REQUEST_ID: Final = 128

log = structlog.get_logger(__name__)


def write_of(method: str, request: Request) -> Write:
    """Who writes what, from the call. Raises InvalidField."""
    request_id: str = request.request_id
    if len(request_id) > _LONGEST_REQUEST_ID or not request_id.isprintable():
        raise InvalidField("request_id", f"must be at most {_LONGEST_REQUEST_ID} printable characters")
    return Write(
        principal=current_principal().id,
        method=method,
        request_id=request_id,
        validate_only=getattr(request, "validate_only", False),
        fingerprint=hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest(),
    )


class Resources:
    """Reads come from the snapshot in memory, so they work while Postgres is away; writes go to the store."""

    def __init__(
        self,
        store: DesiredStore,
        state: Callable[[], DesiredState],
        refresh: Callable[[], Awaitable[None]],
        check_strategy: Callable[[StrategyConfig], None],
        check_model: Callable[[Model], None],
        check_exclusive: Callable[[GpuGroup | Binding], None],
    ) -> None:
        self.store = store
        self.state = state
        self._refresh = refresh
        self._check_strategy = check_strategy
        self._check_model = check_model
        self._check_exclusive = check_exclusive

    def get(self, kind: Kind[R, M], request: Request) -> M:
        """The resource of this name."""
        key = kind.key(request.name, "name")
        found = by_key(self.state(), kind.resource).get(key)
        if not isinstance(found, kind.resource):
            raise unknown(kind.resource, key)
        return kind.to_message(found)

    def list(self, kind: Kind[R, M], request: Request, listing: str, prefix: str = "") -> "tuple[list[M], str]":
        """One page of the resources whose key starts with `prefix`, and the token of the next."""
        held = by_key(self.state(), kind.resource)
        items = [held[key] for key in held if key.startswith(prefix)]
        page, token = page_of(listing, items, key_of, request.page_size, request.page_token)
        return [kind.to_message(resource) for resource in page if isinstance(resource, kind.resource)], token

    async def create(
        self, kind: Kind[R, M], request: Request, method: str, finish: Callable[[R], R] = lambda made: made
    ) -> R:
        """Add the request's resource, completed by `finish`."""
        write = write_of(method, request)
        made = finish(kind.to_resource(getattr(request, kind.noun), None))
        self._check(made)
        stored = await self.store.create(made, write)
        await self.wrote(write)
        return stored

    async def update(self, kind: Kind[R, M], request: Request, method: str) -> R:
        """Change the masked fields of the request's resource."""
        message = getattr(request, kind.noun)
        field = f"{kind.noun}.name"
        key = kind.key(message.name, field)

        def change(stored: R) -> R:
            return kind.updated(stored, message, request.update_mask)

        def make() -> R:
            return kind.to_resource(message, None)

        return await self.modify(
            kind.resource,
            key,
            write_of(method, request),
            change,
            etag=message.etag,
            field=field,
            make=make if request.allow_missing else None,
        )

    async def modify(
        self,
        kind: type[R],
        key: str,
        write: Write,
        change: Callable[[R], R],
        *,
        etag: str = "",
        field: str = "name",
        make: Callable[[], R] | None = None,
    ) -> R:
        """Replace a resource by what `change` makes of it, or add what `make` makes if there is none.

        Another writer may come between reading and writing: without an `etag` from the caller, it tries again on top
        of what that one wrote. Raises StaleEtag, UnknownResource (for `field`) and what the store raises.
        """
        earlier = await self.store.recall(kind, write)
        if earlier is not None and earlier[0] is not None:
            return earlier[0]
        for attempt in range(_ATTEMPTS):
            try:
                stored = await self._modify_once(kind, key, write, change, etag, field, make)
            except (StaleEtag, DuplicateName):
                if etag or attempt == _ATTEMPTS - 1:
                    raise
            else:
                await self.wrote(write)
                return stored
        raise AssertionError("the last attempt returns or raises")

    async def _modify_once(
        self,
        kind: type[R],
        key: str,
        write: Write,
        change: Callable[[R], R],
        etag: str,
        field: str,
        make: Callable[[], R] | None,
    ) -> R:
        try:
            base = await self.store.get(kind, key)
        except UnknownResource:
            if make is None:
                raise unknown(kind, key, field) from None
            made = make()
            self._check(made)
            return await self.store.create(made, write)
        base_etag = base.meta.etag if base.meta else ""
        changed = change(base)
        self._check(changed)
        return await self.store.update(changed, write, etag=etag or base_etag)

    async def delete(self, kind: Kind[R, M], request: Request, method: str) -> None:
        """Remove the resource of this name."""
        write = write_of(method, request)
        key = kind.key(request.name, "name")
        force = getattr(request, "force", False)
        await self.store.delete(kind.resource, key, write, etag=request.etag, force=force)
        await self.wrote(write)

    async def wrote_before(self, write: Write) -> bool:
        """Did an earlier try of this write succeed?"""
        return await self.store.recall(Model, write) is not None  # whatever kind it was of: the answer is not read

    async def wrote(self, write: Write) -> None:
        """Let this scheduler see the write at once; the others are notified."""
        if write.validate_only:
            return
        try:
            await self._refresh()
        except StoreDown:
            # The write is committed and must be answered; the listener brings it once Postgres is back.
            log.warning("refresh_failed", method=write.method)

    def _check(self, resource: Resource) -> None:
        if isinstance(resource, StrategyConfig):
            self._check_strategy(resource)
        elif isinstance(resource, Model):
            self._check_model(resource)
        elif isinstance(resource, GpuGroup | Binding):
            self._check_exclusive(resource)
