"""One reader per trace format: from a line to a request.

| format | line |
|---|---|
| mooncake | JSON: `timestamp` ms, `input_length`, `output_length`, `hash_ids` |
| azure | CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens` |
| sharegpt | JSON: `arrival_time_ns`, `input_tok_ids`, `output_toks` |
| headway | JSON: a scheduler's export (docs/decisions.md): `headway`, `timestamp` ms, `blocks`, `block_tokens`, … |
| plain | JSON: `timestamp` ms, `input` or `messages`, `output` or `output_length`, optional `session_id` |
"""

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from headway_scheduler.record.export import VERSION as EXPORT_VERSION

from headway_sim.engine import count_tokens
from headway_sim.traces.model import (
    HASH_ID_TOKENS,
    UNKNOWN_OUTPUT,
    ChatPrompt,
    HashedPrompt,
    LengthPrompt,
    Prompt,
    RecordedPrompt,
    TextPrompt,
    TokenPrompt,
    TraceError,
    TraceRequest,
)

_HASH = re.compile("[0-9a-f]{16}")
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceFormat(StrEnum):
    """The formats that can be read."""

    MOONCAKE = "mooncake"
    AZURE = "azure"
    SHAREGPT = "sharegpt"
    HEADWAY = "headway"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class _Row:
    """One line's fields, and where it stands, for what is wrong with it. Values are unchecked JSON."""

    path: Path
    line: int
    fields: dict[str, Any]

    def error(self, field: str | None, message: str) -> TraceError:
        return TraceError(self.path, self.line, field, message)

    def number(self, field: str) -> float:
        value = self.fields.get(field)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise self.error(field, "must be a non-negative number")
        return float(value)

    def count(self, field: str) -> int:
        value = self.fields.get(field)
        if type(value) is not int or value < 1:
            raise self.error(field, "must be a positive integer")
        return value

    def integers(self, field: str) -> tuple[int, ...]:
        value = self.fields.get(field)
        if not isinstance(value, list) or not value or not all(map(_is_id, value)):
            raise self.error(field, "must be a non-empty list of non-negative integers")
        return tuple(value)


def detect_format(path: Path, first_line: str) -> TraceFormat:
    """The format of a file whose first line is `first_line`."""
    if first_line.lstrip().startswith("TIMESTAMP,"):
        return TraceFormat.AZURE
    fields = _decode(path, 1, first_line).fields
    if "headway" in fields:
        return TraceFormat.HEADWAY
    if "hash_ids" in fields:
        return TraceFormat.MOONCAKE
    if "input_tok_ids" in fields:
        return TraceFormat.SHAREGPT
    if "input" in fields or "messages" in fields:
        return TraceFormat.PLAIN
    raise TraceError(path, 1, None, f"unknown format: none of {', '.join(TraceFormat)}")


def read_lines(path: Path, lines: Iterable[str], trace_format: TraceFormat) -> Iterator[TraceRequest]:
    """The requests of a file's lines; arrival times are still the file's own."""
    if trace_format is TraceFormat.AZURE:
        yield from _read_azure(path, lines)
        return
    parse = _JSON_PARSERS[trace_format]
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield parse(_decode(path, number, line))


def _read_azure(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    reader = csv.reader(lines)
    header = [column.strip() for column in next(reader, [])]
    if header != _AZURE_COLUMNS:
        raise TraceError(path, 1, None, f"the header must be {','.join(_AZURE_COLUMNS)}")
    for values in reader:
        if not values:
            continue
        row = _Row(path, reader.line_num, {})
        if len(values) != len(_AZURE_COLUMNS):
            raise row.error(None, f"{len(values)} columns instead of {len(_AZURE_COLUMNS)}")
        prompt = LengthPrompt(_csv_count(row, 1, values), serial=reader.line_num)
        # A request that generated nothing still costs its prefill, which yields one token.
        output_tokens = max(1, _csv_count(row, 2, values, least=0))
        yield TraceRequest(_csv_time_ms(row, values[0]), prompt, output_tokens)


def _csv_count(row: _Row, column: int, values: list[str], least: int = 1) -> int:
    text = values[column].strip()
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise row.error(_AZURE_COLUMNS[column], f"must be an integer of at least {least}")
    return int(text)


def _csv_time_ms(row: _Row, text: str) -> float:
    """Azure writes seven decimals; Python reads six."""
    whole, _, fraction = text.strip().partition(".")
    try:
        moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        seconds = float(f"0.{fraction}") if fraction else 0.0
    except ValueError:
        raise row.error(_AZURE_COLUMNS[0], "must be a time like 2023-11-16 18:17:03.9799600") from None
    return moment.timestamp() * 1000.0 + seconds * 1000.0


def _parse_mooncake(row: _Row) -> TraceRequest:
    hash_ids = row.integers("hash_ids")
    tokens = row.count("input_length")
    if -(-tokens // HASH_ID_TOKENS) != len(hash_ids):
        raise row.error("hash_ids", f"{len(hash_ids)} ids do not stand for {tokens} tokens")
    return TraceRequest(row.number("timestamp"), HashedPrompt(hash_ids, tokens), row.count("output_length"))


def _parse_sharegpt(row: _Row) -> TraceRequest:
    prompt = TokenPrompt(row.integers("input_tok_ids"))
    return TraceRequest(row.number("arrival_time_ns") / 1e6, prompt, row.count("output_toks"))


def _parse_headway(row: _Row) -> TraceRequest:
    if row.fields.get("headway") != EXPORT_VERSION:
        raise row.error("headway", f"must be {EXPORT_VERSION}: another version's export")
    blocks = row.fields.get("blocks")
    if not isinstance(blocks, list) or not all(isinstance(each, str) and _HASH.fullmatch(each) for each in blocks):
        raise row.error("blocks", "must be a list of hashes of 16 hexadecimal digits")
    block_tokens, tenant = row.number("block_tokens"), row.fields.get("tenant")
    if blocks and block_tokens <= 0:
        raise row.error("block_tokens", "must be positive")
    if not isinstance(tenant, str) or not tenant:
        raise row.error("tenant", "must be a name")
    prompt = RecordedPrompt(tuple(int(each, 16) for each in blocks), block_tokens, row.count("input_length"))
    max_tokens = row.fields.get("max_tokens")
    return TraceRequest(
        row.number("timestamp"),
        prompt,
        row.count("output_length") if row.fields.get("output_length") else UNKNOWN_OUTPUT,
        str(row.fields.get("session_id") or "") or None,
        tenant=tenant,
        max_tokens=max_tokens if type(max_tokens) is int and max_tokens > 0 else None,
    )


def _parse_plain(row: _Row) -> TraceRequest:
    session_id = row.fields.get("session_id")
    if session_id is not None and not isinstance(session_id, (str, int)):
        raise row.error("session_id", "must be a string")
    return TraceRequest(
        row.number("timestamp"),
        _plain_prompt(row),
        _plain_output_tokens(row),
        None if session_id is None else str(session_id),
    )


def _plain_prompt(row: _Row) -> Prompt:
    messages = row.fields.get("messages")
    if messages is not None:
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise row.error("messages", "must be a non-empty list of objects with a role")
        return ChatPrompt(tuple(messages))
    text = row.fields.get("input")
    if not isinstance(text, str) or not text:
        raise row.error("input", "must be a non-empty text, unless there are messages")
    return TextPrompt(text)


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _plain_output_tokens(row: _Row) -> int:
    output = row.fields.get("output")
    if output is None or "output_length" in row.fields:
        return row.count("output_length")
    if not isinstance(output, str):
        raise row.error("output", "must be a text")
    return max(1, count_tokens(output.encode()))


def _decode(path: Path, number: int, line: str) -> _Row:
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise TraceError(path, number, None, f"not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(path, number, None, "must be a JSON object")
    return _Row(path, number, fields)


_JSON_PARSERS: dict[TraceFormat, Callable[[_Row], TraceRequest]] = {
    TraceFormat.MOONCAKE: _parse_mooncake,
    TraceFormat.SHAREGPT: _parse_sharegpt,
    TraceFormat.HEADWAY: _parse_headway,
    TraceFormat.PLAIN: _parse_plain,
}
