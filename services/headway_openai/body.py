"""The request's body: read once for what routing needs, forwarded as it came unless something must change."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from headway.routing.v1 import routing_pb2 as pb

from headway_openai.errors import ApiError

__all__ = ["Api", "Message", "ParsedBody", "forwarded_body", "message_content", "parse_body", "set_prompt"]

Api = Literal["chat/completions", "completions", "embeddings", "other"]
"""What follows `/v1/`; of `other` only the model is read."""

_U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Name = Annotated[str, msgspec.Meta(min_length=1)]


_ADDED = (b'"stream_options"', b'"cache_salt"')
"""Fields that a body may get besides the client's own, as they mostly look where it has them."""

_FIRST_OF_ARRAY = re.compile(rb"\s*\[\s*(.)", re.DOTALL)

_ABSENT = msgspec.Raw(b"")
"""Stands for a missing field; `null` comes as it is."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Message(msgspec.Struct):
    """One message of a chat, as far as it is read."""

    role: str
    content: str | list[msgspec.Raw] | None = None
    name: str | None = None
    tool_calls: msgspec.Raw = _ABSENT


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    image_url: msgspec.Raw = _ABSENT


class _Common(msgspec.Struct, kw_only=True):
    model: _Name
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _U32 | None = None


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: _U32 | None = None
    tools: msgspec.Raw = _ABSENT


class _Completion(_Common, kw_only=True):
    prompt: msgspec.Raw


class _Embedding(msgspec.Struct):
    model: _Name
    input: msgspec.Raw


class _Other(msgspec.Struct):
    model: _Name


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """What a data plane needs to know of a body. `route` holds model, prompt, limits and hint."""

    raw: bytes
    route: pb.RouteRequest
    model: str
    """As the body has it: `route` may come to ask for another one."""
    stream: bool
    wants_usage: bool
    """Whether the client asked for the usage chunk itself."""


def parse_body(api: Api, raw: bytes) -> ParsedBody:
    """Read a body. Raises ApiError 400 naming the field; the message never quotes the content."""
    try:
        return _PARSERS[api](raw)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeError):
        raise ApiError(400, "invalid_json", "the body is not valid JSON", reason="INVALID_ARGUMENT") from None
    except RecursionError:
        raise _too_deep() from None


def forwarded_body(parsed: ParsedBody, model: str, cache_salt: str, *, include_usage: bool = True) -> bytes:
    """Return the body for the engine: the client's own bytes, or with exactly these values changed.

    `include_usage`: have streams end with their usage, also where the client did not ask for it. Raises ApiError 400.
    """
    changes: dict[str, object] = {}
    if include_usage and parsed.stream and not parsed.wants_usage:
        changes["stream_options"] = {"include_usage": True}
    if cache_salt:
        changes["cache_salt"] = cache_salt
    if model != parsed.model:
        changes["model"] = model
    if not changes:
        return parsed.raw
    if "model" not in changes and not any(key in parsed.raw for key in _ADDED):
        # Only additions: no second look at the rest, however long it is. The last of a key's values is the one that
        # counts, should the client have spelled one of them with escapes.
        return parsed.raw.rstrip()[:-1] + b"," + msgspec.json.encode(changes)[1:]
    try:
        fields: dict[str, object] = dict(msgspec.json.decode(parsed.raw, type=dict[str, msgspec.Raw]))
        if "stream_options" in changes and isinstance(options := fields.get("stream_options"), msgspec.Raw):
            kept = msgspec.json.decode(options, type=dict[str, msgspec.Raw] | None) or {}
            changes["stream_options"] = {**kept, "include_usage": True}
        return msgspec.json.encode({**fields, **changes})
    except RecursionError:  # the body was just not too deep when it was read, from further out
        raise _too_deep() from None


def _parse_chat(raw: bytes) -> ParsedBody:
    body = _CHAT.decode(raw)
    messages = [
        pb.ChatMessage(role=m.role, content=message_content(m, f"messages[{i}]"), name=m.name or "")
        for i, m in enumerate(body.messages)
    ]
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    route = pb.RouteRequest(
        model=body.model, chat=pb.ChatPrompt(messages=messages, tools=_text(body.tools)), max_tokens=limit
    )
    return ParsedBody(raw, route, body.model, bool(body.stream), _wants_usage(body))


def _parse_completion(raw: bytes) -> ParsedBody:
    body = _COMPLETION.decode(raw)
    route = pb.RouteRequest(model=body.model, max_tokens=body.max_tokens)
    set_prompt(route, bytes(body.prompt), "prompt")
    return ParsedBody(raw, route, body.model, bool(body.stream), _wants_usage(body))


def _parse_embedding(raw: bytes) -> ParsedBody:
    body = _EMBEDDING.decode(raw)
    route = pb.RouteRequest(model=body.model, task_hint=pb.TASK_HINT_SHORT)
    set_prompt(route, bytes(body.input), "input")
    return ParsedBody(raw, route, body.model, stream=False, wants_usage=False)


def _parse_other(raw: bytes) -> ParsedBody:
    body = _OTHER.decode(raw)
    return ParsedBody(raw, pb.RouteRequest(model=body.model), body.model, stream=False, wants_usage=True)


_CHAT = msgspec.json.Decoder(_Chat)
_COMPLETION = msgspec.json.Decoder(_Completion)
_EMBEDDING = msgspec.json.Decoder(_Embedding)
_OTHER = msgspec.json.Decoder(_Other)
_PART = msgspec.json.Decoder(_Part)
_TEXTS = msgspec.json.Decoder(str | list[str])
_TOKENS = msgspec.json.Decoder(list[_TokenId])
_TOKEN_LISTS = msgspec.json.Decoder(list[list[_TokenId]])
_PARSERS: dict[Api, Callable[[bytes], ParsedBody]] = {
    "chat/completions": _parse_chat,
    "completions": _parse_completion,
    "embeddings": _parse_embedding,
    "other": _parse_other,
}


def _wants_usage(body: _Common) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def message_content(message: Message, place: str) -> str:
    """Concatenate the parts; what is not text stands as `<type:digest>`; tool calls follow as they came."""
    tail = _text(message.tool_calls)
    if isinstance(message.content, list):
        parts = (_part(raw, f"{place}.content[{i}]") for i, raw in enumerate(message.content))
        return "".join(parts) + tail
    return (message.content or "") + tail


def _text(raw: msgspec.Raw) -> str:
    text = bytes(raw).decode()
    return "" if text == "null" else text


def _part(raw: msgspec.Raw, place: str) -> str:
    try:
        part = _PART.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(error, place) from None
    if part.type == "text":
        return part.text or ""
    content = bytes(part.image_url) or bytes(raw)
    return f"<{part.type}:{hashlib.blake2b(content, digest_size=16).hexdigest()}>"


def set_prompt(route: pb.RouteRequest, raw: bytes, field: str) -> None:
    """Read a string, strings, token ids or lists of them; a batch counts as one prompt, in order."""
    start = _FIRST_OF_ARRAY.match(raw)
    first = b"" if start is None else start[1]
    try:
        if first == b"[":
            route.tokens.ids.extend(i for ids in _TOKEN_LISTS.decode(raw) for i in ids)
        elif first not in (b"", b'"', b"]"):
            route.tokens.ids.extend(_TOKENS.decode(raw))
        else:
            texts = _TEXTS.decode(raw)
            route.text = texts if isinstance(texts, str) else "\n".join(texts)
    except msgspec.ValidationError as error:
        raise _invalid(error, field) from None


def _too_deep() -> ApiError:
    return ApiError(400, "invalid_json", "the body is nested too deep", reason="INVALID_ARGUMENT")


def _invalid(error: msgspec.ValidationError, place: str = "") -> ApiError:
    """Name the field; msgspec's messages speak of types and paths, never of values."""
    what, _, path = str(error).partition(" - at `")
    param = (place + path.rstrip("`").removeprefix("$")).removeprefix(".") or None
    if param is None and "required field `" in what:
        param = what.partition("required field `")[2].rstrip("`")
    message = f"{param}: {what}" if param else what
    return ApiError(400, "invalid_value", message, param=param, reason="INVALID_ARGUMENT")
