"""The engine in real time, on a clock the test turns."""

import asyncio

import pytest
from headway_sim.emulator.realtime import RealTimeEngine
from headway_sim.engine import HARDWARE, Engine, EngineRequest

HARDWARE_8B = HARDWARE["a100-40g-8b"]
SPEEDUP = 10.0
DEADLINE_S = 10.0


class Clock:
    """Seconds that pass only when told; `turn_ms` is in the engine's milliseconds."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def turn_ms(self, virtual_ms):
        self.now_s += virtual_ms / 1000.0 / SPEEDUP


@pytest.fixture
async def clock():
    return Clock()


@pytest.fixture
async def engine(clock):
    engine = RealTimeEngine(Engine(HARDWARE_8B), speedup=SPEEDUP, stream_interval_ms=5.0, clock_s=clock)
    yield engine
    engine.close()


async def next_batch(batches):
    return await asyncio.wait_for(anext(batches), DEADLINE_S)


def prefill_ms(tokens):
    return HARDWARE_8B.step_ms(tokens, tokens**2 / 2, 0)


async def test_a_late_host_is_late_to_tell_but_the_times_are_the_engine_s(engine, clock):
    generation = engine.submit(EngineRequest("a", 50, 3), streamed=False)
    clock.turn_ms(60_000)  # the host slept for a minute
    engine.snapshot()
    assert generation.finished
    decodes = HARDWARE_8B.step_ms(1, 0, 50) + HARDWARE_8B.step_ms(1, 0, 51)
    assert generation.times().ttft_ms == pytest.approx(prefill_ms(50), abs=0.01)
    assert generation.times().e2e_ms == pytest.approx(prefill_ms(50) + decodes, abs=0.01)


async def test_a_request_waits_for_the_step_under_way_and_no_step_begins_before_its_arrival(engine, clock):
    first = engine.submit(EngineRequest("a", 1000, 1), streamed=False)
    clock.turn_ms(10)
    second = engine.submit(EngineRequest("b", 50, 1), streamed=False)
    clock.turn_ms(5_000)
    third = engine.submit(EngineRequest("c", 50, 1), streamed=False)
    clock.turn_ms(5_000)
    engine.snapshot()
    assert first.times().queued_ms == third.times().queued_ms == 0
    assert second.times().queued_ms == pytest.approx(prefill_ms(1000) - 10, abs=0.01)
    assert third.times().ttft_ms == pytest.approx(prefill_ms(50), abs=0.01)


async def test_no_token_is_seen_before_its_step_has_ended(engine, clock):
    generation = engine.submit(EngineRequest("a", 50, 10), streamed=True)
    assert engine.visible_tokens(generation) == 0
    clock.turn_ms(prefill_ms(50) + 0.1)
    engine.snapshot()
    assert engine.visible_tokens(generation) == 1
    clock.turn_ms(HARDWARE_8B.step_ms(1, 0, 50) + 0.1)
    engine.snapshot()
    assert engine.visible_tokens(generation) == 2


async def test_the_timer_hands_out_first_token_batches_and_end(engine, clock):
    generation = engine.submit(EngineRequest("a", 50, 100), streamed=True)
    batches = generation.batches()
    clock.turn_ms(prefill_ms(50) + 0.1)
    assert await next_batch(batches) == 1
    clock.turn_ms(300)
    assert 20 <= await next_batch(batches) <= 31
    clock.turn_ms(10_000)
    rest = [count async for count in batches]
    assert generation.finished
    assert sum(rest) > 60


async def test_an_aborted_request_leaves_nothing(engine, clock):
    generation = engine.submit(EngineRequest("a", 5000, 100), streamed=True)
    clock.turn_ms(200)
    engine.abort(generation)
    engine.abort(generation)
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.kv_use) == (0, 0, 0.0)
    again = engine.submit(EngineRequest("a", 50, 1), streamed=False)
    clock.turn_ms(10_000)
    assert await next_batch(again.batches()) == 1


async def test_the_cache_is_reset_only_when_idle(engine, clock):
    engine.submit(EngineRequest("a", 50, 2), streamed=False)
    assert not engine.reset_prefix_cache()
    clock.turn_ms(10_000)
    assert engine.reset_prefix_cache()
