"""Where the turns of a conversation end in a prompt, and a memory of such ends.

Several peers recognise a conversation by the prompts that came before. A chat's canonical text marks its messages:
there, every user message ends a turn. Token ids, block hashes and plain text have no marks: there, a turn can end at
any block, and is known to end where an earlier prompt ended.
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

_MESSAGE: Final = b"\x01"
_USER: Final = b"\x01user\x02"
_CONTENT: Final = b"\x03"
_BYTES_PER_TOKEN: Final = 4.0
_MAX_BLOCKS: Final = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ends:
    """Hashes of a prompt's prefixes, shortest first. `marked`: each one ends a turn; else each one ends a block."""

    hashes: Sequence[int]
    marked: bool

    def recordable(self, least_blocks: int) -> bool:
        """May the prompt's own end be told from others'? Not if it is unmarked and within the first blocks.

        So near the beginning all conversations may still look the same, as their true first turns would not.
        """
        return len(self.hashes) >= (1 if self.marked else least_blocks)


def turn_ends(request: Request) -> Ends:
    """Where turns end, or can end, in this prompt."""
    prompt = request.prompt
    if isinstance(prompt, BlocksPrompt):
        return Ends(prompt.hashes, False)
    if isinstance(prompt, TextPrompt) and _MESSAGE in prompt.data:
        return Ends(_chat_ends(prompt.data), True)
    return Ends(chain_of(request, _BYTES_PER_TOKEN, _MAX_BLOCKS).hashes, False)


def first_user_bytes(text: bytes, count: int) -> bytes:
    """The first bytes of a chat's first user message; of the whole text where it is no chat or has none."""
    _, found, said = text.partition(_USER)
    if not found:
        return text[:count]
    _, _, content = said.partition(_CONTENT)
    return content[:count].partition(_MESSAGE)[0]


def _chat_ends(text: bytes) -> list[int]:
    """One chained hash a turn: up to the end of each user message, and of the last message whoever said it."""
    pending, *rest = text.split(_USER)
    ends: list[int] = []
    parent = 0
    for piece in rest:
        said, mark, after = piece.partition(_MESSAGE)
        parent = xxh3_64_intdigest(pending + _USER + said, parent)
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
