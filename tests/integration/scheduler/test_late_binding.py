"""Late binding as callers see it: a unary call and a call on a stream wait alike, and neither leaves a trace."""

import asyncio

import pytest
from fakes.scheduler import endpoint, first_token, refused, serving
from fakes.waiting import eventually
from google.protobuf.duration_pb2 import Duration

LONG = "word " * 20_000  # 25,000 tokens: seconds of prefill
OVER_THE_WINDOW = "text " * 4000  # 5,000 tokens: 0.4 s


@pytest.fixture
async def served(database_url):
    """One endpoint under the default strategy; a prompt that keeps it busy."""
    async with serving(database_url) as found:
        found.agents = [await found.agent("n", endpoint(1))]
        found.busy = await found.route("busy", text=LONG)
        yield found


def holds(served):
    return len(served.scheduler.dispatcher.holds)


async def test_a_unary_call_and_one_on_a_stream_wait_and_are_served_in_turn(served):
    stream = await served.stream()
    unary = asyncio.create_task(served.route("unary", text=OVER_THE_WINDOW + "long " * 8000))
    await eventually(lambda: holds(served) == 1)
    await stream.route(1, request_id="streamed", text=OVER_THE_WINDOW)
    await eventually(lambda: holds(served) == 2)
    await served.report(first_token(served.busy.reservation_id))
    (streamed,) = await stream.answered(1)
    assert streamed.response.decision.held_ms > 0
    assert streamed.response.decision.strategy == "strategies/adaptive"
    assert not unary.done(), "the shorter prefill goes first, and is over the window alone"
    await stream.send(reports=[first_token(streamed.response.reservation_id)])
    answer = await unary
    assert answer.decision.held_ms > 0
    assert not holds(served)
    await served.finish(answer)


async def test_what_may_not_wait_is_bound_at_once(served):
    answer = await served.route("now", max_wait=Duration())
    assert answer.reservation_id in served.reservations


async def test_a_hold_that_ends_in_vain_says_when_to_come_back(served):
    short = Duration()
    short.FromMilliseconds(50)
    refusal = await refused(served.route("soon", text=OVER_THE_WINDOW, max_wait=short))
    assert (refusal.reason, refusal.code.name) == ("HOLD_EXPIRED", "RESOURCE_EXHAUSTED")
    assert refusal.retry_s > 0


async def test_cancelled_on_both_ways_it_leaves_no_trace(served):
    stream = await served.stream()
    unary = asyncio.create_task(served.route("unary", text=OVER_THE_WINDOW))
    await stream.route(1, text=OVER_THE_WINDOW)
    await eventually(lambda: holds(served) == 2)
    unary.cancel()
    await stream.lose()
    await eventually(lambda: not holds(served))
    await served.report(first_token(served.busy.reservation_id))
    assert set(served.reservations) == {served.busy.reservation_id}


async def test_a_retry_joins_the_call_that_waits_and_keeps_its_place(served):
    first = asyncio.create_task(served.route("r", text=OVER_THE_WINDOW))
    await eventually(lambda: holds(served) == 1)
    (hold,) = served.scheduler.dispatcher.holds
    retry = asyncio.create_task(served.route("r", text=OVER_THE_WINDOW))
    await eventually(lambda: len(hold.waiters) == 2)
    first.cancel()
    await eventually(lambda: len(hold.waiters) == 1)
    await served.report(first_token(served.busy.reservation_id))
    answer = await retry
    assert set(served.reservations) == {served.busy.reservation_id, answer.reservation_id}
