"""All engines' KV events on this host, and who is told of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq.asyncio

from headway_agent.config import EngineSettings
from headway_agent.inventory import EndpointKey, Inventory, endpoint_key
from headway_agent.kv.blocks import BlockSet
from headway_agent.kv.subscriber import Subscriber
from headway_agent.outbox import Outbox

__all__ = ["KvFeeds"]

_SLEPT = "+slept-"


@dataclass(slots=True)
class KvFeeds:
    """One feed for each engine that is configured to publish. `run` follows them until it is cancelled.

    Changes are handed on every `interval_s`, so that a busy engine's many small messages become few.
    """

    engines: Sequence[EngineSettings]
    outboxes: Sequence[Outbox]
    interval_s: float
    subscribers: dict[EndpointKey, Subscriber] = field(init=False)
    _boots: dict[EndpointKey, str] = field(default_factory=dict)
    _rebuilding: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Nothing is known of any cache yet."""
        self.subscribers = {}
        for engine in self.engines:
            if engine.kv_events is None:
                continue
            key, settings = endpoint_key(engine), engine.kv_events
            blocks = BlockSet(max_blocks=settings.max_blocks)
            name = f"{key[0]}@{key[1]}"
            self.subscribers[key] = Subscriber(name, settings, blocks, engine.dp_rank)
            for outbox in self.outboxes:
                outbox.follow(key, blocks)

    async def run(self) -> None:
        """Follow, and hand on."""
        if not self.subscribers:
            await asyncio.Event().wait()
        context = zmq.asyncio.Context()
        following = [asyncio.create_task(each.run(context)) for each in self.subscribers.values()]
        try:
            while True:
                await asyncio.sleep(self.interval_s)
                self.hand_on()
        finally:
            for task in (*following, *self._rebuilding):
                task.cancel()
            await asyncio.gather(*following, *self._rebuilding, return_exceptions=True)
            context.destroy(linger=0)

    def hand_on(self) -> None:
        """Give every scheduler's outbox what changed."""
        for key, subscriber in self.subscribers.items():
            changes, forgotten = subscriber.blocks.take_changes()
            for outbox in self.outboxes:
                outbox.offer_kv(key, changes, forgotten=forgotten)

    def observe(self, inventory: Inventory) -> None:
        """An engine that its metrics know to have restarted, or slept, has lost its cache, whatever its events say."""
        for endpoint in inventory.endpoints:
            subscriber, boot_id = self.subscribers.get(endpoint.key), endpoint.facts.boot_id
            before = self._boots.get(endpoint.key)
            if subscriber is None or not boot_id:
                continue
            self._boots[endpoint.key] = boot_id
            if before is None or before == boot_id:
                continue
            if before.partition(_SLEPT)[0] == boot_id.partition(_SLEPT)[0]:
                subscriber.emptied()
            else:
                task = asyncio.create_task(subscriber.rebuild())
                self._rebuilding.add(task)
                task.add_done_callback(self._rebuilding.discard)
