"""Similar prompts: the article's fingerprint with locality-sensitive hashing.

A fingerprint is the 64-bit SimHash of the 4-byte shingles of the first 128 characters (ARTICLE.md, Prefix match). Two
prompts are similar when their fingerprints differ in at most 6 bits; candidates come from four bands of 16 bits.
"""

from collections import OrderedDict
from typing import Final

import numpy as np

__all__ = ["FingerprintIndex", "fingerprint"]

PREFIX_CHARACTERS: Final = 128
SHINGLE_BYTES: Final = 4
BANDS: Final = 4
BAND_BITS: Final = 16
MAX_DISTANCE: Final = 6


def fingerprint(data: bytes) -> int:
    """SimHash of the first 128 characters of UTF-8 `data`; shorter than a shingle: a hash of its bytes."""
    head = data[: PREFIX_CHARACTERS * 4].decode("utf-8", "ignore")[:PREFIX_CHARACTERS].encode()
    head = head.ljust(SHINGLE_BYTES, b"\0")
    letters = np.frombuffer(head, np.uint8).astype(np.uint64)
    count = len(letters) - SHINGLE_BYTES + 1
    shingles = letters[:count].copy()
    for offset in range(1, SHINGLE_BYTES):
        shingles |= letters[offset : offset + count] << np.uint64(8 * offset)
    bits = np.unpackbits(_mix(shingles).view(np.uint8).reshape(count, 8), axis=1, bitorder="little")
    majority = np.packbits(bits.sum(axis=0) * 2 > count, bitorder="little")
    return int(majority.view(np.uint64)[0])


def _mix(values: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """SplitMix64's finaliser: spreads each shingle over 64 bits."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class FingerprintIndex:
    """Which endpoints served prompts similar to this one; the `capacity` most recently used fingerprints are kept.

    Every key holds the chain's root, so that isolation domains never meet.
    """

    def __init__(self, capacity: int = 50_000) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._bands: dict[tuple[int, int, int], set[int]] = {}

    def touch(self, slot: int, root: int, value: int) -> None:
        """`slot` serves a prompt with this fingerprint."""
        key = (root, value)
        if key not in self._holders:
            for band in _bands(root, value):
                self._bands.setdefault(band, set()).add(value)
        self._holders[key] = self._holders.get(key, 0) | (1 << slot)
        self._holders.move_to_end(key)
        while len(self._holders) > self._capacity:
            self._remove(self._holders.popitem(last=False)[0])

    def match(self, root: int, value: int) -> int:
        """Mask of the slots that hold the nearest similar fingerprint; 0: none is similar."""
        exact = self._holders.get((root, value))
        if exact is not None:
            return exact
        near = set().union(*(self._bands.get(band, ()) for band in _bands(root, value)))
        distance, nearest = min((((other ^ value).bit_count(), other) for other in near), default=(64, 0))
        return self._holders[(root, nearest)] if distance <= MAX_DISTANCE else 0

    def drop(self, slot: int) -> None:
        """Forget `slot`. Costs one pass over the fingerprints, of which there are at most `capacity`."""
        keep = ~(1 << slot)
        for key, mask in list(self._holders.items()):
            if mask & ~keep:
                if mask & keep:
                    self._holders[key] = mask & keep
                else:
                    del self._holders[key]
                    self._remove(key)

    def __len__(self) -> int:
        return len(self._holders)

    def _remove(self, key: tuple[int, int]) -> None:
        root, value = key
        for band in _bands(root, value):
            members = self._bands[band]
            members.discard(value)
            if not members:
                del self._bands[band]


def _bands(root: int, value: int) -> list[tuple[int, int, int]]:
    mask = (1 << BAND_BITS) - 1
    return [(root, band, (value >> (band * BAND_BITS)) & mask) for band in range(BANDS)]
