"""Soft guards: each by name, with what closed it; configurable; none flaps, however noisy its signal."""

import itertools

import pytest
from fakes.rig import Rig, desired_state, device_sample, engine_sample, gpu, spec
from headway_scheduler.domain.measurement import Measurement
from headway_scheduler.strategies.base import SoftGuard
from hypothesis import given
from hypothesis import strategies as st

ALL = frozenset(SoftGuard)
DWELL_S = 4.0


def rig_with_a_gpu(**config):
    rig = Rig(desired_state("gpu_aware"), **config)
    device = gpu("GPU-1", temperature_slowdown_c=Measurement(100.0))
    rig.connect("n", spec(1, device_uuids=("GPU-1",)), devices=[device])
    return rig


def look(rig, kv_use=0.1, **device):
    """A sample comes; the guards that are closed then."""
    engine = engine_sample(spec(1), kv_use=kv_use)
    rig.sample(rig.fleet.nodes["n"], engine, devices=[device_sample("GPU-1", 10, **device)])
    return [guard.value for guard in rig.dispatcher.guards.peek(ALL, rig.slot(1))]


CASES = {
    "heat": ({"temperature_c": 101}, "1.01 of the slowdown temperature: GPU-1 101 °C of 100"),
    "throttle": ({"throttle_reasons": ["hw_thermal"]}, "GPU-1 hw_thermal"),
    "power_brake": ({"throttle_reasons": ["power_brake"]}, "GPU-1 power_brake"),
    "memory_pressure": ({"kv_use": 0.9}, "KV cache 0.90, over 0.80"),
}


@pytest.mark.parametrize("guard", CASES)
def test_each_closes_by_name_and_says_what_closed_it(guard):
    reading, detail = CASES[guard]
    rig = rig_with_a_gpu()
    assert look(rig) == []
    assert look(rig, **reading) == [guard]
    assert rig.dispatcher.guards.detail(SoftGuard(guard), rig.slot(1)) == detail
    assert look(rig) == []
    assert rig.dispatcher.guards.detail(SoftGuard(guard), rig.slot(1)) == ""


@pytest.mark.parametrize("guard", CASES)
def test_one_that_is_off_never_closes(guard):
    rig = rig_with_a_gpu(guards_off=f"{guard}, kv_room")
    assert look(rig, **CASES[guard][0]) == []


def test_levels_and_reasons_are_settings():
    rig = rig_with_a_gpu(
        pressure_close=0.5, pressure_open=0.4, heat_close=0.9, heat_open=0.9, throttle_reasons="sw_power_cap"
    )
    assert look(rig, kv_use=0.6, temperature_c=91) == ["memory_pressure", "heat"]
    assert look(rig, kv_use=0.45, temperature_c=90) == ["memory_pressure"]
    assert look(rig, throttle_reasons=["hw_thermal"]) == []
    assert look(rig, throttle_reasons=["sw_power_cap"]) == ["throttle"]


def test_it_opens_after_a_dwell_without_a_reason():
    rig = rig_with_a_gpu(guard_dwell_s=DWELL_S)
    assert look(rig, temperature_c=101) == ["heat"]
    for temperature in (50, 50, 96, 50, 50, 50, 50):
        rig.clock.now += 1
        assert look(rig, temperature_c=temperature) == ["heat"]
    rig.clock.now += 1
    assert look(rig, temperature_c=50) == []


def test_the_room_for_a_request_can_be_left_to_the_engine():
    for off, goes in (("", False), ("kv_room", True)):
        rig = Rig(desired_state("adaptive"), guards_off=off)
        rig.connect("n", spec(1, kv_capacity_tokens=Measurement(1000.0)))
        rig.route(prompt_tokens=900)
        waiter_or_decision = rig.submit(rig.request(prompt_tokens=900))
        assert (type(waiter_or_decision).__name__ == "Decision") is goes


SIGNALS = {
    "heat": lambda level: {"temperature_c": 100 * level},
    "memory_pressure": lambda level: {"kv_use": 0.8 * level},
    "throttle": lambda level: {"throttle_reasons": ["hw_slowdown"] if level > 1 else []},
    "power_brake": lambda level: {"throttle_reasons": ["power_brake"] if level > 1 else []},
}
"""What a device says at a level that is 1 where the guard closes."""


@pytest.mark.parametrize("guard", SIGNALS)
@given(noise=st.lists(st.floats(0.8, 1.2), min_size=10, max_size=60))
def test_none_flaps_whatever_the_noise(guard, noise):
    rig, states = rig_with_a_gpu(guard_dwell_s=DWELL_S), [False]
    for level in noise:
        rig.clock.now += 1
        states.append(guard in look(rig, **SIGNALS[guard](level)))
        assert not level > 1.001 or states[-1], "a reason closes at once"
    changes = sum(before != after for before, after in itertools.pairwise(states))
    assert changes <= 2 * len(noise) / DWELL_S + 2


@pytest.mark.parametrize("guard", ["heat", "memory_pressure"])
@given(noise=st.lists(st.floats(0.96, 1.2), min_size=2, max_size=30))
def test_noise_above_the_lower_level_changes_it_once_at_most(guard, noise):
    rig = rig_with_a_gpu()
    states = [guard in look(rig, **SIGNALS[guard](level)) for level in noise]
    assert states == sorted(states)


def test_explain_shows_each_guard_with_its_reason():
    rig = rig_with_a_gpu()
    look(rig, kv_use=0.9, temperature_c=101, throttle_reasons=["hw_slowdown", "power_brake"])
    explanation = rig.dispatcher.explain(rig.request(), "", rig.owner, rig.clock.now, whole=False)
    (row,) = explanation.rows
    assert set(row.soft_guards) == set(CASES)
    assert row.details["heat"] == CASES["heat"][1]
    assert row.details["throttle"] == "GPU-1 hw_slowdown"
