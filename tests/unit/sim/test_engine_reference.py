"""The engine model agrees with a slow, obvious vLLM scheduler, step by step."""

import pytest
from fakes.reference_engine import ReferenceEngine, ReferenceRequest
from headway_sim.engine import Engine, EngineRequest, Hardware
from hypothesis import given, settings
from hypothesis import strategies as st

SMALL = Hardware("small", 10.0, 1.0, 0.001, 0.01, 30 * 16, 96, 6)

actions = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(0, 2),  # conversation
        st.integers(1, 300),  # prompt tokens
        st.integers(1, 90),  # output tokens
        st.booleans(),  # the chain covers the answer
    ),
    st.tuples(st.just("step"), st.integers(1, 25)),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
)


def assert_same_step(engine, reference, now):
    step, expected = engine.step(now), reference.step()
    if expected is None:
        assert step is None
        return None
    duration, first, finished, preempted = expected
    assert step is not None
    assert step.end_ms - step.start_ms == pytest.approx(duration)
    assert [s.request.request_id for s in step.preempted] == preempted
    told = {s.request.request_id for s in step.first_tokens if not s.preemptions}
    assert told == {name for name in first if name in told} and first >= told
    assert {s.request.request_id for s in step.finished} == finished
    assert engine.pool.free_blocks == len(reference.free)
    return step.end_ms


@settings(max_examples=300, deadline=None)
@given(st.lists(actions, max_size=40))
def test_every_step_is_the_reference_s(script):
    engine, reference = Engine(SMALL), ReferenceEngine(SMALL)
    pairs, now, serial = [], 0.0, 0
    for action in [*script, ("step", 10**9)]:
        if action[0] == "add":
            _, talk, prompt, output, covered = action
            keys = [talk * 1000 + index for index in range(30)]
            serial += 1
            keyed = prompt + output if covered else prompt
            request = EngineRequest(str(serial), prompt, output, keys=keys, keyed_tokens=keyed)
            twin = ReferenceRequest(str(serial), prompt, output, keys, min(keyed // 16, 30))
            pairs.append((engine.add(request, now), twin))
            reference.add(twin)
        elif action[0] == "cancel":
            alive = [sequence.request.request_id for sequence in engine.sequences()]
            if alive:
                name = alive[action[1] % len(alive)]
                engine.cancel(name)
                reference.cancel(name)
        else:
            for _ in range(action[1]):
                end_ms = assert_same_step(engine, reference, now)
                if end_ms is None:
                    break
                now = end_ms
    for sequence, twin in pairs:
        assert engine.generated(sequence) == twin.generated
        assert sequence.cached_tokens == (twin.cached_tokens or 0)
