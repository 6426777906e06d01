"""Who holds which prefix: an approximate image of every endpoint's KV cache, in index blocks.

One table maps a block's chained hash to the set of endpoints that hold it, as a bit mask over endpoint slots; so a
match costs one lookup a block, whatever the number of endpoints. Beside it each endpoint has its blocks in order of
use, bounded by the tokens its KV cache can hold.

An engine also caches what it answered, which nobody can hash beforehand. So the end of an answered prompt has a tail:
the bytes after its last full block, and the answer's tokens. A prompt that goes on exactly where that one ended is
its conversation's next turn, and has the tail too.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from headway_scheduler.index.values import NOTHING, Chain, Match, Tail

__all__ = ["ChainIndex", "slots_in"]


_SLICE: Final = 1000
"""Blocks of a dropped endpoint taken out at once: about a millisecond."""
_MOST_WAITING: Final = 1000
"""Chains given to an endpoint while what it held before is still being taken out."""


def _bits(mask: int, capacity: int) -> npt.NDArray[np.bool_]:
    raw = np.frombuffer(mask.to_bytes((capacity + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=capacity, bitorder="little").view(np.bool_)


def slots_in(mask: int, capacity: int) -> npt.NDArray[np.intp]:
    """The slots of a mask; `capacity` is above every one."""
    if mask.bit_count() == 1:
        return np.array([mask.bit_length() - 1])
    return np.flatnonzero(_bits(mask, capacity))


@dataclass(slots=True)
class _Holding:
    """One endpoint's blocks, least recently used first, and the tokens they stand for."""

    blocks: OrderedDict[int, float] = field(default_factory=OrderedDict)
    tokens: float = 0.0
    capacity_tokens: float = 0.0


class ChainIndex:
    """Longest-prefix match over all endpoints.

    `default_capacity_tokens` bounds endpoints that do not say how much their KV cache holds.
    """

    def __init__(self, default_capacity_tokens: float = 200_000.0) -> None:
        self._default_capacity = default_capacity_tokens
        self._holders: dict[int, int] = {}
        self._holdings: dict[int, _Holding] = {}
        self._tails: dict[int, dict[int, Tail]] = {}
        self._leaving: dict[int, _Holding] = {}
        self._gone = 0
        self._waiting: dict[int, deque[Chain]] = {}

    def set_capacity(self, slot: int, tokens: float | None) -> None:
        """Bound what `slot` can hold; None: unknown."""
        holding = self._holding(slot)
        holding.capacity_tokens = self._default_capacity if tokens is None else tokens
        self._shrink(slot, holding)

    def touch(self, slot: int, chain: Chain) -> None:
        """`slot` holds this chain from now on, as its most recently used; what no longer fits is forgotten."""
        if slot in self._leaving:
            self._waiting.setdefault(slot, deque(maxlen=_MOST_WAITING)).append(chain)
            return
        holding = self._holding(slot)
        blocks, holders, bit = holding.blocks, self._holders, 1 << slot
        tails = self._tails
        for value in chain.hashes[:-1]:
            if value in tails:
                self._cut(slot, holding, value)  # it is in the blocks that follow now
        # Deepest first, so that the root of the chain is used last and the leaves are forgotten before it.
        for value in reversed(chain.hashes):
            if value in blocks:
                blocks.move_to_end(value)
            else:
                blocks[value] = chain.block_tokens
                holding.tokens += chain.block_tokens
                holders[value] = holders.get(value, 0) | bit
        if holding.tokens > holding.capacity_tokens:
            self._shrink(slot, holding)

    def answered(self, slot: int, chain: Chain, tokens: int) -> None:
        """`slot` has answered the prompt of this chain with so many tokens, and holds them too."""
        holding = self._holding(slot)
        if not chain.hashes or chain.hashes[-1] not in holding.blocks:
            return
        last = chain.hashes[-1]
        self._cut(slot, holding, last)
        rest_tokens = chain.rest_bytes * chain.block_tokens / chain.block_bytes if chain.block_bytes else 0.0
        tail = Tail(chain.rest_bytes, chain.rest_hash, rest_tokens + tokens)
        self._tails.setdefault(last, {})[slot] = tail
        holding.tokens += tail.tokens
        self._shrink(slot, holding)

    def match(self, chain: Chain, data: bytes = b"") -> Match:
        """How deep every endpoint holds this chain; `data`, the prompt's bytes, shows whether it has a tail too."""
        hashes, holders = chain.hashes, self._holders
        active = holders.get(hashes[0], 0) & ~self._gone if hashes else 0
        if not active:
            return NOTHING
        levels: list[tuple[int, int]] = []
        for depth in range(1, len(hashes)):
            still = active & holders.get(hashes[depth], 0)
            if still != active:
                levels.append((active & ~still, depth))
                active = still
                if not active:
                    break
        if active:
            levels.append((active, len(hashes)))
        return Match(tuple(levels), chain.block_tokens, self._tails_of(chain, levels, data))

    def forget(self, slot: int, hashes: tuple[int, ...]) -> None:
        """`slot` no longer holds these blocks."""
        holding = self._holding(slot)
        for value in hashes:
            tokens = holding.blocks.pop(value, None)
            if tokens is not None:
                holding.tokens -= tokens
                self._unhold(slot, holding, value)

    def drop(self, slot: int) -> None:
        """Forget everything `slot` holds: it restarted, cleared its cache, or left. Its capacity stays.

        It matches nothing from now on. Where it holds much, that is taken out by `tidy`, a slice at a time, since it
        would stop every decision meanwhile; what the slot is given until then counts once that is done.
        """
        self._waiting.pop(slot, None)
        holding = self._holdings.get(slot)
        if holding is None or not holding.blocks:
            return
        self._holdings[slot] = _Holding(capacity_tokens=holding.capacity_tokens)
        if len(holding.blocks) <= _SLICE:
            self._let_go(slot, holding)
        else:
            self._leaving[slot] = holding
            self._gone |= 1 << slot

    def tidy(self) -> bool:
        """Do a slice of what `drop` left to be done; False: there is nothing. To be called now and then."""
        for slot, holding in self._leaving.items():
            if self._let_go(slot, holding):
                del self._leaving[slot]
                self._gone &= ~(1 << slot)
                for chain in self._waiting.pop(slot, ()):
                    self.touch(slot, chain)
            return True
        return False

    def blocks(self, slot: int) -> int:
        """How many blocks `slot` holds."""
        holding = self._holdings.get(slot)
        return 0 if holding is None else len(holding.blocks)

    def __len__(self) -> int:
        return len(self._holders)

    def _holding(self, slot: int) -> _Holding:
        holding = self._holdings.get(slot)
        if holding is None:
            holding = self._holdings[slot] = _Holding(capacity_tokens=self._default_capacity)
        return holding

    def _let_go(self, slot: int, holding: _Holding) -> bool:
        """Take a slice of the blocks out; True: that was all of them."""
        blocks = holding.blocks
        for _ in range(min(_SLICE, len(blocks))):
            value, _tokens = blocks.popitem()
            self._unhold(slot, holding, value)
        return not blocks

    def _shrink(self, slot: int, holding: _Holding) -> None:
        while holding.tokens > holding.capacity_tokens and holding.blocks:
            value, tokens = holding.blocks.popitem(last=False)
            holding.tokens -= tokens
            self._unhold(slot, holding, value)

    def _tails_of(self, chain: Chain, levels: list[tuple[int, int]], data: bytes) -> tuple[tuple[int, float], ...]:
        found = []
        for mask, depth in levels:
            tails = self._tails.get(chain.hashes[depth - 1])
            for slot, tail in tails.items() if tails else ():
                if (
                    mask >> slot & 1
                    and tail.rest_hash
                    and chain.rest_in(data, depth, tail.rest_bytes) == tail.rest_hash
                ):
                    found.append((slot, tail.tokens))
        return tuple(found)

    def _cut(self, slot: int, holding: _Holding, value: int) -> None:
        """Forget the tail of this block on `slot`."""
        tails = self._tails.get(value)
        if tails is not None and slot in tails:
            holding.tokens -= tails.pop(slot).tokens
            if not tails:
                del self._tails[value]

    def _unhold(self, slot: int, holding: _Holding, value: int) -> None:
        self._cut(slot, holding, value)
        rest = self._holders[value] & ~(1 << slot)
        if rest:
            self._holders[value] = rest
        else:
            del self._holders[value]
