"""What the emulator reads and says: one canonical byte string per prompt, filler as the answer."""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from xxhash import xxh3_64_hexdigest

from headway_sim.engine import TOKEN_BYTES

_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_FILLER_TOKENS = 1 << 14


def render_chat(messages: Sequence[Mapping[str, Any]], tools: object = None) -> bytes:
    """The prompt of a chat as bytes.

    It ends where the answer begins, so that the next turn's prompt starts with this one and its answer.
    Values are the request's own JSON.
    """
    parts = [] if not tools else [f"<|tools|>{_canonical(tools)}\n"]
    for message in messages:
        extra = {key: message[key] for key in ("tool_calls", "tool_call_id", "name") if message.get(key)}
        parts.append(f"<|{message['role']}|>{_content(message.get('content'))}")
        parts.append(f"{_canonical(extra)}\n" if extra else "\n")
    parts.append("<|assistant|>")
    return "".join(parts).encode()


def answer_text(seed: int, start_token: int, end_token: int) -> str:
    """Tokens `start_token` to `end_token` of the answer that `seed` gives: four bytes each, plain ASCII."""
    filler = _filler()
    offset = seed % _FILLER_TOKENS
    parts = []
    position = start_token
    while position < end_token:
        begin = (offset + position) % _FILLER_TOKENS
        count = min(end_token - position, _FILLER_TOKENS - begin)
        parts.append(filler[begin * TOKEN_BYTES : (begin + count) * TOKEN_BYTES])
        position += count
    return "".join(parts)


@cache
def _filler() -> str:
    """A fixed stream of four-letter words; every answer is a stretch of it."""
    letters = random.Random(0).choices(_LETTERS, k=_FILLER_TOKENS * (TOKEN_BYTES - 1))
    width = TOKEN_BYTES - 1
    return "".join(
        " " + bytes(letters[start : start + width]).decode() for start in range(0, len(letters), width)
    )


def _content(content: object) -> str:
    """A message's content as text; what is not text stands as its digest."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return _canonical(content)
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "text":
            parts.append(str(part.get("text", "")))
        else:
            parts.append(f"<|{xxh3_64_hexdigest(_canonical(part).encode())}|>")
    return "".join(parts)


def _canonical(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
