"""Two schedulers, real processes under load: the leader is killed, and stopped and continued."""

import asyncio

import pytest
from headway_bench.takeover import How, TakeoverBench, TakeoverSettings


@pytest.mark.parametrize("how", list(How))
async def test_the_standby_takes_over_and_nothing_is_lost(how: How) -> None:
    settings = TakeoverSettings(kills=2, how=how, held=8)
    async with asyncio.timeout(120):
        found = (await TakeoverBench(settings).run())["takeover"]
    assert found["routes"] > 0
    assert (found["lost"], found["two_leaders"]) == (0, 0)
    assert (found["held_kept"], found["reservations_left"]) == (settings.held, 0)
