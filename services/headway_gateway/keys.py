"""End users' keys as the scheduler knows them: asked for together, remembered for as long as it allows."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headway_client import KeyTenants, RouteRefused
from headway_openai.errors import ApiError

__all__ = ["STALE_S", "UserKeys"]

STALE_S: Final = 300.0
"""With no scheduler to ask: how long a key that was good goes on, where the gateway fails open."""
_MOST_AT_ONCE: Final = 1000
_MOST_KNOWN: Final = 100_000
_MOST_UNKNOWN: Final = 10_000
_NO_SCHEDULER: Final = ApiError(503, "not_ready", "no scheduler can say whose key this is", reason="NO_SCHEDULER")


@dataclass(frozen=True, slots=True)
class _Told:
    """What the scheduler said of a key; `tenant` empty: it does not count."""

    tenant: str
    asked_at: float
    valid_s: float


class UserKeys:
    """Keys by their SHA-256.

    A key is asked for anew before its time is over, so that who uses it all the time never waits. Wrong keys are
    remembered apart from right ones, which they cannot push out.
    """

    def __init__(
        self, ask: Callable[[Sequence[bytes]], Awaitable[KeyTenants]], clock: Callable[[], float], *, fail_open: bool
    ) -> None:
        self._ask, self._clock, self._fail_open = ask, clock, fail_open
        self._known: OrderedDict[bytes, _Told] = OrderedDict()
        self._unknown: OrderedDict[bytes, _Told] = OrderedDict()
        self._wanted: dict[bytes, asyncio.Future[_Told | None]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def tenant_of(self, key_sha256: bytes) -> str:
        """The tenant; empty: the key does not count. Raises ApiError 503 where nobody can say."""
        told, now = self._known.get(key_sha256) or self._unknown.get(key_sha256), self._clock()
        if told is not None and now < told.asked_at + told.valid_s:
            if now > told.asked_at + told.valid_s / 2:
                self._want(key_sha256)
            return told.tenant
        fresh = await asyncio.shield(self._want(key_sha256))
        if fresh is not None:
            return fresh.tenant
        if told is not None and told.tenant and self._fail_open and now < told.asked_at + STALE_S:
            return told.tenant
        raise _NO_SCHEDULER

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _want(self, key_sha256: bytes) -> "asyncio.Future[_Told | None]":
        wanted = self._wanted.get(key_sha256)
        if wanted is None:
            wanted = self._wanted[key_sha256] = asyncio.get_running_loop().create_future()
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_all())
        return wanted

    async def _ask_all(self) -> None:
        """One question at a time: whatever is wanted meanwhile goes with the next."""
        while self._wanted:
            batch = dict(list(self._wanted.items())[:_MOST_AT_ONCE])
            asked_at = self._clock()
            try:
                answer = await self._ask(list(batch))
                told = [_Told(tenant, asked_at, answer.valid_s) for tenant in answer.tenants]
            except RouteRefused:
                told = []
            finally:
                for key in batch:
                    del self._wanted[key]
            for number, (key, wanted) in enumerate(batch.items()):
                each = told[number] if number < len(told) else None
                if each is not None:
                    self._remember(key, each)
                wanted.set_result(each)

    def _remember(self, key: bytes, told: _Told) -> None:
        here, there, most = self._known, self._unknown, _MOST_KNOWN
        if not told.tenant:
            here, there, most = there, here, _MOST_UNKNOWN
        there.pop(key, None)
        here[key] = told
        here.move_to_end(key)
        if len(here) > most:
            here.popitem(last=False)
