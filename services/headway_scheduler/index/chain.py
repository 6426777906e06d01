"""Who holds which prefix: an approximate image of every endpoint's KV cache, in index blocks.

One table maps a block's chained hash to the set of endpoints that hold it, as a bit mask over endpoint slots; so a
match costs one lookup a block, whatever the number of endpoints. Beside it each endpoint has its blocks in order of
use, bounded by the tokens its KV cache can hold.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headway_scheduler.index.hashing import Chain

__all__ = ["ChainIndex", "Match"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Match:
    """How deep each endpoint holds a chain: `(mask of slots, blocks)` pairs, masks disjoint."""

    levels: tuple[tuple[int, int], ...]
    block_tokens: float

    def tokens(self, slots: npt.NDArray[np.int32], capacity: int) -> FloatArray:
        """Tokens held by each of `slots`; `capacity` is above every slot."""
        held = np.zeros(capacity)
        for mask, blocks in self.levels:
            held[_slots_in(mask, capacity)] = blocks * self.block_tokens
        return held[slots]


_NOTHING = Match((), 1.0)


def _slots_in(mask: int, capacity: int) -> npt.NDArray[np.intp]:
    if mask.bit_count() == 1:
        return np.array([mask.bit_length() - 1])
    raw = np.frombuffer(mask.to_bytes((capacity + 7) // 8, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(raw, bitorder="little"))


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

    def set_capacity(self, slot: int, tokens: float | None) -> None:
        """Bound what `slot` can hold; None: unknown."""
        holding = self._holding(slot)
        holding.capacity_tokens = self._default_capacity if tokens is None else tokens
        self._shrink(slot, holding)

    def touch(self, slot: int, chain: Chain) -> None:
        """`slot` holds this chain from now on, as its most recently used; what no longer fits is forgotten."""
        holding = self._holding(slot)
        blocks, holders, bit = holding.blocks, self._holders, 1 << slot
        # Deepest first, so that the root of the chain is used last and the leaves are forgotten before it.
        for value in reversed(chain.hashes):
            if value in blocks:
                blocks.move_to_end(value)
            else:
                blocks[value] = chain.block_tokens
                holding.tokens += chain.block_tokens
                holders[value] = holders.get(value, 0) | bit
        self._shrink(slot, holding)

    def match(self, chain: Chain) -> Match:
        """How deep every endpoint holds this chain."""
        hashes, holders = chain.hashes, self._holders
        active = holders.get(hashes[0], 0) if hashes else 0
        if not active:
            return _NOTHING
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
        return Match(tuple(levels), chain.block_tokens)

    def forget(self, slot: int, hashes: tuple[int, ...]) -> None:
        """`slot` no longer holds these blocks."""
        holding = self._holding(slot)
        for value in hashes:
            tokens = holding.blocks.pop(value, None)
            if tokens is not None:
                holding.tokens -= tokens
                self._unhold(slot, value)

    def drop(self, slot: int) -> None:
        """Forget everything `slot` holds: it restarted, cleared its cache, or left. Its capacity stays."""
        holding = self._holdings.get(slot)
        if holding is not None:
            for value in holding.blocks:
                self._unhold(slot, value)
            holding.blocks.clear()
            holding.tokens = 0.0

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

    def _shrink(self, slot: int, holding: _Holding) -> None:
        while holding.tokens > holding.capacity_tokens and holding.blocks:
            value, tokens = holding.blocks.popitem(last=False)
            holding.tokens -= tokens
            self._unhold(slot, value)

    def _unhold(self, slot: int, value: int) -> None:
        rest = self._holders[value] & ~(1 << slot)
        if rest:
            self._holders[value] = rest
        else:
            del self._holders[value]
