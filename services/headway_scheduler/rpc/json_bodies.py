"""Messages as JSON, by the protos' JSON mapping: what is wrong with a body is said by the field's path."""

import re
from typing import Any, Final, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message
from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.errors import InvalidField

__all__ = ["from_json", "to_json"]

_TOO_DEEP: Final = 100

M = TypeVar("M", bound=Message)


def to_json(message: Message) -> bytes:
    """The message: camelCase, enums by name."""
    return msgspec.json.encode(json_format.MessageToDict(message))


def from_json(body: bytes, message: M) -> M:
    """Fill this message, and return it. Raises InvalidField."""
    try:
        # Stricter than Python's own: it lets no half of a surrogate pair through, on which protobuf fails.
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise InvalidField("body", "is no JSON") from None
    if not isinstance(fields, dict):
        raise InvalidField("body", "must be a JSON object")
    if isinstance(message, pb.RouteRequest):
        _take_ids(fields, message)
    try:
        json_format.ParseDict(fields, message, max_recursion_depth=_TOO_DEEP)
    except json_format.ParseError as error:
        raise _invalid(str(error), message.DESCRIPTOR.name) from None
    return message


def _take_ids(fields: dict[str, Any], message: pb.RouteRequest) -> None:
    """Move a prompt's token ids over at once, where all are plain numbers: one by one, two million take seconds."""
    tokens = fields.get("tokens")
    if not isinstance(tokens, dict):
        return
    ids = tokens.get("ids")
    others = ("text", "chat", "blocks")  # json_format says what is wrong with two prompts
    if not isinstance(ids, list) or set(map(type, ids)) != {int} or any(name in fields for name in others):
        return
    try:
        message.tokens.ids.extend(ids)
    except (ValueError, OverflowError):
        message.ClearField("tokens")  # json_format says which
    else:
        fields["tokens"] = {name: value for name, value in tokens.items() if name != "ids"}


_UNKNOWN_FIELD: Final = re.compile(r'has no field named "(?P<name>.*?)" at "\w+\.?(?P<path>[\w.\[\]]*)"', re.DOTALL)
_WRONG_FIELD: Final = re.compile(r"Failed to parse (\w+) field: ")


_PLACE: Final = re.compile(r" at (?P<message>\w+)(?:\.(?P<path>[\w.\[\]]+?))?\.*$")


def _invalid(problem: str, message: str) -> InvalidField:
    """What json_format found wrong, with the field's path as far as it tells."""
    unknown = _UNKNOWN_FIELD.search(problem)
    if unknown is not None:
        path = ".".join(part for part in (unknown["path"], unknown["name"]) if part)
        return InvalidField(path, "there is no such field")
    names = _WRONG_FIELD.findall(problem)
    rest = _WRONG_FIELD.sub("", problem).strip()
    place = _PLACE.search(rest)
    path = ".".join(names)
    if place is not None and place["message"] == message:
        rest, path = rest[: place.start()], place["path"] or path
    return InvalidField(path or "body", rest.rstrip("."))
