"""The agent's subscription to one engine's KV events, over real ZMQ sockets."""

import asyncio
import contextlib

import pytest
import structlog
import zmq
import zmq.asyncio
from fakes.kv import free_ports, publishing, store
from fakes.waiting import eventually
from headway_agent.config import KvEventSettings
from headway_agent.kv.blocks import BlockSet
from headway_agent.kv.subscriber import Subscriber
from headway_sim.emulator.kv_events import Encoding
from msgspec import msgpack

ONE, TWO, THREE = (list(range(start, start + 256)) for start in (0, 1000, 2000))


@contextlib.asynccontextmanager
async def following(publisher=None, *, replay=True, dp_rank=None, **settings):
    """A subscriber that has heard from its engine, until the block ends."""
    if publisher is not None:
        settings |= {"address": publisher.address, "replay_address": publisher.replay_address if replay else ""}
    config = KvEventSettings(**{"replay_timeout_s": 0.5, **settings})
    subscriber = Subscriber("e", config, BlockSet(), dp_rank)
    context = zmq.asyncio.Context()
    task = asyncio.create_task(subscriber.run(context))
    try:
        yield subscriber
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


async def heard(subscriber, publisher):
    """A slow joiner misses the first messages: publish until one arrives."""

    def arrived():
        if publisher.sequence and subscriber.next_sequence == publisher.sequence:
            return True
        publisher.cleared()
        publisher.publish()
        return False

    await eventually(arrived)


def held(subscriber):
    return len(list(subscriber.blocks.held()))


@pytest.mark.parametrize("encoding", Encoding)
async def test_what_is_stored_removed_and_cleared(encoding):
    async with publishing(encoding=encoding) as publisher, following(publisher) as subscriber:
        await heard(subscriber, publisher)
        keys = store(publisher, ONE)
        await eventually(lambda: held(subscriber) == 2)
        publisher.removed(keys[-1])
        await eventually(lambda: held(subscriber) == 1)
        publisher.cleared()
        await eventually(lambda: held(subscriber) == 0)
        assert subscriber.blocks.complete


async def test_an_agent_that_comes_late_has_it_all_replayed():
    async with publishing() as publisher:
        store(publisher, ONE)
        store(publisher, TWO)
        async with following(publisher) as subscriber:
            await eventually(lambda: held(subscriber) == 4)
            assert subscriber.blocks.complete


async def test_an_agent_that_comes_too_late_knows_that_it_does_not_know_all():
    async with publishing(kept=1) as publisher:
        store(publisher, ONE)
        store(publisher, TWO)
        async with following(publisher) as subscriber:
            await eventually(lambda: held(subscriber) == 2)
            assert not subscriber.blocks.complete
            publisher.cleared()
            await eventually(lambda: subscriber.blocks.complete)


async def test_a_gap_is_replayed():
    async with publishing() as publisher, following(publisher) as subscriber:
        await heard(subscriber, publisher)
        publisher.muted = True
        store(publisher, ONE)
        publisher.muted = False
        store(publisher, TWO)
        await eventually(lambda: held(subscriber) == 4)
        assert subscriber.blocks.complete


@pytest.mark.parametrize("replay", [True, False])
async def test_a_gap_that_cannot_be_filled_is_forgetting(replay):
    async with publishing(kept=1) as publisher, following(publisher, replay=replay) as subscriber:
        await heard(subscriber, publisher)
        store(publisher, ONE)
        await eventually(lambda: held(subscriber) == 2)
        publisher.muted = True
        store(publisher, TWO)
        publisher.muted = False
        store(publisher, THREE)
        await eventually(lambda: subscriber.next_sequence == publisher.sequence)
        assert held(subscriber) == 2, "only the last is known"
        assert not subscriber.blocks.complete
        assert subscriber.blocks.take_changes()[1]


async def test_an_engine_that_restarts_has_lost_everything():
    ports = free_ports()
    async with following(address=f"tcp://127.0.0.1:{ports[0]}", replay_address=f"tcp://127.0.0.1:{ports[1]}") as one:
        async with publishing(*ports) as publisher:
            await heard(one, publisher)
            store(publisher, ONE)
            await eventually(lambda: held(one) == 2)
        async with publishing(*ports) as publisher:
            keys = store(publisher, THREE)
            publisher.removed(keys[-1])

            def caught_up():
                if one.next_sequence == publisher.sequence and held(one) == 1:
                    return True
                publisher.removed(7)  # something to hear, that changes nothing
                publisher.publish()
                return False

            await eventually(caught_up)
            assert one.blocks.complete


async def test_an_engine_that_connects_finds_us_bound():
    port, _ = free_ports()
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.PUB)
    engine.linger = 0
    try:
        async with following(address=f"tcp://127.0.0.1:{port}", bind=True) as subscriber:
            engine.connect(f"tcp://127.0.0.1:{port}")
            sent = 0

            async def arrived():
                nonlocal sent
                payload = msgpack.encode([1.0, [["BlockStored", [sent], None, [sent] * 128, 128]]])
                await engine.send_multipart([b"kv", sent.to_bytes(8, "big"), payload])
                sent += 1
                return held(subscriber)

            await eventually(arrived)
    finally:
        engine.close()
        context.destroy(linger=0)


async def test_what_is_not_understood_stops_nothing_and_is_never_believed():
    with structlog.testing.capture_logs() as logs:
        async with publishing() as publisher, following(publisher) as subscriber:
            await heard(subscriber, publisher)
            store(publisher, ONE)
            await eventually(lambda: held(subscriber) == 2)
            publisher._socket.send_multipart([b"", publisher.sequence.to_bytes(8, "big"), b"\xc1"])
            publisher.sequence += 1
            publisher._socket.send_multipart([b"only one frame"])
            await eventually(lambda: subscriber.next_sequence == publisher.sequence)
            assert (held(subscriber), subscriber.blocks.complete) == (0, False)
            store(publisher, TWO)
            await eventually(lambda: held(subscriber) == 2)
    assert {"kv_events_malformed", "kv_events_not_understood"} <= {entry["event"] for entry in logs}


async def test_another_ranks_events_are_not_ours():
    port, _ = free_ports()
    async with following(address=f"tcp://127.0.0.1:{port}", bind=True, dp_rank=1) as subscriber:
        for sequence, rank in enumerate((0, None, 1)):
            subscriber._apply(
                sequence, msgpack.encode([1.0, [["BlockStored", [rank], None, [sequence] * 128, 128]], rank])
            ) if rank is not None else subscriber._apply(sequence, msgpack.encode([1.0, []]))
        assert held(subscriber) == 1


@pytest.mark.parametrize("name", ["address", "replay_address"])
def test_only_this_host_unless_configured(name):
    local = {"address": "tcp://127.0.0.1:1"}
    with pytest.raises(ValueError, match="not on this host"):
        KvEventSettings(**local | {name: "tcp://10.0.0.1:5557"})
    with pytest.raises(ValueError, match="not on this host"):
        KvEventSettings(**local | {name: "tcp://*:5557"})
    KvEventSettings(**local | {name: "tcp://10.0.0.1:5557"}, remote=True)
    KvEventSettings(**local | {name: "ipc:///run/engine"})
