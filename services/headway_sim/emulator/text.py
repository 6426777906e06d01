"""What the emulator reads: one canonical byte string per prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_hexdigest


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
