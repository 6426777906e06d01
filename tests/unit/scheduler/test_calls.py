"""What a unary Route does when its caller leaves in the moment of its answer."""

import asyncio
import contextlib

import pytest
from fakes.rig import Rig, desired_state
from headway_scheduler.rpc.calls import UnaryCalls


@pytest.mark.parametrize("count", [1, 3])
async def test_cancelled_in_the_moment_of_its_answer_it_gives_back_what_it_got(count):
    rig = Rig(desired_state("gpu_aware"))
    rig.endpoints(1)
    rig.full(1)
    calls = UnaryCalls(rig.scheduler)
    waiters = [rig.hold("r")[0] for _ in range(count)]
    tasks = [asyncio.create_task(calls.settled(waiter)) for waiter in waiters]
    await asyncio.sleep(0)
    rig.full()
    rig.dispatcher.run_pass(rig.clock.now)
    assert len(rig.ledger.reservations) == 1
    for task in tasks[1:]:
        task.cancel()
    tasks[0].cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert rig.is_empty()


async def test_the_other_call_that_shares_it_keeps_it():
    rig = Rig(desired_state("gpu_aware"))
    rig.endpoints(1)
    rig.full(1)
    calls = UnaryCalls(rig.scheduler)
    leaving, staying = (asyncio.create_task(calls.settled(rig.hold("r")[0])) for _ in range(2))
    await asyncio.sleep(0)
    rig.full()
    rig.dispatcher.run_pass(rig.clock.now)
    leaving.cancel()
    decision = await staying
    assert list(rig.ledger.reservations) == [decision.reservation_id]
    assert leaving.cancelled()
