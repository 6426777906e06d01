"""Where the turns of a conversation end in a prompt, and a memory of such ends.

Several peers recognise a conversation by the prompts that came before. A chat's text marks its messages: there, every
user message ends a turn. Token ids, block hashes and plain text have no marks: there, a turn can end at any block, and
is known to end where an earlier prompt ended.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from headway_scheduler.domain.request import BlocksPrompt, Request, TextPrompt
from headway_scheduler.index.hashing import chain_of
from xxhash import xxh3_64_intdigest

__all__ = ["LEAST_BLOCKS", "Ends", "TurnMemory", "first_user_bytes", "turn_ends"]

LEAST_BLOCKS: Final = 8
"""Index blocks (8: 1,024 tokens, or 2 KB of text) within which an unmarked prompt's end means nothing."""

_CUT_BLOCKS: Final = 4
"""A trace's own block may be 4 of ours (Mooncake: 512 tokens), and its last, cut one is no prefix of a later prompt."""
_BYTES_PER_TOKEN: Final = 4.0
_MAX_BLOCKS: Final = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Markup:
    """How a chat's text marks messages: what begins one, what begins a user's and its content, what asks for more."""

    message: bytes
    user: bytes
    content: bytes
    prompt_end: bytes


_CANONICAL: Final = _Markup(b"\x01", b"\x01user\x02", b"\x03", b"")
"""The scheduler's text of a chat (`canonical_chat`)."""
_RENDERED: Final = _Markup(b"<|", b"<|user|>", b"", b"<|assistant|>")
"""The emulator's and the workloads' (`render_chat`)."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Hashes of a prompt's prefixes, shortest first. `marked`: each one ends a turn; else each one ends a block."""

    hashes: Sequence[int]
    marked: bool

    def own(self, least_blocks: int = LEAST_BLOCKS) -> Sequence[int]:
        """Where this prompt itself ends: what a later prompt that extends it shares with it, and others do not.

        If unmarked, the last few blocks, as any of the last may be cut; but none within the first `least_blocks`: so
        near the beginning all conversations may still look the same, as their true first turns would not.
        """
        if self.marked:
            return self.hashes[-1:]
        return self.hashes[max(least_blocks - 1, len(self.hashes) - _CUT_BLOCKS) :]


def turn_ends(request: Request) -> Ends:
    """Where turns end, or can end, in this prompt."""
    prompt = request.prompt
    if isinstance(prompt, BlocksPrompt):
        return Ends(prompt.hashes, False)
    if isinstance(prompt, TextPrompt):
        markup = _markup_of(prompt.data)
        if markup is not None:
            return Ends(_chat_ends(prompt.data, markup), True)
    return Ends(chain_of(request, _BYTES_PER_TOKEN, _MAX_BLOCKS).hashes, False)


def first_user_bytes(text: bytes, count: int) -> bytes:
    """The first bytes of a chat's first user message; of the whole text where it is no chat or has none."""
    markup = _markup_of(text)
    if markup is None:
        return text[:count]
    _, found, said = text.partition(markup.user)
    if not found:
        return text[:count]
    if markup.content:
        said = said.partition(markup.content)[2]
    return said[:count].partition(markup.message)[0]


def _markup_of(text: bytes) -> _Markup | None:
    if _CANONICAL.message in text:
        return _CANONICAL
    return _RENDERED if text.startswith(_RENDERED.message) else None


def _chat_ends(text: bytes, markup: _Markup) -> list[int]:
    """One chained hash a turn: up to the end of each user message, and of the last message whoever said it."""
    pending, *rest = text.removesuffix(markup.prompt_end).split(markup.user)
    ends: list[int] = []
    parent = 0
    for piece in rest:
        said, mark, after = piece.partition(markup.message)
        parent = xxh3_64_intdigest(pending + markup.user + said, parent)
        ends.append(parent)
        pending = mark + after
    if pending or not ends:
        ends.append(xxh3_64_intdigest(pending, parent))
    return ends


class TurnMemory(Generic[T]):
    """What was remembered at a turn's end, until nobody asked for `ttl_s` seconds."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._kept: OrderedDict[int, tuple[float, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def expire(self, now: float) -> None:
        """Forget what is due."""
        kept = self._kept
        while kept:
            key = next(iter(kept))
            if kept[key][0] > now:
                return
            del kept[key]

    def longest(self, hashes: Sequence[int]) -> int:
        """Index of the last of `hashes` that is remembered; −1 if none is."""
        kept = self._kept
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in kept:
                return index
        return -1

    def get(self, key: int) -> T:
        """What is remembered there. Raises KeyError."""
        return self._kept[key][1]

    def keep(self, key: int, value: T, now: float) -> None:
        """Remember, from now on."""
        self._kept[key] = (now + self._ttl_s, value)
        self._kept.move_to_end(key)

    def touch(self, key: int, now: float) -> None:
        """Remember as long again as if it were new. Raises KeyError."""
        self.keep(key, self.get(key), now)
