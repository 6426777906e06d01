"""Paged KV memory with prefix caching and an LRU free queue, in runs of blocks.

A run is a contiguous stretch of one chain element's blocks that are always held together. Blocks have no
identity beyond their run, so allocating is arithmetic on the run at the head of the free queue: a
prompt of 12,000 tokens given as 512-token hashes costs 24 runs instead of 750 blocks. With one block per key
the behaviour is vLLM's, block by block; with longer runs it differs only in that a hit on a part of a run
holds the whole run.
"""

from collections.abc import Iterator
from typing import Protocol


class PoolListener(Protocol):
    """Hears which keys' blocks can be hit."""

    def stored(self, key: int) -> None:
        """Its first blocks can be hit from now on."""

    def removed(self, key: int) -> None:
        """None of its blocks can be hit any more."""

    def cleared(self) -> None:
        """Nothing can be hit any more."""


class Run:
    """`count` blocks from block `base` of a chain; the first `cached` are full and can be hit.

    `key` names the chain element and is None for content nobody else can have. `refs` counts holders; a run
    without holders stands in the free queue, linked by `before` and `after`.
    """

    __slots__ = ("after", "base", "before", "cached", "count", "key", "refs")

    before: "Run"
    after: "Run"

    def __init__(self, key: int | None, base: int, count: int) -> None:
        self.key = key
        self.base = base
        self.count = count
        self.cached = 0
        self.refs = 1


class BlockPool:
    """All blocks of one engine: free, cached and free, or held."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free_blocks = 0
        self.listener: PoolListener | None = None
        self._index: dict[int | None, list[Run]] = {}
        self._ends = Run(None, 0, 0)
        self._ends.before = self._ends.after = self._ends
        self.release(Run(None, 0, blocks))

    def find(self, keys: list[int] | tuple[int, ...], blocks_per_key: int, limit: int) -> tuple[list[Run], int]:
        """The longest cached prefix of at most `limit` blocks: its runs, and its length in blocks."""
        found: list[Run] = []
        index = self._index
        start = 0
        for key in keys:
            if start >= limit:
                break
            runs = index.get(key)
            if runs is None:
                return found, start
            end = min(start + blocks_per_key, limit)
            first = runs[0]
            if first.base == start and start + first.cached >= end:
                found.append(first)
            else:
                reached = _cover(runs, start, end, found)
                if reached < end:
                    return found, reached
            start = end
        return found, start

    def free_among(self, runs: list[Run]) -> int:
        """Blocks of `runs` that stand in the free queue now."""
        return sum(run.count for run in runs if not run.refs)

    def hold(self, run: Run) -> None:
        """Take one more reference, out of the free queue if it was the first."""
        if not run.refs:
            run.before.after = run.after
            run.after.before = run.before
            self.free_blocks -= run.count
        run.refs += 1

    def release(self, run: Run) -> None:
        """Drop one reference; the last one puts the run at the tail of the free queue."""
        run.refs -= 1
        if not run.refs:
            ends = self._ends
            run.before = ends.before
            run.after = ends
            ends.before.after = run
            ends.before = run
            self.free_blocks += run.count

    def take(self, blocks: int) -> None:
        """Allocate from the head of the free queue, forgetting what was cached there, last block first.

        The caller has checked `free_blocks`.
        """
        if blocks > self.free_blocks:
            raise ValueError("not enough free blocks")
        self.free_blocks -= blocks
        ends = self._ends
        while blocks:
            run = ends.after
            if run.count > blocks:
                run.count -= blocks
                blocks = 0
            else:
                blocks -= run.count
                run.count = 0
                ends.after = run.after
                run.after.before = ends
            if run.cached > run.count:
                run.cached = run.count
                if not run.count:
                    self._forget(run)

    def fill(self, run: Run, cached: int) -> None:
        """Declare the run's first `cached` blocks full, so that others can hit them."""
        if run.key is not None and cached > run.cached:
            if not run.cached:
                runs = self._index.setdefault(run.key, [])
                runs.append(run)
                if self.listener is not None and len(runs) == 1:
                    self.listener.stored(run.key)
            run.cached = cached

    def forget_all(self) -> None:
        """Empty the cache. Only sensible while nothing is held."""
        for runs in self._index.values():
            for run in runs:
                run.cached = 0
        self._index.clear()
        if self.listener is not None:
            self.listener.cleared()

    def free_queue(self) -> Iterator[Run]:
        """The free runs, the next to be reused first."""
        run = self._ends.after
        while run is not self._ends:
            yield run
            run = run.after

    def cached_runs(self) -> Iterator[Run]:
        """Every run that can be hit."""
        for runs in self._index.values():
            yield from runs

    def _forget(self, run: Run) -> None:
        runs = self._index[run.key]
        runs.remove(run)
        if not runs:
            del self._index[run.key]
            if self.listener is not None and run.key is not None:
                self.listener.removed(run.key)


def _cover(runs: list[Run], start: int, end: int, found: list[Run]) -> int:
    """Cover the blocks from `start` to `end` with the cached parts of `runs`; returns how far they reach."""
    reached = start
    while reached < end:
        best = max((run for run in runs if run.base <= reached), key=lambda run: run.base + run.cached, default=None)
        if best is None or best.base + best.cached <= reached:
            break
        found.append(best)
        reached = best.base + best.cached
    return min(reached, end)
