"""What waits for a scheduler."""

import asyncio

from fakes.agent import change, collected, device
from headway_agent.devices.base import DeviceEvent, DeviceEventKind
from headway_agent.inventory import EndpointChange, Inventory, Sample
from headway_agent.outbox import Outbox
from hypothesis import given
from hypothesis import strategies as st


def xid(number):
    return DeviceEvent("GPU-a", DeviceEventKind.XID, 1.0, number)


async def taken(outbox):
    """Everything that could be sent now."""
    out = []
    while True:
        try:
            async with asyncio.timeout(0):
                out.append(await outbox.take())
        except TimeoutError:
            return out


async def test_the_full_state_goes_first_then_events_then_the_newest_sample():
    outbox = Outbox()
    outbox.begin()
    outbox.offer(collected(1, events=[xid(1)]))
    outbox.offer(collected(2, events=[xid(2)], inventory=Inventory((device("GPU-z"),))))
    hello, *events, sample = await taken(outbox)
    assert hello == Inventory((device("GPU-z"),))
    assert events == [xid(1), xid(2)]
    assert sample.sequence == 2
    assert outbox.dropped_samples == 1


async def test_nothing_goes_before_the_full_state_is_known():
    outbox = Outbox()
    outbox.begin()
    assert await taken(outbox) == []


async def test_changes_go_alone_once_the_full_state_is_out():
    outbox = Outbox()
    outbox.offer(collected(1))
    await taken(outbox)
    outbox.offer(collected(2, changes=[change()]))
    first, sample = await taken(outbox)
    assert first == change()
    assert sample.sequence == 2


async def test_another_list_of_devices_sends_the_full_state_instead_of_changes():
    outbox = Outbox()
    outbox.offer(collected(1))
    await taken(outbox)
    outbox.offer(collected(2, changes=[change()]))
    outbox.offer(collected(3, changes=[change()], devices_changed=True))
    assert [type(m) for m in await taken(outbox)] == [Inventory, Sample]


async def test_unconfirmed_events_go_again_after_a_reconnect_and_confirmed_ones_do_not():
    outbox = Outbox()
    outbox.offer(collected(1, events=[xid(1)]))
    await taken(outbox)
    outbox.offer(collected(2, events=[xid(2)]))
    await taken(outbox)
    outbox.confirm(1)
    outbox.begin()
    hello, *rest = await taken(outbox)
    assert isinstance(hello, Inventory)
    assert rest == [xid(2)]
    outbox.offer(collected(3))
    await taken(outbox)
    outbox.confirm(3)
    outbox.begin()
    assert [type(m) for m in await taken(outbox)] == [Inventory]


async def test_too_many_changes_become_one_full_state():
    outbox = Outbox(max_events=4)
    outbox.offer(collected(1))
    await taken(outbox)
    for n in range(2, 12):
        outbox.offer(collected(n, changes=[change(f"h:{n}")]))
    messages = await taken(outbox)
    assert isinstance(messages[0], Inventory)
    assert messages[-1].sequence == 11
    assert outbox.dropped_events == 0


async def test_the_oldest_device_events_are_dropped_and_counted():
    outbox = Outbox(max_events=3)
    outbox.offer(collected(1, events=[xid(n) for n in range(1, 8)]))
    assert [m.xid for m in await taken(outbox) if isinstance(m, DeviceEvent)] == [5, 6, 7]
    assert outbox.dropped_events == 4


async def test_taking_waits_for_an_offer_and_ends_when_closed():
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.offer(collected(1))
    assert isinstance(await waiting, Inventory)
    await outbox.take()
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close()
    assert await waiting is None


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(0, 4), st.integers(0, 4), st.booleans()),
        st.tuples(st.just("take")),
        st.tuples(st.just("confirm")),
        st.tuples(st.just("begin")),
        st.tuples(st.just("resync")),
    ),
    max_size=60,
)


@given(STEPS)
def test_it_stays_small_keeps_order_and_loses_no_event_silently(steps):
    async def drive():
        outbox, got, last_sequence, sequence, xids = Outbox(max_events=8), set(), 0, 0, 0
        for step, *args in steps:
            if step == "offer":
                events, changes, changed = args
                sequence += 1
                new = [xid(xids + n) for n in range(events)]
                xids += events
                outbox.offer(collected(sequence, new, [change(f"h:{n + 1}") for n in range(changes)], changed))
            elif step == "take":
                for message in await taken(outbox):
                    if isinstance(message, Sample):
                        assert message.sequence > last_sequence
                        last_sequence = message.sequence
                    elif isinstance(message, DeviceEvent):
                        got.add(message.xid)
                    else:
                        assert isinstance(message, Inventory | EndpointChange)
            elif step == "confirm":
                outbox.confirm(last_sequence)
            elif step == "begin":
                outbox.begin()
            else:
                outbox.request_hello()
            assert outbox.waiting <= 9
        for message in await taken(outbox):
            if isinstance(message, DeviceEvent):
                got.add(message.xid)
        assert len(got) >= xids - outbox.dropped_events

    asyncio.run(drive())
