"""Watching a stream of server-sent events go by, as cheaply as possible.

Whole events are passed on as they came. Only the first events (until there is content) and those that hold a
usage are parsed; every other chunk costs a few searches for bytes. Chunks may be cut anywhere.
"""

import msgspec

__all__ = ["EventStream", "Usage", "parse_usage"]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """`usage` as OpenAI and vLLM write it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from the cache; None where the engine does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    def says_something(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.refusal or self.tool_calls)


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None


class _Body(msgspec.Struct):
    usage: Usage | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)
_BODY = msgspec.json.Decoder(_Body)


class EventStream:
    """One stream. `strip_usage`: whether the usage chunk is ours alone and is kept from the client."""

    __slots__ = ("_carry", "_strip_usage", "done", "events", "failed", "has_content", "usage")

    def __init__(self, strip_usage: bool) -> None:
        self._strip_usage = strip_usage
        self._carry = b""
        self.has_content = False
        """Whether the first token has gone by."""
        self.events = 0
        """Events from the first token on: about as many as tokens."""
        self.usage: Usage | None = None
        self.done = False
        """Whether `[DONE]` has gone by."""
        self.failed = False
        """Whether the engine itself reported an error in the stream."""

    def feed(self, chunk: bytes) -> bytes:
        """Take what the engine sent; return the whole events to pass on, perhaps none."""
        data = self._carry + chunk if self._carry else chunk
        end = _end_of_events(data)
        if end < len(data):
            data, self._carry = data[:end], data[end:]
        else:
            self._carry = b""
        if not data:
            return b""
        if self.has_content:
            self.events += data.count(b"\n\n") + data.count(b"\n\r\n")
        else:
            self._look_for_content(data)
        if b'"usage"' in data:
            data = self._take_usage(data)
        if b"[DONE]" in data and any(_payload(line) == b"[DONE]" for line in data.splitlines()):
            self.done = True
        if b'data: {"error"' in data:
            self.failed = True
        return data

    def rest(self) -> bytes:
        """Return what came after the last whole event: the stream ended within one."""
        rest, self._carry = self._carry, b""
        return rest

    def _look_for_content(self, data: bytes) -> None:
        for event in _split(data):
            chunk = _parse(event)
            if self.has_content:
                self.events += 1
            elif chunk is not None and any(
                choice.text or (choice.delta is not None and choice.delta.says_something())
                for choice in chunk.choices or ()
            ):
                self.has_content = True
                self.events = 1

    def _take_usage(self, data: bytes) -> bytes:
        kept = []
        for event in _split(data):
            chunk = _parse(event) if b'"usage"' in event else None
            if chunk is not None and chunk.usage is not None:
                self.usage = chunk.usage
                if self._strip_usage and not chunk.choices:
                    continue
            kept.append(event)
        return b"".join(kept)


def parse_usage(body: bytes) -> Usage | None:
    """Read the usage of a whole answer; None where there is none."""
    try:
        return _BODY.decode(body).usage
    except msgspec.DecodeError:
        return None


def _end_of_events(data: bytes) -> int:
    """Return where the last whole event ends: after a blank line, whatever the line ends are."""
    end = data.rfind(b"\n\n") + 2
    if b"\r" in data:
        end = max(end, data.rfind(b"\n\r\n") + 3 if b"\n\r\n" in data else 0)
    return end if end > 1 else 0


def _split(data: bytes) -> list[bytes]:
    """Split whole events, each with its blank line."""
    events: list[bytes] = []
    event = b""
    for line in data.splitlines(keepends=True):
        event += line
        if line in (b"\n", b"\r\n"):
            events.append(event)
            event = b""
    return [*events, event] if event else events


def _payload(line: bytes) -> bytes | None:
    return line[5:].strip() if line.startswith(b"data:") else None


def _parse(event: bytes) -> _Chunk | None:
    lines = [payload for line in event.splitlines() if (payload := _payload(line)) is not None]
    try:
        return _CHUNK.decode(b"\n".join(lines)) if lines else None
    except msgspec.DecodeError:
        return None
