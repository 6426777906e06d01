"""Who holds which prefix, exactly: what engines' KV events say, in index blocks, by memory tier.

Beside the approximate image (`chain`), which believes that what was routed is cached. A feed is believed instead of it
once it has shown, for prompts of a kind and a domain, that it speaks of what we ask: an engine whose events name no
salts, a data plane that forgets them, or a tokenizer that is not the engine's, would otherwise look like an empty
cache. Until then, and for a feed whose history
is not complete, whichever of the two knows more counts.

Keys are bound to a root of adapter and cache salt, so that an isolation domain is matched only with what was stored
under its own salt (docs/kv-events.md, Isolation).
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from headway_scheduler.index.chain import slots_in
from headway_scheduler.index.hashing import TOKENS, hash_blocks
from headway_scheduler.index.masks import mark
from headway_scheduler.index.values import FloatArray, Match, Place

__all__ = ["TIERS", "Exact", "Ids", "Kind", "KvIndex", "KvPrompt", "kv_root"]

BoolArray = npt.NDArray[np.bool_]

TIERS: Final = ("gpu", "cpu", "disk", "remote")
"""Nearest first."""
_BLOCK_TOKENS: Final = float(TOKENS.block_size)
_MOST_PROVEN: Final = 10_000
"""Kinds and roots of which it is remembered who spoke of them: isolation domains times adapters."""


class Kind(StrEnum):
    """How a prompt's token ids are known."""

    IDS = "ids"
    """From the caller, as ids or as hashes of them."""
    TEXT = "text"
    """Tokenised here."""
    CHAT = "chat"
    """Rendered here, by a template that may not be the engine's, and tokenised."""


@dataclass(frozen=True, slots=True)
class Ids:
    """A prompt tokenised here, as little-endian u32. Not `whole`: only its beginning."""

    data: bytes
    whole: bool = True
    chat: bool = False


def kv_root(adapter: str, salt: str) -> int:
    """What the keys of this adapter and cache salt are bound to; the agent computes the same."""
    return xxh3_64_intdigest("\0".join(("kv", adapter, salt, TOKENS.name)).encode())


@dataclass(slots=True)
class KvPrompt:
    """A prompt's chain of token blocks, bound to nobody yet. Keys are computed once a root.

    `tokens`: its length, where it was found here. Not `whole`: the prompt goes on.
    """

    contents: list[int]
    kind: Kind
    tokens: int | None = None
    whole: bool = True
    _keys: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of_ids(cls, data: bytes, max_blocks: int, kind: Kind = Kind.IDS) -> "KvPrompt":
        """From token ids as little-endian u32."""
        return cls(hash_blocks(data, 0, TOKENS.block_bytes, max_blocks), kind)

    @classmethod
    def of_text(cls, ids: Ids, max_blocks: int) -> "KvPrompt":
        """From what a tokenizer made of it."""
        contents = hash_blocks(ids.data, 0, TOKENS.block_bytes, max_blocks)
        tokens = len(ids.data) // TOKENS.unit_bytes if ids.whole else None
        return cls(contents, Kind.CHAT if ids.chat else Kind.TEXT, tokens, ids.whole)

    def keys(self, root: int) -> list[int]:
        """The index's keys of its blocks under this root."""
        found = self._keys.get(root)
        if found is None:
            found = [xxh3_64_intdigest(value.to_bytes(8, "little"), root) for value in self.contents]
            self._keys[root] = found
        return found


@dataclass(frozen=True, slots=True)
class Exact:
    """What feeds say of one prompt, over an approximate match of it.

    `depths[t]`: how deep each slot holds it in the tiers up to the t-th, as in `Match.levels`; `asked`: mask of the
    slots that were asked; `believed`: of those whose word counts alone.
    """

    approximate: Match
    depths: tuple[tuple[tuple[int, int], ...], ...]
    asked: int
    believed: int

    def tokens(self, place: Place, capacity: int) -> FloatArray:
        """Tokens held at each `place`, in any tier."""
        guessed = self.approximate.tokens(slice(None), capacity)
        known = _spread(self.depths[-1], capacity)
        believed = np.zeros(capacity, np.bool_)
        believed[slots_in(self.believed, capacity)] = True
        found: FloatArray = np.where(believed, known, np.maximum(known, guessed))[place]
        return found

    def transfer_ms(self, place: Place, capacity: int, ms_per_token: Sequence[float]) -> FloatArray | None:
        """What it costs each `place` to bring its tokens to the GPU; `ms_per_token` is by tier. None: nothing."""
        if all(deeper == self.depths[0] for deeper in self.depths[1:]):
            return None
        held = [_spread(levels, capacity) for levels in self.depths]
        cost = np.zeros(capacity)
        for tier in range(1, len(held)):
            cost += (held[tier] - held[tier - 1]) * ms_per_token[tier]
        found: FloatArray = cost[place]
        return found

    def known(self, place: Place, capacity: int) -> FloatArray:
        """Tokens that feeds say each `place` holds, without any guess."""
        found: FloatArray = _spread(self.depths[-1], capacity)[place]
        return found


def _spread(levels: Iterable[tuple[int, int]], capacity: int) -> FloatArray:
    held = np.zeros(capacity)
    for mask, blocks in levels:
        mark(held, mask, blocks * _BLOCK_TOKENS)
    return held


@dataclass(slots=True)
class _Tier:
    """Blocks of one tier: who holds each (a mask of slots), and what each slot holds."""

    holders: dict[int, int] = field(default_factory=dict)
    held: dict[int, set[int]] = field(default_factory=dict)

    def store(self, slot: int, hashes: Iterable[int]) -> None:
        holders, bit = self.holders, 1 << slot
        for value in hashes:
            holders[value] = holders.get(value, 0) | bit
        self.held.setdefault(slot, set()).update(hashes)

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        holders, keep, held = self.holders, ~(1 << slot), self.held.get(slot)
        if held is None:
            return
        gone = held.intersection(hashes)
        held -= gone
        for value in gone:
            rest = holders[value] & keep
            if rest:
                holders[value] = rest
            else:
                del holders[value]

    def drop(self, slot: int) -> None:
        self.remove(slot, list(self.held.get(slot, ())))
        self.held.pop(slot, None)


@dataclass(slots=True)
class _Soon:
    """What requests given to endpoints will store there; believed for a while, unless events say otherwise."""

    tier: _Tier = field(default_factory=_Tier)
    until: dict[tuple[int, int], float] = field(default_factory=dict)
    queue: deque[tuple[float, int, list[int]]] = field(default_factory=deque)

    def add(self, slot: int, keys: list[int], until: float) -> None:
        self.tier.store(slot, keys)
        self.until.update(((slot, key), until) for key in keys)
        self.queue.append((until, slot, keys))

    def expire(self, now: float) -> None:
        while self.queue and self.queue[0][0] <= now:
            _, slot, keys = self.queue.popleft()
            over = [key for key in keys if self.until.get((slot, key), now + 1.0) <= now]
            self.forget(slot, over)

    def forget(self, slot: int, keys: Iterable[int]) -> None:
        for key in keys:
            self.until.pop((slot, key), None)
        self.tier.remove(slot, keys)

    def drop(self, slot: int) -> None:
        for key in self.tier.held.get(slot, ()):
            self.until.pop((slot, key), None)
        self.tier.drop(slot)


class KvIndex:
    """The blocks of every endpoint that has a feed. Slots without one are never asked.

    `most_blocks`: index blocks remembered of one endpoint in one tier; the default is 33 million tokens.
    """

    def __init__(self, most_blocks: int = 262_144) -> None:
        self._most_blocks = most_blocks
        self.feeds = 0
        """Mask of the slots whose engine's events arrive."""
        self._complete = 0
        self._lost = 0
        self._proven: OrderedDict[tuple[Kind, int], int] = OrderedDict()
        self._tiers = {name: _Tier() for name in TIERS}
        self._used = 1
        self._soon = _Soon()

    def apply(
        self,
        slot: int,
        tier: str,
        stored: Sequence[int],
        removed: Sequence[int],
        *,
        cleared: bool,
        complete: bool,
    ) -> None:
        """One batch of events. `complete`: after it, the feed told all that the cache holds."""
        bit = 1 << slot
        if cleared:
            for each in self._tiers.values():
                each.drop(slot)
            self._soon.drop(slot)
            self._lost &= ~bit
        self.feeds |= bit
        place = self._tiers[tier]
        if removed:
            place.remove(slot, removed)
            if slot in self._soon.tier.held:
                self._soon.forget(slot, removed)
        if stored and len(place.held.get(slot, ())) + len(stored) > self._most_blocks:
            self._lost |= bit  # more than any cache holds: it may say so, but no longer fill our memory
        elif stored:
            place.store(slot, stored)
            self._used = max(self._used, TIERS.index(tier) + 1)
        whole = complete and not self._lost & bit
        self._complete = self._complete | bit if whole else self._complete & ~bit

    def forget(self, slot: int) -> None:
        """What its feed said so far counts no more; what it says next is not all, until it begins anew."""
        for each in self._tiers.values():
            each.drop(slot)
        self._soon.drop(slot)
        self._complete &= ~(1 << slot)
        self._lost |= 1 << slot

    def drop(self, slot: int) -> None:
        """Its engine restarted or left: nothing is known of it until its feed speaks again."""
        self.forget(slot)
        keep = ~(1 << slot)
        self.feeds &= keep
        self._lost &= keep
        for proven in self._proven:
            self._proven[proven] &= keep

    def expect(self, slot: int, prompt: KvPrompt, root: int, until: float) -> None:
        """A request with this prompt was given to `slot`: its blocks will be there soon; not believed after `until`."""
        if self.feeds >> slot & 1:
            self._soon.add(slot, prompt.keys(root), until)

    def match(self, prompt: KvPrompt, roots: Iterable[tuple[int, int]], approximate: Match, now: float) -> Exact:
        """What feeds say of a prompt. `roots`: pairs of a root and the mask of the slots where it is this request's."""
        self._soon.expire(now)
        depths: list[list[tuple[int, int]]] = [[] for _ in range(self._used)]
        asked = proven = 0
        for root, mask in roots:
            mask &= self.feeds
            if not mask:
                continue
            asked |= mask
            keys = prompt.keys(root)
            tables = [self._soon.tier.holders]
            for number, name in enumerate(TIERS[: self._used]):
                tables.append(self._tiers[name].holders)
                depths[number].extend(_depths(keys, tables, mask))
            proven |= mask & self._shown(prompt.kind, root, keys)
        believed = asked & self._complete & proven if prompt.whole else 0
        return Exact(approximate, tuple(map(tuple, depths)), asked, believed)

    def _shown(self, kind: Kind, root: int, keys: Sequence[int]) -> int:
        """Mask of the slots whose feeds have ever matched a prompt of this kind under this root."""
        proven = before = self._proven.get((kind, root), 0)
        for tier in self._tiers.values() if keys else ():
            proven |= tier.holders.get(keys[0], 0)
        if proven != before:
            self._proven[kind, root] = proven
            self._proven.move_to_end((kind, root))
            if len(self._proven) > _MOST_PROVEN:
                self._proven.popitem(last=False)
        return proven

    def blocks(self, slot: int) -> int:
        """How many blocks `slot` holds, over all tiers."""
        return sum(len(each.held.get(slot, ())) for each in self._tiers.values())

    def __len__(self) -> int:
        """Blocks held anywhere, each counted once a tier."""
        return sum(len(each.holders) for each in self._tiers.values())


def _depths(keys: Sequence[int], tables: Sequence[dict[int, int]], mask: int) -> list[tuple[int, int]]:
    """How deep each slot of `mask` holds the chain in any of the tables: `(mask, blocks)`, masks disjoint."""
    levels: list[tuple[int, int]] = []
    active = mask
    for depth, key in enumerate(keys):
        holders = 0
        for table in tables:
            holders |= table.get(key, 0)
        still = active & holders
        if still != active:
            if depth:
                levels.append((active & ~still, depth))
            active = still
            if not active:
                return levels
    if active and keys:
        levels.append((active, len(keys)))
    return levels
