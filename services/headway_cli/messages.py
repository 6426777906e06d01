"""Messages ↔ plain values: what `-o json`, YAML files and `key=value` hold.

Enums go by their short names (`dedicated`), times as RFC 3339, whole numbers as such; every problem names its field.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final

import yaml
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

__all__ = ["FieldProblem", "Plain", "assign", "from_plain", "to_plain"]

Plain = Any  # what JSON can hold
# Descriptors are of another class in each protobuf runtime.
Field = Any
Enum = Any
Fields = Any

_LARGEST_EXACT: Final = 2**53
_INTEGERS: Final = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS: Final = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """What is wrong with one field; `path` is `quotas.max_inflight` or `models[2]`."""

    path: str
    text: str


# Messages → plain values


def to_plain(message: Message, *, defaults: bool = True) -> dict[str, Plain]:
    """The message's fields in order; without `defaults`, only those that are not zero or empty."""
    plain = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            shown = _map_or_list(field, value, defaults)
            present = bool(shown)
        elif field.has_presence:
            if not message.HasField(field.name):
                continue
            shown, present = _single(field, value, defaults), True
        else:
            shown, present = _single(field, value, defaults), bool(value)
        if present or defaults:
            plain[field.name] = shown
    return plain


def _map_or_list(field: Field, value: Any, defaults: bool) -> Plain:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        of = entry.fields_by_name["value"]
        return {str(key): _single(of, value[key], defaults) for key in sorted(value)}
    return [_single(field, each, defaults) for each in value]


def _single(field: Field, value: Any, defaults: bool) -> Plain:
    if field.enum_type is not None:
        return _enum_name(field.enum_type, value)
    if isinstance(value, Struct):
        return _whole(MessageToDict(value))
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Duration):
        return _whole(value.ToNanoseconds() / 1e9)
    if isinstance(value, Message):
        return to_plain(value, defaults=defaults)
    return _whole(value)


def _whole(value: Plain) -> Plain:
    """Doubles that are whole numbers as integers; those that are none as null."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_EXACT:
        return int(value)
    return value


def _prefix(enum: Enum) -> str:
    """`BINDING_MODE_`: what every value of the enum starts with."""
    return str(enum.values[0].name.removesuffix("UNSPECIFIED"))


def _enum_name(enum: Enum, number: int) -> str:
    value = enum.values_by_number.get(number)
    return str(number) if value is None else str(value.name).removeprefix(_prefix(enum)).lower()


# Plain values → messages


def from_plain(message: Message, values: Mapping[str, Plain], readonly: Iterable[str] = ()) -> list[FieldProblem]:
    """Fill the message; returns everything that is wrong."""
    reader = _Reader()
    for name in readonly:
        if name in values:
            reader.wrong(name, "is set by the scheduler")
    reader.message(message, {key: value for key, value in values.items() if key not in set(readonly)}, "")
    return reader.problems


class _Reader:
    """Walks plain values along a message's fields and collects problems."""

    def __init__(self) -> None:
        self.problems: list[FieldProblem] = []

    def wrong(self, path: str, text: str) -> None:
        self.problems.append(FieldProblem(path, text))

    def message(self, message: Message, values: Mapping[str, Plain], path: str) -> None:
        known = message.DESCRIPTOR.fields_by_name
        for key, value in values.items():
            field, where = known.get(key), f"{path}.{key}" if path else str(key)
            if field is None:
                self.wrong(where, f"is no field; there are {', '.join(known)}")
            elif value is not None:
                self._field(message, field, value, where)

    def _field(self, message: Message, field: Field, value: Plain, path: str) -> None:
        held = getattr(message, field.name)
        if field.is_repeated and field.message_type is not None:
            if _value_of(field) is None:
                self._map(held, value, path)
            else:
                self._messages(held, value, path)
        elif field.is_repeated:
            self._list(held, field, value, path)
        elif field.message_type is not None:
            self._nested(message, field.name, held, value, path)
        else:
            read = self._scalar(field, value, path)
            if read is not None:
                setattr(message, field.name, read)

    def _nested(self, message: Message, name: str, held: Message, value: Plain, path: str) -> None:
        if isinstance(held, Timestamp):
            self._timestamp(held, value, path)
        elif not isinstance(value, dict):
            self.wrong(path, f"must be a mapping, not {_shown(value)}")
        elif isinstance(held, Struct):
            held.SetInParent()
            if self._json(value, path):
                held.update(value)
        else:
            getattr(message, name).SetInParent()
            self.message(held, value, path)

    def _map(self, held: Any, value: Plain, path: str) -> None:
        if not isinstance(value, dict):
            self.wrong(path, f"must be a mapping, not {_shown(value)}")
            return
        for key, inner in value.items():
            if not isinstance(key, str) or not isinstance(inner, str):
                self.wrong(f"{path}.{key}", f"must be text, not {_shown(inner)}: put it in quotes")
            else:
                held[key] = inner

    def _messages(self, held: Any, value: Plain, path: str) -> None:
        if not isinstance(value, dict):
            self.wrong(path, f"must be a mapping, not {_shown(value)}")
            return
        for key, inner in value.items():
            where = f"{path}.{key}"
            if not isinstance(key, str):
                self.wrong(where, f"must be text, in quotes, not {_shown(key)}")
            elif not isinstance(inner, dict):
                self.wrong(where, f"must be a mapping, not {_shown(inner)}")
            else:
                self.message(held[key], inner, where)

    def _list(self, held: Any, field: Field, value: Plain, path: str) -> None:
        if not isinstance(value, list):
            self.wrong(path, f"must be a list, not {_shown(value)}")
            return
        for index, inner in enumerate(value):
            read = self._scalar(field, inner, f"{path}[{index}]")
            if read is not None:
                held.append(read)

    def _scalar(self, field: Field, value: Plain, path: str) -> Plain:
        if field.enum_type is not None:
            return self._enum(field.enum_type, value, path)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._checked(isinstance(value, bool), value, path, "must be true or false")
        if field.type in _FLOATS:
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            return self._checked(number, value, path, "must be a finite number")
        if field.type in _INTEGERS:
            low, high = _INTEGERS[field.type]
            whole = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
            return self._checked(whole, value, path, f"must be a whole number from {low} to {high}")
        quoted = "must be text" if isinstance(value, dict | list) else "must be text, in quotes"
        return self._checked(isinstance(value, str), value, path, quoted)

    def _checked(self, good: bool, value: Plain, path: str, wanted: str) -> Plain:
        if good:
            return value
        self.wrong(path, f"{wanted}, not {_shown(value)}")
        return None

    def _enum(self, enum: Enum, value: Plain, path: str) -> int | None:
        prefix = _prefix(enum)
        name = f"{prefix}{str(value).upper().removeprefix(prefix)}"
        found = enum.values_by_name.get(name)
        if found is not None and found.number:
            return int(found.number)
        choices = ", ".join(_enum_name(enum, each.number) for each in enum.values if each.number)
        self.wrong(path, f"{_shown(value)} is none of {choices}")
        return None

    def _timestamp(self, held: Timestamp, value: Plain, path: str) -> None:
        try:
            if isinstance(value, datetime):
                held.FromDatetime(value if value.tzinfo else value.replace(tzinfo=UTC))
            else:
                held.FromJsonString(value)
        except (TypeError, ValueError, AttributeError):
            self.wrong(path, f"must be a time like 2027-01-31T12:00:00Z, not {_shown(value)}")

    def _json(self, value: Plain, path: str) -> bool:
        """Can a Struct hold it?"""
        before = len(self.problems)
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str):
                    self.wrong(f"{path}.{key}", "a key must be text")
                self._json(inner, f"{path}.{key}")
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                self._json(inner, f"{path}[{index}]")
        elif isinstance(value, date) or (isinstance(value, float) and not math.isfinite(value)):
            self.wrong(path, f"must be a finite number, text, true, false, a list or a mapping, not {_shown(value)}")
        return len(self.problems) == before


def _value_of(field: Field) -> Fields | None:
    """What the values of a map of messages are; None for other fields."""
    entry = field.message_type
    if entry is None or not entry.GetOptions().map_entry:
        return None
    return entry.fields_by_name["value"].message_type


def _shown(value: Plain) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)


# Assignments


def assign(message: Message, values: dict[str, Plain], assignments: Iterable[str]) -> list[str]:
    """Put `quotas.max_inflight=3 models=a,b selector.tier=gold` into `values`; returns the top-level fields touched.

    Nothing after the `=` takes the value away. Raises ValueError, saying what is wrong, for what is no assignment.
    """
    touched: dict[str, None] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise ValueError(f"{assignment!r} must look like FIELD=VALUE")
        head, _, rest = path.partition(".")
        field = message.DESCRIPTOR.fields_by_name.get(head)
        if field is None:
            raise ValueError(f"{head}: is no field; there are {', '.join(message.DESCRIPTOR.fields_by_name)}")
        _assign(values, message.DESCRIPTOR, path, head, rest, text)
        touched[head] = None
    return list(touched)


def _assign(values: dict[str, Plain], descriptor: Fields, path: str, head: str, rest: str, text: str) -> None:
    field = descriptor.fields_by_name.get(head)
    if rest:
        inner = values.setdefault(head, {})
        if field is None or field.message_type is None or not isinstance(inner, dict):
            raise ValueError(f"{path}: {head!r} has no parts")
        if field.message_type.full_name == Struct.DESCRIPTOR.full_name:
            _put(inner, rest, text, _scalar_of(path))
        elif field.is_repeated and (of := _value_of(field)) is not None:
            _assign_in_map(inner, of, path, rest, text)
        elif field.is_repeated:
            _put(inner, rest, text, str)
        else:
            nested, _, further = rest.partition(".")
            _assign(inner, field.message_type, path, nested, further, text)
    elif field is None:
        raise ValueError(f"{path}: is no field; there are {', '.join(descriptor.fields_by_name)}")
    elif field.is_repeated and field.message_type is None:
        values[head] = [part.strip() for part in text.split(",") if part.strip()]
    elif field.message_type is not None and text and field.message_type.full_name != Timestamp.DESCRIPTOR.full_name:
        raise ValueError(f"{path}: must be set by its parts, {head}.KEY=VALUE")
    else:
        _put(values, head, text, str if field.type == FieldDescriptor.TYPE_STRING else _scalar_of(path))


def _assign_in_map(values: dict[str, Plain], of: Fields, path: str, rest: str, text: str) -> None:
    """`canary.weight=5`, or `llama-3.1.max_inflight=8`: a key may have dots, and ends where a field begins.

    Nothing after a bare key's `=` takes the entry away.
    """
    parts = rest.split(".")
    start = next((n for n in range(1, len(parts)) if parts[n] in of.fields_by_name), None)
    if start is not None:
        head, further = parts[start], ".".join(parts[start + 1 :])
        _assign(values.setdefault(".".join(parts[:start]), {}), of, path, head, further, text)
    elif not text:
        values.pop(rest, None)
    else:
        raise ValueError(
            f"{path}: must be set by its parts, {path}.FIELD=VALUE; there are {', '.join(of.fields_by_name)}"
        )


def _put(values: dict[str, Plain], key: str, text: str, read: Callable[[str], Plain]) -> None:
    if text:
        values[key] = read(text)
    else:
        values.pop(key, None)


def _scalar_of(path: str) -> Callable[[str], Plain]:
    def read(text: str) -> Plain:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            raise ValueError(f"{path}: {text!r} is no value") from None

    return read
