"""Ten minutes of every endpoint, in memory that does not grow."""

from math import isnan

import pytest
from fakes.console import fill, rigged, sample
from fakes.rig import desired_state
from headway_console import history
from headway_console.history import SAMPLES, History


async def followed(nodes=2):
    scheduler = await rigged(desired_state())
    past = History(scheduler)
    fill(scheduler.fleet, nodes, scheduler.clock())
    return scheduler, past


async def test_values_come_back_in_order_and_the_oldest_are_dropped():
    scheduler, past = await followed()
    endpoint = scheduler.fleet.endpoints["10.0.0.0:8000@0"]
    for number in range(SAMPLES + 7):
        scheduler.fleet.columns.prefill_us[endpoint.slot] = number * 1000
        await past.sample()
    assert past.of(endpoint, history.QUEUED_MS) == [float(n) for n in range(7, SAMPLES + 7)]


async def test_memory_is_that_of_the_fleets_room():
    scheduler, past = await followed(nodes=125)
    for _ in range(SAMPLES * 2):
        await past.sample()
    assert past.nbytes == 4 * SAMPLES * scheduler.fleet.columns.capacity * 2
    assert len(past.totals) == SAMPLES + 1


async def test_a_fleet_that_grows_keeps_its_past():
    scheduler, past = await followed()
    endpoint = scheduler.fleet.endpoints["10.0.0.0:8000@0"]
    scheduler.fleet.columns.prefill_us[endpoint.slot] = 7000
    await past.sample()
    small = scheduler.fleet.columns.capacity
    fill(scheduler.fleet, 125, scheduler.clock())
    assert scheduler.fleet.columns.capacity > small
    late = max(scheduler.fleet.endpoints.values(), key=lambda each: each.slot)
    await past.sample()
    assert past.of(endpoint, history.QUEUED_MS)[-2:] == [7.0, 7.0]
    assert [isnan(value) for value in past.of(late, history.QUEUED_MS)[-2:]] == [True, False]


async def test_nothing_is_left_of_an_endpoint_that_is_gone():
    scheduler, past = await followed()
    endpoint = scheduler.fleet.endpoints["10.0.0.0:8000@0"]
    await past.sample()
    assert not isnan(past.of(endpoint, history.INFLIGHT)[-1])
    scheduler.fleet.remove_endpoint(endpoint.id)
    assert all(isnan(value) for value in past.of(endpoint, history.INFLIGHT))
    await past.sample()
    assert all(isnan(value) for value in past.of(endpoint, history.INFLIGHT))


async def test_the_hit_ratio_is_of_what_was_looked_up_since():
    scheduler, past = await followed()
    node = scheduler.fleet.nodes["gpu-000"]
    endpoint = scheduler.fleet.endpoints["10.0.0.1:8000@0"]
    await past.sample()
    assert isnan(past.of(endpoint, history.HIT_RATIO)[-1])
    before = endpoint.sample
    sample(scheduler.fleet, node, 0, scheduler.clock(), sequence=2)
    after = endpoint.sample
    await past.sample()
    hits = after.prefix_hits.value - before.prefix_hits.value
    looked_up = after.prefix_queries.value - before.prefix_queries.value
    assert 0 < hits < looked_up
    assert past.of(endpoint, history.HIT_RATIO)[-1] == pytest.approx(hits / looked_up, abs=1e-3)
    await past.sample()
    assert isnan(past.of(endpoint, history.HIT_RATIO)[-1]), "nothing was looked up"


async def test_unknown_stays_unknown():
    scheduler, past = await followed()
    endpoint = scheduler.fleet.endpoints["10.0.0.0:8000@0"]
    scheduler.fleet.columns.kv_use[endpoint.slot] = float("nan")
    await past.sample()
    assert isnan(past.of(endpoint, history.KV_USE)[-1])


async def test_rates_are_differences_over_time():
    scheduler, past = await followed()
    assert past.routes_per_second() is None
    for number in range(4):
        scheduler.refusals["SATURATED"] = number * 10
        await past.sample()
        scheduler.clock.now += 5
    rates = past.refusal_rates("SATURATED")
    assert rates[-3:] == [2.0, 2.0, 2.0]
    assert all(isnan(value) for value in rates[:-3])
    assert past.refusal_rates("NEVER")[-3:] == [0.0, 0.0, 0.0]
    assert past.routes_per_second() == 0.0
    assert past.holds()[-4:] == [0.0] * 4
    assert len(past.holds()) == SAMPLES


async def test_what_is_larger_than_half_a_number_holds_is_the_most():
    scheduler, past = await followed()
    endpoint = scheduler.fleet.endpoints["10.0.0.0:8000@0"]
    scheduler.fleet.columns.prefill_us[endpoint.slot] = 10**12
    await past.sample()
    assert past.of(endpoint, history.QUEUED_MS)[-1] == pytest.approx(60_000, rel=1e-3)
