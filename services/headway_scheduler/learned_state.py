"""What models learned, between them and the store: in parts, so that no save and no statement is long."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from headway_scheduler.learning.parts import PARTS
from headway_scheduler.store.base import LearnedStore

__all__ = ["LearnedState", "Parted"]

log = structlog.get_logger()

_STATEMENT_BYTES: Final = 64 * 1024
"""With so much a statement is sent; with the part that reaches it, it has twice as much at most, of endpoints."""


class Parted(Protocol):
    """Something that learns, and is saved in `PARTS` parts: independent documents, each right by itself."""

    def changed(self) -> list[int]:
        """The parts that are not saved as they are."""
        ...

    def dump_part(self, part: int) -> bytes:
        """A part's document; it has not changed any more."""
        ...

    def put_back(self, part: int) -> None:
        """It was dumped, and could not be saved."""
        ...

    def touch_all(self) -> None:
        """Nothing is saved in parts."""
        ...

    def restore_parts(self, states: Mapping[str, bytes]) -> dict[str, ValueError]:
        """Take over these documents, later ones over earlier ones; returns what is wrong with those left out."""
        ...


class LearnedState:
    """Saves what changed of each kind, and restores it. A kind's name with a part's number is its key in the store.

    A save that ends half way leaves parts of two saves, each of them whole; the rest is saved by the next.
    """

    def __init__(self, store: LearnedStore, kinds: Mapping[str, Parted]) -> None:
        self._store, self._kinds = store, kinds
        self._left: set[str] = set()
        self._hurry = asyncio.Event()
        self._saving = asyncio.Lock()

    def restore(self, learned: Mapping[str, bytes]) -> None:
        """Take over what was saved.

        Versions before this one knew one document of each kind, called as the kind. Where there is one, such a version
        wrote it last: what it says counts, is saved in parts, and the document is removed.
        """
        self._left.clear()
        for name, kind in self._kinds.items():
            parts = {_key(name, part): part for part in range(PARTS)}
            left = [key for key in learned if key == name or (key.startswith(f"{name}/") and key not in parts)]
            problems = kind.restore_parts({key: learned[key] for key in (*parts, *left) if key in learned})
            for key, problem in problems.items():
                log.warning("learned_state_ignored", key=key, problem=str(problem))
                if key in parts:
                    kind.put_back(parts[key])
            if left:
                self._left.update(left)
                kind.touch_all()

    async def save(self, epoch: int | None, pause_s: float = 0.0) -> None:
        """Save what changed, with pauses as long as nobody waits for the end of it.

        Raises StoreDown, and Standby where another epoch has begun; what is not saved by then is saved by the next.
        """
        if self._saving.locked():
            self._hurry.set()
        async with self._saving:  # an older state must not come after a newer one
            self._hurry.clear()
            batch = _Batch()
            try:
                for key, kind, part in self._changed():
                    batch.add(key, kind, part)
                    if batch.size >= _STATEMENT_BYTES:
                        await self._write(batch, epoch)
                    await self._pause(pause_s)
                await self._write(batch, epoch)
            except BaseException:
                batch.put_back()
                raise
            if self._left:
                await self._store.forget_learned(sorted(self._left), epoch=epoch)
                self._left.clear()

    async def _pause(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()

    def _changed(self) -> Iterator[tuple[str, Parted, int]]:
        for name, kind in self._kinds.items():
            for part in kind.changed():
                yield _key(name, part), kind, part

    async def _write(self, batch: "_Batch", epoch: int | None) -> None:
        if batch.states:
            await self._store.save_learned(batch.states, epoch=epoch)
            batch.clear()


@dataclass(slots=True)
class _Batch:
    """Parts of one statement, to be put back if it fails."""

    states: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    _taken: list[tuple[Parted, int]] = field(default_factory=list)

    def add(self, key: str, kind: Parted, part: int) -> None:
        self._taken.append((kind, part))
        self.states[key] = kind.dump_part(part)
        self.size += len(self.states[key])

    def put_back(self) -> None:
        for kind, part in self._taken:
            kind.put_back(part)

    def clear(self) -> None:
        self.states, self.size, self._taken = {}, 0, []


def _key(name: str, part: int) -> str:
    return f"{name}/{part:02}"
