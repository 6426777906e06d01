"""Which prefixes are in demand: how many requests in flight begin with each.

A prefix that many ask for at once is worth more copies than the endpoints that happen to hold it. What it costs to make
one is paid once; who uses it afterwards is about as many as are in flight now, shared among the holders.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np

from headway_scheduler.index.values import Chain, FloatArray

__all__ = ["Asked", "Demand"]

Asked = tuple[FloatArray, FloatArray]
"""Depths of shared prefixes, in tokens, the shortest first, and the requests in flight that begin with each."""

_NOBODY: Final[Asked] = (np.zeros(0), np.zeros(0))

_LEAST: Final = 2
"""Requests in flight, beside the one that asks, that make a prefix shared: one more may be the same session's."""


def _looked_at(deepest: int) -> list[int]:
    """Depths in blocks at which prefixes are counted: 1, 2, 3, then 4, 6, 8, 12, 16, 24, … so that few are enough."""
    depths = [1, 2, 3]
    while depths[-1] < deepest:
        depths.append(2 * depths[-2])
    return depths


class Demand:
    """Counts prefixes of requests in flight; what nobody asks for is not kept."""

    def __init__(self, deepest: int = 4096) -> None:
        self._depths = _looked_at(deepest)
        self._counts: dict[int, int] = {}
        self._pick: dict[int, Callable[[list[int]], Sequence[int]]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def begin(self, chain: Chain) -> None:
        """A request with this prompt is in flight."""
        counts = self._counts
        for value in self._prefixes(chain):
            counts[value] = counts.get(value, 0) + 1

    def end(self, chain: Chain) -> None:
        """It is no longer."""
        counts = self._counts
        for value in self._prefixes(chain):
            left = counts[value] - 1
            if left:
                counts[value] = left
            else:
                del counts[value]

    def shared_tokens(self, chain: Chain) -> float:
        """Tokens of the longest prefix that others in flight begin with too."""
        shared = 0
        for depth, value in zip(self._depths, self._prefixes(chain), strict=False):
            if self._counts.get(value, 0) < _LEAST:
                break
            shared = depth
        return shared * chain.block_tokens

    def asked(self, chain: Chain) -> Asked:
        """Which prefixes of this chain are shared, and by how many in flight."""
        depths, asking = [], []
        for depth, value in zip(self._depths, self._prefixes(chain), strict=False):
            count = self._counts.get(value, 0)
            if count < _LEAST:
                break
            depths.append(depth * chain.block_tokens)
            asking.append(count)
        if not asking:
            return _NOBODY
        return np.array(depths, np.float64), np.array(asking, np.float64)

    def _prefixes(self, chain: Chain) -> Sequence[int]:
        hashes = chain.hashes
        pick = self._pick.get(len(hashes))
        if pick is None:
            pick = self._pick[len(hashes)] = self._picker(len(hashes))
        return pick(hashes)

    def _picker(self, length: int) -> Callable[[list[int]], Sequence[int]]:
        """What takes the looked-at prefixes out of a chain of so many blocks."""
        depths = self._depths[: bisect_right(self._depths, length)]
        if len(depths) < 2:
            return lambda hashes: hashes[: len(depths)]
        found: Any = itemgetter(*(depth - 1 for depth in depths))  # of two and more, it gives a tuple
        picker: Callable[[list[int]], Sequence[int]] = found
        return picker
