"""How often Python looks for cycles."""

import asyncio
import gc

import pytest
from fakes.waiting import eventually
from headway_scheduler import collector
from headway_scheduler.collector import Pace, calm_collector, collect_garbage


def test_often_while_there_are_cycles_seldom_while_there_are_none():
    pace, pauses = Pace(), []
    for found in (1000, 1000, 0, 0, 199, 200, 0):
        pace.found(found, 0.0)
        pauses.append(pace.pause_s)
    assert pauses == [0.1, 0.1, 0.2, 0.4, 0.8, 0.1, 0.2]
    for _ in range(20):
        pace.found(0, 0.0)
    assert pace.pause_s == 10.0


def test_sooner_where_a_look_was_long():
    pace, pauses = Pace(), []
    pace.pause_s = 8.0
    for took_s in (0.016, 0.0015, 0.0015, 0.004, 1.0, 0.0009):
        pace.found(0, took_s)
        pauses.append(pytest.approx(pace.pause_s))
    assert pauses == [1.0, 1.0, 1.0, 0.5, 0.1, 0.2]


@pytest.mark.parametrize("found", [0, 1000])
def test_what_outlived_a_look_is_looked_at_every_five_minutes_and_all_every_hour(found):
    pace, now, times = Pace(), 0.0, {1: [], 2: []}
    while now < 7000:
        now += pace.pause_s
        generation = pace.generation()
        if generation:
            times[generation].append(now)
        pace.found(found, 0.0)
    assert times[2] == [pytest.approx(3600, abs=20)]
    assert len(times[1]) == pytest.approx(22, abs=1)
    assert times[1][0] == pytest.approx(300, abs=20)


class Cycle:
    """Refers to itself, and says when it goes."""

    def __init__(self, gone):
        self.itself, self._gone = self, gone

    def __del__(self):
        self._gone.append(1)


@pytest.fixture
def collector_as_before():
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collector_as_before")
async def test_cycles_go_without_the_collector_of_python(monkeypatch):
    monkeypatch.setattr(collector, "_SHORTEST_S", 0.001)
    calm_collector()
    gc.set_threshold(0)
    gone = []
    task = asyncio.create_task(collect_garbage())
    for _ in range(10):
        Cycle(gone)
    await eventually(lambda: len(gone) == 10)
    task.cancel()
    await asyncio.wait([task])
