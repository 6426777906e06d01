"""Open streams, by who opened them: they end when what was shown for them counts no more, and are not too many.

A stream may live for days. What its credential may do is looked at again whenever admins changed something, and when
it expires.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import Final, Self

import structlog

from headway_scheduler.errors import (
    CredentialChanged,
    HeadwayError,
    InvalidField,
    NoCredential,
    TooManyStreams,
)
from headway_scheduler.rpc.authentication import Authenticator, Identity, Proof

__all__ = ["FIRST_WORD_S", "SWEEP_S", "Stream", "Streams"]

log = structlog.get_logger(__name__)

SWEEP_S: Final = 0.25
"""How often streams are looked at."""
FIRST_WORD_S: Final = 10.0
"""How long a stream that must begin with a message may be silent."""
_AT_ONCE: Final = 100
"""Principals whose streams are looked at in one turn of the event loop: some 12 µs each."""


class Stream:
    """One open stream, for as long as its `with` block lasts. Raises TooManyStreams on entering it.

    Ended from outside, the block is cancelled and raises why: NoCredential, CredentialChanged, InvalidField.
    """

    __slots__ = ("_ending", "_streams", "_task", "began", "identity", "opened")

    def __init__(self, streams: "Streams", identity: Identity, began: Callable[[], bool] | None, opened: float) -> None:
        self.identity, self.began, self.opened = identity, began, opened
        self._streams = streams
        self._task: asyncio.Task[object] | None = None
        self._ending: HeadwayError | None = None

    def __enter__(self) -> Self:
        self._streams.add(self)
        self._task = asyncio.current_task()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.remove(self)
        if self._ending is not None and self._task is not None:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise self._ending from None

    def end(self, why: HeadwayError) -> None:
        """Cancel what runs in the block."""
        if self._ending is None and self._task is not None:
            self._ending = why
            self._task.cancel()
            log.info("stream_ended", principal=self.identity.principal.id, reason=why.reason, problem=why.message)


class Streams:
    """Every stream of a server. Call `sweep` often: it costs next to nothing while nothing changed."""

    def __init__(
        self, authenticator: Authenticator, clock: Callable[[], datetime], now: Callable[[], float], most: int
    ):
        self._authenticator, self._clock, self._now, self._most = authenticator, clock, now, most
        self._open: dict[str, dict[Stream, None]] = {}
        self._silent: dict[Stream, None] = {}
        self._swept = authenticator.snapshot()
        self._next_expiry: datetime | None = None

    def __len__(self) -> int:
        """How many are open."""
        return sum(map(len, self._open.values()))

    def opened(self, identity: Identity, began: Callable[[], bool] | None = None) -> Stream:
        """A stream to enter. `began`: was anything said on it? Where nothing was within `FIRST_WORD_S`, it ends."""
        return Stream(self, identity, began, self._now())

    def add(self, stream: Stream) -> None:
        """Take it in. Raises TooManyStreams."""
        identity = stream.identity
        held = self._open.setdefault(identity.principal.id, {})
        if len(held) >= self._most:
            raise TooManyStreams(f"{identity.principal.id!r} has {len(held)} streams open, the most there may be")
        held[stream] = None
        if stream.began is not None:
            self._silent[stream] = None
        self._expect(identity.expires)

    def remove(self, stream: Stream) -> None:
        """Forget it."""
        held = self._open.get(stream.identity.principal.id, {})
        held.pop(stream, None)
        if not held:
            self._open.pop(stream.identity.principal.id, None)
        self._silent.pop(stream, None)

    async def sweep(self) -> None:
        """End those that may not go on. Where thousands are to be looked at, others get their turns meanwhile."""
        self._end_silent()
        state, expiry = self._authenticator.snapshot(), self._next_expiry
        if state is self._swept and (expiry is None or self._clock() < expiry):
            return
        self._swept, self._next_expiry = state, None
        for number, held in enumerate(list(self._open.values())):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            judged: dict[Proof, HeadwayError | None] = {}
            for stream in list(held):
                proof = stream.identity.proof
                if proof not in judged:
                    judged[proof] = self._judge(stream.identity)
                if (why := judged[proof]) is not None:
                    stream.end(why)

    def _judge(self, identity: Identity) -> HeadwayError | None:
        """Why this caller's streams end, if they do. None was shown: nothing changes."""
        if identity.proof is None:
            return None
        try:
            now = self._authenticator.identify(identity.proof)
        except NoCredential as error:
            return error
        self._expect(now.expires)
        if now.principal != identity.principal:
            return CredentialChanged(f"{identity.principal.id!r} may do other things now; connect again")
        return None

    def _expect(self, expires: datetime | None) -> None:
        if expires is not None and (self._next_expiry is None or expires < self._next_expiry):
            self._next_expiry = expires

    def _end_silent(self) -> None:
        """In the order in which they were opened, so the first young one is the last to look at."""
        latest = self._now() - FIRST_WORD_S
        for stream in list(self._silent) if self._silent else ():
            if stream.began is not None and stream.began():
                del self._silent[stream]
            elif stream.opened <= latest:
                del self._silent[stream]
                stream.end(InvalidField("message", f"nothing was said within {FIRST_WORD_S:g} s"))
            else:
                return
