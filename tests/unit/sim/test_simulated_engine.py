"""Running an engine only as far as anyone looks gives the same times as running every step."""

import heapq
import math

from headway_sim.engine import Engine, EngineRequest, Hardware
from headway_sim.simulation.engines import SimulatedEngine
from hypothesis import given, settings
from hypothesis import strategies as st

SMALL = Hardware("small", 10.0, 0.1, 1e-4, 1e-3, kv_tokens=640, step_budget_tokens=64, max_sequences=4)

requests = st.lists(
    st.tuples(
        st.integers(0, 3000),  # arrival
        st.integers(1, 300),  # prompt
        st.integers(1, 120),  # output
        st.integers(0, 3),  # who shares a prefix
        st.booleans(),  # whether the answer can be hit too
    ),
    min_size=1,
    max_size=14,
)


def made(given_requests):
    found = []
    for number, (at_ms, prompt, output, family, whole) in enumerate(sorted(given_requests)):
        keyed = prompt + output if whole else prompt
        keys = [family * 1000 + block for block in range(keyed // 16)]
        found.append((float(at_ms), EngineRequest(f"r{number}", prompt, output, keys=keys, keyed_tokens=keyed)))
    return found


def eagerly(arrivals):
    """Every step by itself."""
    engine, sequences, clock_ms = Engine(SMALL), [], 0.0
    arrivals = list(arrivals)
    step_end_ms = math.inf
    while arrivals or step_end_ms < math.inf:
        if arrivals and arrivals[0][0] < step_end_ms:
            clock_ms, request = arrivals.pop(0)
            sequences.append(engine.add(request, clock_ms))
            if step_end_ms < math.inf:
                continue
        else:
            clock_ms = step_end_ms
        step = engine.step(clock_ms)
        step_end_ms = math.inf if step is None else step.end_ms
    return sequences


def lazily(arrivals, samples_ms):
    """Woken for news only, and now and then for a sample."""
    told = []
    engine = SimulatedEngine(Engine(SMALL), lambda step: told.append((clock_ms, step)))
    heap = [(at_ms, 1, number, request) for number, (at_ms, request) in enumerate(arrivals)]
    heap += [(float(at_ms), 2, number, None) for number, at_ms in enumerate(samples_ms)]
    heapq.heapify(heap)
    sequences = []
    while heap or engine.wake_ms < math.inf:
        if not heap or engine.wake_ms <= heap[0][0]:
            clock_ms = engine.wake_ms
            engine.catch_up(clock_ms)
            continue
        clock_ms, _, _, request = heapq.heappop(heap)
        if request is None:
            engine.snapshot(clock_ms)
        else:
            sequences.append(engine.add(request, clock_ms))
    return sequences, told


@settings(max_examples=300, deadline=None)
@given(requests, st.lists(st.integers(0, 20_000), max_size=20))
def test_lazy_and_eager_agree(given_requests, samples_ms):
    arrivals = made(given_requests)
    expected = eagerly(arrivals)
    found, told = lazily(arrivals, samples_ms)
    for one, other in zip(expected, found, strict=True):
        assert other.first_token_ms is not None
        assert math.isclose(one.first_token_ms, other.first_token_ms, rel_tol=1e-9)
        assert math.isclose(one.finished_ms, other.finished_ms, rel_tol=1e-9)
        assert one.cached_tokens == other.cached_tokens
        assert one.preemptions == other.preemptions
    for heard_ms, step in told:
        assert math.isclose(heard_ms, step.end_ms, rel_tol=1e-9)


def test_busy_time_counts_the_step_under_way():
    engine = SimulatedEngine(Engine(SMALL), lambda step: None)
    engine.add(EngineRequest("r", 16, 1), 100.0)
    assert engine.busy_ms(104.0) == 4.0
    engine.catch_up(engine.wake_ms)
    assert engine.wake_ms == math.inf
    busy_ms = SMALL.step_ms(16, 16 * 8.0, 0)
    assert math.isclose(engine.busy_ms(1000.0), busy_ms)
