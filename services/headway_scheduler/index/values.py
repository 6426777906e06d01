"""Prompts as chains of blocks, and who holds how much of one, in values made in C (ADR 25)."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from headway_scheduler.index.masks import mark

__all__ = ["NOTHING", "Chain", "FloatArray", "Match", "Place", "Tail"]

FloatArray = npt.NDArray[np.float64]
Place = slice | npt.NDArray[np.integer[Any]]
"""Where some slots' entries lie in arrays that have one for each slot."""


class Chain(msgspec.Struct, frozen=True, gc=False):
    """A prompt's blocks: one hash each, and how many tokens a block stands for.

    `rest_bytes` stand after the last full block, each block being `block_bytes`; `rest_hash` tells them from others.
    Where only hashes are known both sizes are 0.
    """

    root: int
    hashes: list[int]
    block_tokens: float
    block_bytes: int = 0
    rest_bytes: int = 0
    rest_hash: int = 0

    def rest_in(self, data: bytes, depth: int, size: int) -> int:
        """The hash of the `size` bytes of `data` after `depth` full blocks; 0 where there are not so many."""
        start = depth * self.block_bytes
        part = data[start : start + size]
        return xxh3_64_intdigest(part) if self.block_bytes and len(part) == size else 0


class Match(msgspec.Struct, frozen=True, gc=False):
    """How deep each endpoint holds a chain: `(mask of slots, blocks)` pairs, masks disjoint; `tails`: tokens beyond."""

    levels: tuple[tuple[int, int], ...]
    block_tokens: float
    tails: tuple[tuple[int, float], ...] = ()

    def tokens(self, place: Place, capacity: int) -> FloatArray:
        """Tokens held at each `place`; `capacity` is above every slot."""
        held = np.zeros(capacity)
        for mask, blocks in self.levels:
            mark(held, mask, blocks * self.block_tokens)
        for slot, tokens in self.tails:
            held[slot] += tokens
        return held[place]

    def transfer_ms(self, place: Place, capacity: int, ms_per_token: Sequence[float]) -> FloatArray | None:
        """Where blocks lie is not known: nothing."""
        return None

    def known(self, place: Place, capacity: int) -> FloatArray | None:
        """All of it is a guess."""
        return None


class Tail(msgspec.Struct, frozen=True, gc=False):
    """What an endpoint holds beyond a prompt's last full block."""

    rest_bytes: int
    rest_hash: int
    tokens: float


NOTHING = Match((), 1.0)
