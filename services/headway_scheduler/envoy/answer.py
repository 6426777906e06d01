"""An engine's answer going by: what it says of tokens, and the little that is changed in it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec
from headway_openai.sse import EventStream, parse_usage
from headway_openai.sse import Usage as WireUsage

from headway_scheduler.domain.report import Outcome, Usage
from headway_scheduler.envoy.serving import outcome_of

__all__ = ["Answer", "Renaming"]

_LONGEST_WHOLE: Final = 16 * 1024 * 1024
"""A whole answer beyond it is passed on without reading its usage."""


class Kind(StrEnum):
    """How an answer is read."""

    EVENTS = "events"
    WHOLE = "whole"
    OPAQUE = "opaque"


class Renaming:
    """Gives an answer the name that the client asked for, as bytes go by, however they are cut.

    Inside a JSON string every quote is escaped, so the pattern never meets what a model said.
    """

    def __init__(self, served: str, asked: str) -> None:
        old, new = msgspec.json.encode(served), msgspec.json.encode(asked)
        self._pairs = [(b'"model":' + space + old, b'"model":' + space + new) for space in (b"", b" ")]
        self._carry = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk; return what can be passed on."""
        data = self._carry + chunk
        for old, new in self._pairs:
            data = data.replace(old, new)
        kept = self._begun(data)
        self._carry = data[len(data) - kept :]
        return data[: len(data) - kept]

    def rest(self) -> bytes:
        """What was kept back: the answer ended within what looked like the name."""
        rest, self._carry = self._carry, b""
        return rest

    def _begun(self, data: bytes) -> int:
        """How many bytes at the end may be the beginning of the name."""
        longest = max(len(old) for old, _ in self._pairs) - 1
        at = data.find(b'"', max(0, len(data) - longest))
        while at >= 0:
            tail = data[at:]
            if any(old.startswith(tail) for old, _ in self._pairs):
                return len(tail)
            at = data.find(b'"', at + 1)
        return 0


class Answer:
    """One answer, known by its headers and by Envoy's `details`.

    `renaming`: None where the client asked by the name that serves it; `strip`: the usage in a stream is ours alone.
    """

    def __init__(self, headers: Mapping[str, str], details: str, renaming: Renaming | None, *, strip: bool) -> None:
        self.status = int(headers.get(":status") or 0)
        self._details = details
        self.over = False
        """Whether it has gone by, as far as the client is concerned."""
        plain = headers.get("content-encoding", "identity") == "identity"
        readable = 200 <= self.status < 300 and plain
        self._kind = _kind(headers.get("content-type", "")) if readable else Kind.OPAQUE
        self._events = EventStream(strip_usage=strip) if self._kind is Kind.EVENTS else None
        self._renaming = renaming if self._kind is not Kind.OPAQUE else None
        self._strip = strip and self._events is not None
        self._whole: list[bytes] = []
        self._size = 0

    @property
    def changes(self) -> bool:
        """Whether it may come out longer or shorter than it went in."""
        return self._strip or self._renaming is not None

    @property
    def is_whole(self) -> bool:
        """Whether its parts mean nothing before its end."""
        return self._kind is Kind.WHOLE

    @property
    def has_content(self) -> bool:
        """Whether a stream's first token has gone by."""
        return self._events is not None and self._events.has_content

    def feed(self, chunk: bytes, end: bool) -> bytes:
        """Take a chunk; return what takes its place."""
        out = chunk
        if self._events is not None:
            whole = self._events.feed(chunk)
            if end:
                whole += self._events.rest()
            out = whole if self.changes else chunk
            self.over = self._events.done
        elif self._kind is Kind.WHOLE and self._size <= _LONGEST_WHOLE:
            self._size += len(chunk)
            self._whole.append(chunk)
        if self._renaming is not None:
            out = self._renaming.feed(out)
            if end:
                out += self._renaming.rest()
        self.over = self.over or end
        return out

    def outcome(self) -> Outcome:
        """How it ended, once it is over."""
        failed = self._events is not None and self._events.failed
        return Outcome.SERVER_ERROR if failed else outcome_of(self.status, self._details)

    def usage(self, prompt_tokens: int) -> Usage:
        """Tokens as the engine counted them, else as well as it can be told from what went by."""
        if self._events is not None:
            if self._events.usage is not None:
                return _usage(self._events.usage)
            return Usage(prompt_tokens or None, self._events.events)
        if self._kind is Kind.WHOLE and self._size <= _LONGEST_WHOLE:
            found = parse_usage(b"".join(self._whole))
            if found is not None:
                return _usage(found)
        return Usage()


def _kind(content_type: str) -> Kind:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "text/event-stream":
        return Kind.EVENTS
    return Kind.WHOLE if media_type == "application/json" else Kind.OPAQUE


def _usage(usage: WireUsage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
