"""What a trace says, whatever its format."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_sim.engine import TOKEN_BYTES, count_tokens
from headway_sim.filler import filler_text, unique_text

HASH_ID_TOKENS = 512
"""Tokens that one Mooncake hash id stands for."""

UNKNOWN_OUTPUT = 0
"""Of a request that nobody saw answered; a loaded trace has none."""

_LEAST_BLOCK_TOKENS = 8


class TraceError(Exception):
    """A trace that cannot be read: says in which file, on which line, and which field is at fault."""

    def __init__(self, path: Path, line: int | None, field: str | None, message: str) -> None:
        place = f"{path}:{line}" if line is not None else str(path)
        super().__init__(f"{place}: {f'{field}: ' if field else ''}{message}")
        self.path = path
        self.line = line
        self.field = field


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt known by chained hashes of its 512-token blocks; the last one may be cut."""

    hash_ids: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids."""

    token_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Its length."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as text."""

    text: str

    @property
    def tokens(self) -> int:
        """Its length, counted as a quarter of its bytes."""
        return count_tokens(self.text.encode())


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as OpenAI chat messages (any JSON the API allows, hence Any)."""

    messages: tuple[dict[str, Any], ...]

    @property
    def tokens(self) -> int:
        """Its length, counted as a quarter of the bytes of its texts."""
        return sum(count_tokens(str(message.get("content", "")).encode()) for message in self.messages)


@dataclass(frozen=True, slots=True)
class LengthPrompt:
    """A prompt of which only the length is known: it shares nothing with any other `serial`."""

    tokens: int
    serial: int


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A prompt as a scheduler recorded it: chained hashes of blocks of `block_tokens` each, full ones only.

    `answer`: the hashes that follow in the request that went on from here, so what was answered, as far as is known.
    """

    blocks: tuple[int, ...]
    block_tokens: float
    tokens: int
    answer: tuple[int, ...] = ()


Prompt = RecordedPrompt | HashedPrompt | TokenPrompt | TextPrompt | ChatPrompt | LengthPrompt


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; `arrival_ms` counts from the trace's first request."""

    arrival_ms: float
    prompt: Prompt
    output_tokens: int
    session_id: str | None = None
    tenant: str | None = None
    max_tokens: int | None = None


def render_prompt(request: TraceRequest, scale: float = 1.0) -> str | list[int] | list[dict[str, Any]]:
    """The prompt to send: text, token ids or chat messages.

    Hash ids become text, so that equal prefixes give equal bytes (512 tokens = 2,048 bytes each); a bare
    length becomes text that nothing else shares. `scale` shrinks or stretches what is made up here and cuts
    text and token ids; chat messages stay as they are.
    """
    if not 0 < scale < float("inf"):
        raise ValueError("scale must be positive")
    match request.prompt:
        case HashedPrompt(hash_ids, tokens):
            return _hashed_text(hash_ids, tokens, scale)
        case RecordedPrompt(blocks, block_tokens, tokens):
            return _recorded_text(blocks, block_tokens, tokens, scale)
        case LengthPrompt(tokens, serial):
            return unique_text(serial, _scaled(tokens, scale))
        case TextPrompt(text):
            return text[: _scaled(len(text), scale)]
        case TokenPrompt(token_ids):
            return list(token_ids[: _scaled(len(token_ids), scale)])
        case ChatPrompt(messages):
            return list(messages)


def _hashed_text(hash_ids: tuple[int, ...], tokens: int, scale: float) -> str:
    block_tokens = max(_LEAST_BLOCK_TOKENS, round(HASH_ID_TOKENS * scale))
    last_tokens = tokens - HASH_ID_TOKENS * (len(hash_ids) - 1)
    last_scaled = min(block_tokens, _scaled(last_tokens, scale))
    parts = [_block_text(hash_id, block_tokens) for hash_id in hash_ids]
    parts[-1] = parts[-1][: last_scaled * TOKEN_BYTES]
    return "".join(parts)


def _recorded_text(blocks: tuple[int, ...], block_tokens: float, tokens: int, scale: float) -> str:
    """Full blocks by their hashes, and then what shares nothing with any other."""
    size = max(_LEAST_BLOCK_TOKENS, round(block_tokens * scale))
    rest = max(1, _scaled(tokens, scale) - size * len(blocks))
    serial = blocks[-1] if blocks else tokens
    return "".join(_block_text(block, size) for block in blocks) + unique_text(serial, rest)


def _block_text(hash_id: int, tokens: int) -> str:
    """One block: its id in hexadecimal, then filler."""
    label = f"{hash_id:016x}"
    return label + filler_text(hash_id, 0, tokens - len(label) // TOKEN_BYTES)


def _scaled(count: int, scale: float) -> int:
    return max(1, round(count * scale))
