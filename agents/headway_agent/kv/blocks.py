"""Which index blocks one engine's cache holds, from the events it publishes.

Engine blocks (16 tokens, 32, …) form a tree by their parents. An index block of 128 tokens is a stretch of it: it is
held in a tier while every engine block of the stretch is. The engine's hashes are opaque, so token ids are hashed here,
and a map leads from the engine's hash to the block's place in the tree.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from headway_agent.kv.events import Cleared, Event, Extras, Hash, Removed, Stored, Tier
from headway_agent.kv.hashing import BLOCK_TOKENS, bound, chained, root_of, token_bytes

__all__ = ["BlockSet", "Changes"]

_TOKEN_BYTES = 4
_INDEX_BYTES = BLOCK_TOKENS * _TOKEN_BYTES
_BITS = {tier: 1 << number for number, tier in enumerate(Tier)}

Changes = dict[tuple[Tier, int], bool]
"""Index blocks that changed: held in this tier now, or not."""


class _Block:
    """An engine block. `at` counts the index block's engine blocks up to this one; `content` is the chained hash of the
    last whole index block at or before it; `own`: the index blocks that end here.

    `ends` are the blocks with `own` whose stretch has this one; `missing[tier]` how many of a stretch are not there.
    """

    __slots__ = ("at", "children", "content", "data", "ends", "hash", "missing", "own", "parent", "root", "tiers")

    def __init__(self, engine_hash: Hash, parent: "_Block | None", data: bytes, root: int, content: int) -> None:
        self.hash, self.parent, self.data, self.root, self.content = engine_hash, parent, data, root, content
        self.at = self.children = self.tiers = 0
        self.own: tuple[int, ...] = ()
        self.ends: dict[_Block, None] = {}
        self.missing: dict[Tier, int] = {}


@dataclass(slots=True)
class BlockSet:
    """The set, and what changed since `take_changes`. At most `max_blocks` engine blocks are known.

    `complete`: all that the cache holds is here. `skipped` counts blocks that could not be placed.
    """

    max_blocks: int = 262_144
    complete: bool = False
    skipped: int = 0
    unusable_block_size: int = 0
    """A block size that index blocks cannot be made of, once one was seen."""
    _blocks: dict[Hash, _Block] = field(default_factory=dict)
    _changes: Changes = field(default_factory=dict)
    _forgotten: bool = False

    def apply(self, event: Event) -> None:
        """What the engine says happened. Raises ValueError for token ids that are none."""
        match event:
            case Stored(group=0):
                self._store(event)
            case Removed(group=0):
                for each in event.hashes:
                    block = self._blocks.get(each)
                    if block is not None:
                        self._leave(block, event.tier)
            case Cleared():
                self.forget(complete=True)

    def forget(self, *, complete: bool) -> None:
        """Nothing is known any more; `complete`: because nothing is there."""
        self._blocks.clear()
        self._changes.clear()
        self._forgotten = True
        self.complete = complete

    def take_changes(self) -> tuple[Changes, bool]:
        """What changed since the last call, and whether all before that is forgotten."""
        changes, forgotten = self._changes, self._forgotten
        self._changes, self._forgotten = {}, False
        return changes, forgotten

    def held(self) -> Iterator[tuple[Tier, int]]:
        """Every index block held, by tier."""
        for block in self._blocks.values():
            for own in block.own:
                for tier, missing in block.missing.items():
                    if not missing:
                        yield tier, own

    def __len__(self) -> int:
        """Engine blocks known."""
        return len(self._blocks)

    # Inside

    def _store(self, event: Stored) -> None:
        if not event.token_ids:
            self._reach(event)
            return
        size = event.block_size
        if size <= 0 or (BLOCK_TOKENS % size and size % BLOCK_TOKENS):
            self.unusable_block_size, self.complete = size, False
            return
        parent = None
        if event.parent is not None:
            parent = self._blocks.get(event.parent)
            if parent is None:
                self._skip(len(event.hashes))
                return
        data, width = token_bytes(event.token_ids), size * _TOKEN_BYTES
        for number, engine_hash in enumerate(event.hashes):
            block = self._blocks.get(engine_hash)
            if block is None:
                part = data[number * width : (number + 1) * width]
                if len(part) < width or len(self._blocks) >= self.max_blocks:
                    self._skip(len(event.hashes) - number)
                    return
                extras = event.extras[number] if number < len(event.extras) else ()
                block = self._add(engine_hash, parent, part, event.adapter, extras)
            self._enter(block, event.tier)
            parent = block

    def _reach(self, event: Stored) -> None:
        """Blocks known already reached another tier, there perhaps in larger blocks, named by their last."""
        for each in event.hashes:
            block: _Block | None = self._blocks.get(each)
            wanted = event.block_size * _TOKEN_BYTES
            while block is not None:
                self._enter(block, event.tier)
                wanted -= len(block.data)
                block = block.parent if wanted > 0 else None

    def _skip(self, blocks: int) -> None:
        self.skipped += blocks
        self.complete = False

    def _add(self, engine_hash: Hash, parent: _Block | None, data: bytes, adapter: str, extras: Extras) -> _Block:
        if parent is None:
            block = _Block(engine_hash, None, data, root_of(adapter, _salt(extras)), 0)
        else:
            block = _Block(engine_hash, parent, data + _foreign(extras), parent.root, parent.content)
            parent.children += 1
        self._blocks[engine_hash] = block
        tokens = len(data) // _TOKEN_BYTES
        if tokens >= BLOCK_TOKENS:
            self._end_long(block, len(data))
            return block
        block.at = 1 if parent is None or parent.own else parent.at + 1
        if block.at * tokens == BLOCK_TOKENS:
            self._end(block)
        return block

    def _end_long(self, block: _Block, size: int) -> None:
        """An engine block of several index blocks."""
        owns, foreign = [], block.data[size:]
        for start in range(0, size, _INDEX_BYTES):
            block.content = chained(block.data[start : start + _INDEX_BYTES] + foreign, block.content)
            owns.append(bound(block.content, block.root))
        block.own, block.ends = tuple(owns), {block: None}

    def _end(self, last: _Block) -> None:
        """An index block ends here: hash the stretch, and count on each of its blocks."""
        stretch: list[_Block] = []
        block: _Block | None = last
        for _ in range(last.at):
            assert block is not None  # noqa: S101 - `at` counts them
            stretch.append(block)
            block = block.parent
        last.content = chained(b"".join(each.data for each in reversed(stretch)), last.content)
        last.own = (bound(last.content, last.root),)
        for each in stretch:
            each.ends[last] = None
            for tier, bit in _BITS.items():
                if each.tiers & bit:
                    last.missing[tier] = last.missing.get(tier, len(stretch)) - 1

    def _enter(self, block: _Block, tier: Tier) -> None:
        if block.tiers & _BITS[tier]:
            return
        block.tiers |= _BITS[tier]
        for end in block.ends:
            missing = end.missing[tier] = end.missing.get(tier, end.at or 1) - 1
            if not missing:
                self._note(end, tier, held=True)

    def _leave(self, block: _Block, tier: Tier) -> None:
        if not block.tiers & _BITS[tier]:
            return
        block.tiers &= ~_BITS[tier]
        for end in block.ends:
            if not end.missing[tier]:
                self._note(end, tier, held=False)
            end.missing[tier] += 1
        self._prune(block)

    def _note(self, end: _Block, tier: Tier, *, held: bool) -> None:
        for own in end.own:
            self._changes[tier, own] = held

    def _prune(self, block: _Block | None) -> None:
        """A block that is nowhere stays known only while others stand on it."""
        while block is not None and not block.tiers and not block.children:
            self._blocks.pop(block.hash, None)
            parent = block.parent
            if parent is not None:
                parent.children -= 1
                self._unend(block)
            block = parent

    @staticmethod
    def _unend(block: _Block) -> None:
        """It ends no stretch any more."""
        if not block.own:
            return
        before = block.parent
        for _ in range(block.at - 1):
            if before is None:
                return
            before.ends.pop(block, None)
            before = before.parent


def _salt(extras: Extras) -> str:
    """The cache salt, which the engine mixes into a prompt's first block. Anything else there is nobody's salt."""
    if not extras:
        return ""
    if len(extras) == 1 and isinstance(extras[0], str):
        return extras[0]
    return f"\0{extras!r}"


def _foreign(extras: Extras) -> bytes:
    """What a later block holds that token ids do not tell, an image's digest: no prompt of ids may match it."""
    return b"\0" + repr(extras).encode() if extras else b""
