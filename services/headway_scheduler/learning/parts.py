"""What is learned is saved in parts: a fixed number of documents, each by itself and only where something changed."""

from collections.abc import Callable
from typing import Final
from zlib import crc32

__all__ = ["PARTS", "Parts", "part_of"]

PARTS: Final = 64
"""Of 10,000 endpoints a part holds some 160, and is 40 KB."""


def part_of(name: str) -> int:
    """Where a name belongs: the same in every process and every version."""
    return crc32(name.encode()) % PARTS


class Parts:
    """Which keys are in which part, and which parts changed since they were taken.

    `name` says by what of a key its part is found. Whoever changes what is learned under a key adds it to `touched`.
    """

    __slots__ = ("_changed", "_keys", "_name", "_part", "touched")

    def __init__(self, name: Callable[[str], str] = str) -> None:
        self.touched: set[str] = set()
        self._name = name
        self._part: dict[str, int] = {}
        self._keys: list[dict[str, None]] = [{} for _ in range(PARTS)]
        self._changed: set[int] = set()

    def place(self, key: str) -> None:
        """It is there, as the newest of its part, which has changed by it."""
        part = self._part.get(key)
        if part is None:
            part = self._part[key] = part_of(self._name(key))
        self._keys[part].pop(key, None)
        self._keys[part][key] = None
        self._changed.add(part)

    def remove(self, key: str) -> None:
        """It is there no more."""
        part = self._part.pop(key)
        del self._keys[part][key]
        self._changed.add(part)

    def changed(self) -> list[int]:
        """The parts that are not saved as they are."""
        # What was removed meanwhile is nowhere: an endpoint beyond the limit goes on learning, and is not saved.
        self._changed.update(self._part[key] for key in self.touched if key in self._part)
        self.touched.clear()
        return sorted(self._changed)

    def take(self, part: int) -> list[str]:
        """The keys of a part, oldest first; it has not changed any more."""
        self.touched.difference_update(self._keys[part])
        self._changed.discard(part)
        return list(self._keys[part])

    def put_back(self, part: int) -> None:
        """It was taken, and could not be saved."""
        self._changed.add(part)

    def touch_all(self) -> None:
        """Nothing is saved in parts."""
        self._changed.update(self._part.values())

    def settle(self) -> None:
        """Everything is saved as it is."""
        self.touched.clear()
        self._changed.clear()
