"""The beginning of a body, cut anywhere: what it tells already of the model, the prompt and the limits."""

import re
from typing import Final

import msgspec
from headway.routing.v1 import routing_pb2 as pb

from headway_openai.body import Api, Message, message_content, set_prompt
from headway_openai.errors import ApiError

__all__ = ["completed", "parse_prefix"]

_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?P<end>"|\\?\Z)|[{}\[\],:]', re.DOTALL)
"""A string, perhaps one that the cut ended; or a structural character. Possessive: it never goes back."""
_WHOLE_ESCAPES: Final = re.compile(rb"[^\\]*+(?:\\(?!u).[^\\]*+|\\u[0-9a-fA-F]{4}[^\\]*+)*+", re.DOTALL)
_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_CUTTABLE: Final = frozenset({b'"content"', b'"text"', b'"prompt"', b'"input"'})
"""Texts of which a part is worth having. Half a model's name is none."""
_CLOSER: Final = {b"{": b"}", b"[": b"]"}


class _Message(msgspec.Struct):
    role: str = ""
    content: str | list[msgspec.Raw] | None = None
    name: str | None = None


class _Prefix(msgspec.Struct):
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: list[_Message] = []
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_PREFIX: Final = msgspec.json.Decoder(_Prefix)


def parse_prefix(api: Api, raw: bytes) -> pb.RouteRequest:
    """Read what is there; the model is empty where it comes later. Raises ApiError 400 if it cannot become a body."""
    try:
        found = _PREFIX.decode(completed(raw))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        problem = "the body's beginning is not that of a JSON object as the API has it"
        raise ApiError(400, "invalid_json", problem, reason="INVALID_ARGUMENT") from None
    limit = found.max_tokens if found.max_completion_tokens is None else found.max_completion_tokens
    route = pb.RouteRequest(model=found.model)
    if limit is not None and 0 <= limit < 2**32:
        route.max_tokens = limit
    if api == "chat/completions":
        route.chat.messages.extend(_chat(message) for message in found.messages)
    elif api == "completions" and bytes(found.prompt):
        set_prompt(route, bytes(found.prompt), "prompt")
    elif api == "embeddings":
        route.task_hint = pb.TASK_HINT_SHORT
        if bytes(found.input):
            set_prompt(route, bytes(found.input), "input")
    return route


def completed(raw: bytes) -> bytes:
    """The JSON that begins like this and ends at once: what the cut left unfinished is closed, or dropped.

    Text that was cut keeps its beginning. What is no beginning of JSON stays none.
    """
    closers: list[bytes] = []
    whole = 0  # up to here all is complete but for the closers
    key = before = b""
    for found in _TOKEN.finditer(raw):
        token = found[0]
        if found["end"] is not None:
            is_value = before != b"{" and closers and (closers[-1] == b"]" or before == b":")
            if found["end"] != b'"':
                if is_value and key in _CUTTABLE:
                    return raw[: found.start()] + _closed(token) + b"".join(reversed(closers))
                break
            if is_value:
                whole = found.end()
            else:
                key = token
        elif token in _CLOSER:
            closers.append(_CLOSER[token])
            whole = found.end()
        elif token == b",":
            whole = found.start()
        elif token != b":":
            if not closers:
                break
            closers.pop()
            whole = found.end()
        before = token
    return raw[:whole] + b"".join(reversed(closers))


def _closed(text: bytes) -> bytes:
    """A string that was cut, without the half of a character or of an escape at its end."""
    inner = text[1:].decode("utf-8", "ignore").encode()
    end = _WHOLE_ESCAPES.match(inner)
    inner = inner[: end.end()] if end is not None else b""
    return b'"' + _HIGH_SURROGATE.sub(b"", inner) + b'"'


def _chat(message: _Message) -> pb.ChatMessage:
    whole = Message(role=message.role, content=message.content, name=message.name)
    try:
        content = message_content(whole, "messages")
    except ApiError:  # a part that was cut before its type
        content = ""
    return pb.ChatMessage(role=message.role, content=content, name=message.name or "")
