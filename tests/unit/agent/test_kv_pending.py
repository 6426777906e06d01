"""What a scheduler is still to be told of caches, and when the outbox tells it."""

import asyncio

from fakes.agent import change, collected
from headway_agent import convert
from headway_agent.config import EngineSettings, KvEventSettings
from headway_agent.engines.base import EngineFacts
from headway_agent.inventory import Endpoint, EndpointChange, Inventory, Sample
from headway_agent.kv.blocks import BlockSet
from headway_agent.kv.events import Cleared, Removed, Stored, Tier
from headway_agent.kv.feeds import KvFeeds
from headway_agent.kv.pending import KvBatch, KvPending
from headway_agent.outbox import Outbox
from hypothesis import given
from hypothesis import strategies as st

KEY = ("10.0.0.1:8000", 0)


def block(number, tier=Tier.GPU):
    """An engine block that is an index block."""
    return Stored((number,), None, (number,) * 128, 128, tier=tier)


def filled(*numbers):
    blocks = BlockSet(complete=True)
    for number in numbers:
        blocks.apply(block(number))
    blocks.take_changes()
    return blocks


def owns(blocks):
    return {own for _, own in blocks.held()}


def drain(pending):
    batches = []
    while pending.waiting:
        batches.append(pending.take())
    return batches


def told(batches, before=()):
    """What a scheduler holds after these batches."""
    held = set(before)
    for batch in batches:
        if batch.cleared:
            held.clear()
        held -= {(batch.tier, own) for own in batch.removed}
        held |= {(batch.tier, own) for own in batch.stored}
    return held


def test_at_first_the_whole_set_then_changes():
    blocks = filled(1, 2)
    pending = KvPending(KEY, blocks)
    (first,) = drain(pending)
    assert (first.cleared, set(first.stored), first.complete) == (True, owns(blocks), True)
    blocks.apply(block(3))
    blocks.apply(Removed((1,)))
    pending.merge(*blocks.take_changes())
    (second,) = drain(pending)
    assert (second.cleared, len(second.stored), len(second.removed), second.sequence) == (False, 1, 1, 2)


def test_what_came_and_went_while_waiting_is_one_change():
    blocks = filled()
    pending = KvPending(KEY, blocks)
    drain(pending)
    for _ in range(3):
        blocks.apply(block(1))
        pending.merge(*blocks.take_changes())
        blocks.apply(Removed((1,)))
        pending.merge(*blocks.take_changes())
    (batch,) = drain(pending)
    assert (batch.stored, len(batch.removed)) == ((), 1)


def test_a_feed_that_is_no_longer_complete_says_so_even_if_nothing_changed():
    blocks = filled(1)
    pending = KvPending(KEY, blocks)
    drain(pending)
    assert not pending.waiting
    blocks.complete = False
    (batch,) = drain(pending)
    assert (batch.complete, batch.stored, batch.cleared) == (False, (), False)


def test_a_message_is_never_too_large():
    blocks = filled(*range(20_000))
    batches = drain(KvPending(KEY, blocks))
    assert max(len(b.stored) for b in batches) <= 8192
    assert told(batches) == set(blocks.held())
    assert [b.cleared for b in batches] == [True, False, False]


@given(
    st.lists(st.tuples(st.sampled_from(["store", "remove", "clear", "take", "all"]), st.integers(0, 5), st.booleans())),
)
def test_whatever_happens_in_between_a_scheduler_ends_up_with_the_set(steps):
    blocks, held = filled(0, 1), set()
    pending = KvPending(KEY, blocks)
    for step, number, far in steps:
        tier = Tier.CPU if far else Tier.GPU
        if step == "store":
            blocks.apply(block(number, tier))
        elif step == "remove":
            blocks.apply(Removed((number,), tier))
        elif step == "clear":
            blocks.apply(Cleared())
        elif step == "all":
            pending.request_all()
        elif pending.waiting:
            held = told([pending.take()], held)
        pending.merge(*blocks.take_changes())
    assert told(drain(pending), held) == set(blocks.held())


async def taken(outbox):
    out = []
    while True:
        try:
            async with asyncio.timeout(0):
                out.append(await outbox.take())
        except TimeoutError:
            return out


async def test_caches_are_told_after_the_hello_and_again_after_each():
    outbox, blocks = Outbox(), filled(1)
    outbox.follow(KEY, blocks)
    assert await taken(outbox) == [], "nothing goes before the full state is known"
    outbox.begin()
    outbox.offer(collected(1))
    hello, sample, batches = await taken(outbox)
    assert isinstance(hello, Inventory)
    assert isinstance(sample, Sample)
    assert [(b.cleared, len(b.stored)) for b in batches] == [(True, 1)]
    outbox.request_hello()
    _, again = await taken(outbox)
    assert [(b.cleared, len(b.stored)) for b in again] == [(True, 1)]


async def test_an_endpoint_that_changed_is_told_whole():
    outbox, blocks = Outbox(), filled(1)
    outbox.follow(KEY, blocks)
    outbox.offer(collected(1))
    await taken(outbox)
    outbox.offer(collected(2, changes=[change()]))
    event, _, (batch,) = await taken(outbox)
    assert isinstance(event, EndpointChange)
    assert batch.cleared


async def test_all_caches_of_a_host_go_in_one_message():
    outbox = Outbox()
    for number in range(3):
        outbox.follow((f"10.0.0.{number}:8000", 0), filled(number))
    outbox.offer(collected(1))
    *_, batches = await taken(outbox)
    message = convert.kv_events(batches)
    assert [batch.address for batch in message.kv_event_batches.batches] == [f"10.0.0.{n}:8000" for n in range(3)]


def test_on_the_wire():
    batch = KvBatch(KEY, 7, Tier.CPU, (1, 2**64 - 1), (3,), cleared=True, complete=False)
    (found,) = convert.kv_events([batch]).kv_event_batches.batches
    assert (found.address, found.dp_rank, found.sequence, found.scheme) == (*KEY, 7, "tokens-xxh3-128")
    assert (list(found.stored), list(found.removed), found.tier) == ([1, 2**64 - 1], [3], "cpu")
    assert (found.cleared, found.incomplete) == (True, True)


async def test_an_engine_that_its_metrics_say_slept_or_restarted_has_lost_its_cache():
    engine = EngineSettings(address=KEY[0], kv_events=KvEventSettings(address="tcp://127.0.0.1:1"))
    feeds = KvFeeds([engine], [], 0.1)
    blocks = feeds.subscribers[KEY].blocks

    def seen(boot_id):
        blocks.apply(block(1))
        feeds.observe(Inventory((), (Endpoint(engine, EngineFacts(boot_id=boot_id), (), ready=True),)))

    seen("1")
    seen("1")
    assert len(blocks) == 1
    seen("1+slept-1")
    assert (len(blocks), blocks.complete) == (0, True)
    seen("2")
    await asyncio.gather(*feeds._rebuilding)
    assert (len(blocks), blocks.complete) == (0, False)
