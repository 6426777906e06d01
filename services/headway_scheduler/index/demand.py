"""Which prefixes are in demand: how many requests in flight begin with each.

A prefix that many ask for at once is worth more copies than the endpoints that happen to hold it. What it costs to make
one is paid once; who uses it afterwards is about as many as are in flight now, shared among the holders.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np

from headway_scheduler.index.chain import FloatArray
from headway_scheduler.index.hashing import Chain

__all__ = ["Demand"]

_LEAST: Final = 2
"""Requests in flight, beside the one that asks, that make a prefix shared: one more may be the same session's."""
_MANY: Final = 256


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

    def invested(self, chain: Chain, hits: FloatArray, uses: float) -> FloatArray | None:
        """Of the tokens that each candidate lacks, those that others will use there; None: none.

        `hits`: what each candidate holds, in tokens. Each request in flight with a prefix stands for `uses` to come,
        shared among its holders and the new one: that share of its prefill, less one's own, is an investment.
        """
        depths, asking = [0.0], []
        for depth, value in zip(self._depths, self._prefixes(chain), strict=False):
            count = self._counts.get(value, 0)
            if count < _LEAST:
                break
            depths.append(depth * chain.block_tokens)
            asking.append(count)
        if not asking:
            return None
        sparse = len(hits) > _MANY  # of a large fleet few endpoints hold anything of a prompt
        some = np.flatnonzero(hits) if sparse else None
        held = hits if some is None else hits.take(some)
        lacking = np.sort(held).searchsorted(depths[1:]).tolist()
        invested = [0.0]
        for number, count in enumerate(asking):
            users = uses * count / (len(held) - lacking[number] + 1)
            part = 1.0 - 1.0 / max(1.0, users)
            invested.append(invested[-1] + part * (depths[number + 1] - depths[number]))
        if not invested[-1]:
            return None
        found: FloatArray = invested[-1] - np.interp(held, depths, invested)
        if some is None:
            return found
        everywhere = np.full(len(hits), invested[-1])
        everywhere[some] = found
        return everywhere

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
