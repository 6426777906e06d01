"""What waits to be sent to one scheduler: bounded, however slow the scheduler is.

Of samples only the newest is kept. Events are kept until a later sample is acknowledged, since the stream is
in order; after a reconnect those not yet confirmed go again. A Hello is the full state, so it replaces
endpoint changes. What caches gained and lost is merged while it waits, and is sent whole after a Hello.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from headway_agent.devices.base import DeviceEvent
from headway_agent.inventory import Collected, EndpointChange, EndpointKey, Inventory, Sample
from headway_agent.kv.blocks import BlockSet, Changes
from headway_agent.kv.pending import KvBatch, KvPending

log = structlog.get_logger(__name__)

Event = DeviceEvent | EndpointChange
KvBatches = tuple[KvBatch, ...]
Outgoing = Inventory | Event | Sample | KvBatches
"""An Inventory goes out as a Hello."""


@dataclass(slots=True)
class _Sent:
    event: DeviceEvent
    before: int | None = None
    """The first sample sent after it."""


@dataclass(slots=True)
class Outbox:
    """One scheduler's queue. `offer` never blocks; `take` waits for something to send."""

    max_events: int = 256
    dropped_samples: int = 0
    dropped_events: int = 0
    _inventory: Inventory | None = None
    _hello_due: bool = True
    _sample: Sample | None = None
    _events: deque[Event] = field(default_factory=deque)
    _sent: deque[_Sent] = field(default_factory=deque)
    _kv: dict[EndpointKey, KvPending] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    def offer(self, collected: Collected) -> None:
        """Put what one round brought."""
        self._inventory = collected.inventory
        if collected.devices_changed:
            self.request_hello()
        self._put(collected.events if self._hello_due else (*collected.events, *collected.changes))
        if self._sample is not None:
            self.dropped_samples += 1
        self._sample = collected.sample
        self._wake.set()

    def follow(self, key: EndpointKey, blocks: BlockSet) -> None:
        """Tell of this endpoint's cache from now on."""
        self._kv[key] = KvPending(key, blocks)

    def offer_kv(self, key: EndpointKey, changes: Changes, *, forgotten: bool) -> None:
        """A cache that is followed changed."""
        pending = self._kv[key]
        pending.merge(changes, forgotten)
        if pending.waiting:
            self._wake.set()

    def request_hello(self) -> None:
        """The full state is to go out next."""
        self._hello_due = True
        self._events = deque(e for e in self._events if isinstance(e, DeviceEvent))
        self._wake.set()

    def begin(self) -> None:
        """A new stream: full state first, then the events that nobody confirmed."""
        unconfirmed = [s.event for s in self._sent]
        self._sent.clear()
        self._events.extendleft(reversed(unconfirmed))
        self.request_hello()
        self._trim()

    def confirm(self, sequence: int) -> None:
        """The scheduler applied this sample, and so all that was sent before it."""
        self._sent = deque(s for s in self._sent if s.before is None or s.before > sequence)

    def close(self) -> None:
        """Nothing more will be taken."""
        self._closed = True
        self._wake.set()

    async def take(self) -> Outgoing | None:
        """The next to send: the Hello, then events, the newest sample, caches' changes. None once closed."""
        while not self._closed:
            if self._hello_due and self._inventory is not None:
                self._hello_due = False
                self._resend_kv()
                return self._inventory
            if not self._hello_due and self._events:
                return self._take_event()
            if not self._hello_due and self._sample is not None:
                return self._take_sample()
            if not self._hello_due and (batches := self._take_kv()):
                return batches
            self._wake.clear()
            await self._wake.wait()
        return None

    @property
    def waiting(self) -> int:
        """How many messages it holds, sent and unconfirmed events included."""
        return len(self._events) + len(self._sent) + (self._sample is not None)

    def _take_kv(self) -> KvBatches:
        """One batch of every cache that has something to tell: in one message, and none waits for another."""
        return tuple(pending.take() for pending in self._kv.values() if pending.waiting)

    def _resend_kv(self, key: EndpointKey | None = None) -> None:
        """The scheduler may have forgotten what these caches hold."""
        for pending in self._kv.values():
            if key is None or pending.key == key:
                pending.request_all()

    def _take_event(self) -> Event:
        event = self._events.popleft()
        if isinstance(event, EndpointChange):
            self._resend_kv(event.endpoint.key)  # where it restarted or came back, the scheduler dropped its blocks
        if isinstance(event, DeviceEvent):
            self._sent.append(_Sent(event))
            self._trim()
        return event

    def _take_sample(self) -> Sample | None:
        sample, self._sample = self._sample, None
        for sent in self._sent:
            if sent.before is None and sample is not None:
                sent.before = sample.sequence
        return sample

    def _put(self, events: Iterable[Event]) -> None:
        self._events.extend(events)
        self._trim()

    def _trim(self) -> None:
        """Too much waits: endpoint changes give way to one Hello, then the oldest events go."""
        if len(self._events) > self.max_events:
            self.request_hello()
        while self._sent and len(self._events) + len(self._sent) > self.max_events:
            self._sent.popleft()
        excess = len(self._events) - self.max_events
        if excess > 0:
            for _ in range(excess):
                self._events.popleft()
            self.dropped_events += excess
            log.warning("device_events_dropped", dropped=excess)
