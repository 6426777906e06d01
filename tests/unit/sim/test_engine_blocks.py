"""No block is lost or owned twice, whatever comes."""

from collections import Counter

from headway_sim.engine import Engine, EngineRequest, Hardware, State
from hypothesis import example, given
from hypothesis import strategies as st

SMALL = Hardware("small", 10.0, 1.0, 0.001, 0.01, 40 * 16, 96, 6)

adds = st.tuples(
    st.just("add"),
    st.integers(0, 3),  # which conversation
    st.integers(1, 400),  # prompt tokens
    st.integers(1, 120),  # output tokens
    st.booleans(),  # does the chain cover the answer
)
actions = st.one_of(
    adds,
    st.tuples(st.just("step"), st.integers(1, 8)),
    st.tuples(st.just("fold"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
)


def check_blocks(engine: Engine) -> None:
    pool = engine.pool
    queue = list(pool.free_queue())
    holders = Counter(run for sequence in engine.sequences() for run in sequence.runs)
    assert all(run.refs == 0 and run.count > 0 for run in queue)
    assert sum(run.count for run in queue) == pool.free_blocks
    assert all(run.refs == count for run, count in holders.items())
    assert not set(queue) & set(holders)
    assert pool.free_blocks + sum(run.count for run in holders) == pool.blocks
    cached = list(pool.cached_runs())
    assert len(cached) == len(set(cached))
    assert all(0 < run.cached <= run.count for run in cached)
    assert set(cached) <= set(queue) | set(holders)
    for sequence in engine.sequences():
        if sequence.state is State.WAITING:
            assert not sequence.runs


# A part of a run that was begun and cancelled is hit, and then all of it stands in the way of the only request.
@example([("add", 3, 368, 1, False), ("step", 1), ("cancel", 0), ("add", 3, 250, 120, False)], 32)
@given(st.lists(actions, max_size=60), st.sampled_from([1, 4, 32]))
def test_blocks_add_up_after_every_action(script, blocks_per_key):
    engine = Engine(SMALL)
    now, serial = 0.0, 0
    for action in script:
        if action[0] == "add":
            _, talk, prompt, output, covered = action
            serial += 1
            engine.add(
                EngineRequest(
                    str(serial),
                    prompt,
                    output,
                    keys=[talk * 1000 + index for index in range(40)],
                    blocks_per_key=blocks_per_key,
                    keyed_tokens=prompt + output if covered else None,
                ),
                now,
            )
        elif action[0] == "cancel":
            alive = engine.sequences()
            if alive:
                engine.cancel(alive[action[1] % len(alive)].request.request_id)
        else:
            for _ in range(action[1]):
                step = engine.step(now, now + 500 if action[0] == "fold" else None)
                if step is None:
                    break
                now = step.end_ms
                check_blocks(engine)
        check_blocks(engine)
    while step := engine.step(now, now + 1e6):
        assert step.end_ms > now
        now = step.end_ms
    assert not engine.sequences()
    assert engine.pool.free_blocks == engine.pool.blocks
    check_blocks(engine)


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 80)), min_size=1, max_size=12))
def test_folding_changes_nothing(sizes):
    def run(fold: bool):
        engine = Engine(SMALL)
        keys = list(range(40))
        sequences = [
            engine.add(EngineRequest(str(i), p, o, keys=keys, keyed_tokens=p + o), 0.0)
            for i, (p, o) in enumerate(sizes)
        ]
        now = 0.0
        while step := engine.step(now, 1e12 if fold else None):
            now = step.end_ms
        assert all(engine.generated(s) == s.request.output_tokens for s in sequences)
        return [(s.first_token_ms, s.finished_ms, s.cached_tokens, s.preemptions) for s in sequences]

    assert run(False) == run(True)
