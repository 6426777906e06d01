"""What one scheduler is still to be told of one endpoint's cache, merged while it waits."""

from dataclasses import dataclass, field

from headway_agent.inventory import EndpointKey
from headway_agent.kv.blocks import BlockSet, Changes
from headway_agent.kv.events import Tier

__all__ = ["KvBatch", "KvPending"]

_BATCH_BLOCKS = 8192
_SLACK_BLOCKS = 100_000


@dataclass(frozen=True, slots=True)
class KvBatch:
    """One message: index blocks that a tier gained and lost."""

    key: EndpointKey
    sequence: int
    tier: Tier
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    cleared: bool = False
    complete: bool = True


@dataclass(slots=True)
class KvPending:
    """Changes of `blocks` that were not sent. At first the whole set is."""

    key: EndpointKey
    blocks: BlockSet
    _changes: Changes = field(default_factory=dict)
    _cleared: bool = False
    _told_complete: bool | None = None
    _sequence: int = 0

    def __post_init__(self) -> None:
        """A scheduler that knows nothing gets everything."""
        self.request_all()

    def request_all(self) -> None:
        """Send the whole set: the scheduler lost it, or never had it."""
        self._cleared = True
        self._changes = dict.fromkeys(self.blocks.held(), True)

    def merge(self, changes: Changes, forgotten: bool) -> None:
        """The set changed."""
        if forgotten:
            self._cleared = True
            self._changes.clear()
        self._changes.update(changes)
        if len(self._changes) > 2 * len(self.blocks) + _SLACK_BLOCKS:
            self.request_all()  # mostly blocks that came and went while a slow scheduler was not reading

    @property
    def waiting(self) -> bool:
        """Is there anything to send?"""
        return self._cleared or bool(self._changes) or self._told_complete != self.blocks.complete

    def take(self) -> KvBatch:
        """The next message. To be called only while something waits."""
        tier = next(iter(self._changes), (Tier.GPU, 0))[0]
        taken = []
        for place in self._changes:
            if place[0] is tier:
                taken.append(place)
                if len(taken) == _BATCH_BLOCKS:
                    break
            elif len(taken) * 8 > _BATCH_BLOCKS:
                break  # enough of this tier: the others need not be searched
        held = [(own, self._changes.pop((of, own))) for of, own in taken]
        self._sequence += 1
        cleared, self._cleared = self._cleared, False
        self._told_complete = self.blocks.complete
        return KvBatch(
            self.key,
            self._sequence,
            tier,
            tuple(own for own, is_held in held if is_held),
            tuple(own for own, is_held in held if not is_held),
            cleared,
            self.blocks.complete,
        )
