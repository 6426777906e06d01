"""Each rule of the engine model on a case small enough to compute by hand."""

import dataclasses

import pytest
from headway_sim.engine import (
    HARDWARE,
    Engine,
    EngineRequest,
    Hardware,
    RequestTooLongError,
    State,
    WaitingLimitError,
    byte_chain,
    chain_root,
    count_tokens,
    token_bytes,
)

TINY = Hardware(
    name="tiny",
    base_ms=10.0,
    token_ms=1.0,
    pair_ms=0.001,
    context_ms=0.01,
    kv_tokens=64 * 16,
    step_budget_tokens=256,
    max_sequences=8,
)


def keys(name: str, blocks: int) -> list[int]:
    return byte_chain(f"{name:64}".encode() * blocks, chain_root("m"))


def request(name: str, prompt: int, output: int = 1, **more) -> EngineRequest:
    return EngineRequest(name, prompt, output, **more)


def drain(engine: Engine, now_ms: float = 0.0):
    steps = []
    while step := engine.step(now_ms):
        steps.append(step)
        now_ms = step.end_ms
    return steps


def test_the_catalogue_is_the_field_table():
    assert set(HARDWARE) == {"a100-40g-8b", "h100-8b", "h100-70b-tp4", "a100-70b-tp8", "cpu-8b"}
    a100 = HARDWARE["a100-40g-8b"]
    assert (a100.base_ms, a100.kv_tokens, a100.step_budget_tokens, a100.max_sequences) == (
        9.8,
        141_000,
        2048,
        256,
    )
    assert HARDWARE["h100-8b"].max_sequences == 1024


def test_hardware_refuses_more_sequences_than_budget():
    with pytest.raises(ValueError, match="max_sequences"):
        dataclasses.replace(TINY, max_sequences=257)


def test_step_time_of_one_prefill_is_base_plus_tokens_plus_pairs():
    engine = Engine(TINY)
    sequence = engine.add(request("a", 200, 1), 0.0)
    step = engine.step(5.0)
    assert step is not None
    assert step.end_ms == pytest.approx(5.0 + 10 + 1.0 * (200 - 128) + 0.001 * 200 * 100)
    assert step.first_tokens == step.finished == (sequence,)
    assert (sequence.admitted_ms, sequence.first_token_ms, sequence.finished_ms) == (
        5.0,
        step.end_ms,
        step.end_ms,
    )
    assert engine.step(step.end_ms) is None


def test_a_decode_step_costs_base_plus_context():
    engine = Engine(TINY)
    engine.add(request("a", 100, 3), 0.0)
    prefill, first, second = drain(engine)
    assert prefill.end_ms == pytest.approx(10 + 0.001 * 100 * 50)
    assert first.end_ms - first.start_ms == pytest.approx(10 + 0.01 * 100)
    assert second.end_ms - second.start_ms == pytest.approx(10 + 0.01 * 101)
    assert second.finished


def test_prefill_is_chunked_by_the_budget_and_each_chunk_sees_what_came_before():
    engine = Engine(TINY)
    engine.add(request("a", 300, 1), 0.0)
    first, second = drain(engine)
    assert first.new_tokens == 256 and not first.first_tokens
    assert second.new_tokens == 44
    assert second.end_ms - second.start_ms == pytest.approx(10 + 0.001 * 44 * (256 + 22))


def test_running_requests_come_first_then_first_come_first_served():
    engine = Engine(TINY)
    a = engine.add(request("a", 16, 50), 0.0)
    engine.step(0.0)
    b = engine.add(request("b", 300, 2), 1.0)
    c = engine.add(request("c", 30, 2), 2.0)
    step = engine.step(20.0)
    assert step is not None
    assert engine.generated(a) == 2  # the decode took its token
    assert step.new_tokens == 256  # and b what was left: 255
    assert (b.state, c.state) == (State.PREFILL, State.WAITING)
    step = engine.step(step.end_ms)
    assert step is not None
    assert step.first_tokens == (b, c)  # b's last 45 tokens and c's 30 fit in one step
    assert step.new_tokens == 1 + 45 + 30


def test_a_second_prompt_hits_the_full_blocks_of_the_first():
    engine = Engine(TINY)
    chain = keys("p", 5)
    engine.add(request("a", 88, 1, keys=chain), 0.0)  # five full blocks and a half one
    drain(engine)
    b = engine.add(request("b", 100, 1, keys=chain), 0.0)
    drain(engine)
    assert b.cached_tokens == 80
    snapshot = engine.snapshot()
    assert (snapshot.prefix_query_tokens, snapshot.prefix_hit_tokens) == (188, 80)


def test_a_full_hit_recomputes_the_last_block():
    engine = Engine(TINY)
    engine.add(request("a", 64, 1, keys=keys("p", 4)), 0.0)
    drain(engine)
    b = engine.add(request("b", 64, 1, keys=keys("p", 4)), 0.0)
    (step,) = drain(engine)
    assert b.cached_tokens == 48
    assert step.new_tokens == 16
    assert step.end_ms == pytest.approx(10 + 0.001 * 16 * (48 + 8))


def test_a_chain_that_differs_early_shares_nothing_later():
    one = byte_chain(b"a" * 64 + b"same" * 32, chain_root("m"))
    other = byte_chain(b"b" * 64 + b"same" * 32, chain_root("m"))
    assert not set(one) & set(other)
    assert chain_root("m", "salt") != chain_root("m")
    assert len(byte_chain(b"x" * 127, 0)) == 1  # full blocks only
    assert count_tokens(b"12345") == 2
    assert byte_chain(token_bytes(range(16)), 7) == byte_chain(token_bytes(range(20)), 7)


def test_output_blocks_are_cached_too():
    engine = Engine(TINY)
    chain = keys("talk", 6)
    engine.add(request("a", 40, 40, keys=chain, keyed_tokens=96), 0.0)
    drain(engine)
    b = engine.add(request("b", 96, 1, keys=chain), 0.0)
    drain(engine)
    assert b.cached_tokens == 64  # 79 of the 80 tokens have KV: the last one was never an input


def test_allocation_reuses_the_least_recently_freed_block_and_a_request_s_tail_first():
    engine = Engine(TINY, kv_tokens=8 * 16)
    engine.add(request("a", 63, 1, keys=keys("a", 3)), 0.0)
    drain(engine)
    engine.add(request("b", 63, 1, keys=keys("b", 3)), 0.0)
    drain(engine)
    # Eight blocks: a's 4 are reused first, from its last to its first.
    engine.add(request("c", 47, 1), 0.0)
    drain(engine)
    a = engine.add(request("a2", 60, 1, keys=keys("a", 3)), 0.0)
    drain(engine)
    assert a.cached_tokens == 16  # c took a's partial block and its last two full ones
    b = engine.add(request("b2", 60, 1, keys=keys("b", 3)), 0.0)
    drain(engine)
    assert b.cached_tokens == 16  # a2 took three of b's four: its partial one and two full ones


def test_admission_reserves_the_whole_input():
    engine = Engine(TINY, kv_tokens=20 * 16)
    a = engine.add(request("a", 300, 2), 0.0)
    b = engine.add(request("b", 17, 1), 0.0)
    engine.step(0.0)
    assert engine.snapshot().kv_use == pytest.approx(19 / 20)
    assert a.state is State.PREFILL
    step = engine.step(1.0)
    assert step is not None
    assert step.first_tokens == (a,)  # budget is left, but b needs two blocks
    assert b.state is State.WAITING
    drain(engine, 2.0)
    assert b.state is State.FINISHED


def test_preemption_takes_the_youngest_which_recomputes_from_the_head_of_the_queue():
    engine = Engine(TINY, kv_tokens=5 * 16)
    a = engine.add(request("a", 32, 20), 0.0)
    b = engine.add(request("b", 30, 20), 0.0)
    step = engine.step(0.0)
    c = engine.add(request("c", 16, 1), 0.5)
    preempted = []
    while step is not None and not preempted:
        step = engine.step(step.end_ms)
        assert step is not None
        preempted += step.preempted
    # a took the fifth block at once; b reached its own third one after two tokens and found none free.
    assert preempted == [b]
    assert (b.state, b.preemptions) == (State.WAITING, 1)
    assert engine.generated(b) == 3
    order = [s for st in drain(engine, step.end_ms) for s in st.finished]
    assert order == [a, b, c] or order == [a, c, b]
    assert b.admitted_ms == 0.0 and b.first_token_ms is not None
    assert b.admitted_ms < b.first_token_ms < c.first_token_ms
    assert engine.generated(b) == 20
    assert engine.snapshot().preemptions == 1


def test_no_more_than_the_maximum_run_at_once():
    engine = Engine(TINY)
    for index in range(10):
        engine.add(request(str(index), 8, 5), 0.0)
    engine.step(0.0)
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.waiting) == (8, 2)


def test_the_waiting_limit_refuses():
    engine = Engine(TINY, waiting_limit=1)
    engine.add(request("a", 8), 0.0)
    with pytest.raises(WaitingLimitError):
        engine.add(request("b", 8), 0.0)
    engine.step(0.0)
    engine.add(request("c", 8), 0.0)


def test_what_can_never_fit_is_refused_and_so_is_nonsense():
    engine = Engine(TINY, kv_tokens=160)
    with pytest.raises(RequestTooLongError):
        engine.add(request("a", 100, 61), 0.0)
    with pytest.raises(ValueError, match="output_tokens"):
        request("a", 1, 0)
    engine.add(request("a", 1), 0.0)
    with pytest.raises(ValueError, match="already"):
        engine.add(request("a", 1), 0.0)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_cancel_frees_everything_wherever_the_request_stands(steps_before):
    engine = Engine(TINY)
    sequence = engine.add(request("a", 300, 30), 0.0)
    for index in range(steps_before):
        engine.step(float(index))
    assert engine.cancel("a")
    assert not engine.cancel("a")
    assert sequence.state is State.CANCELLED
    assert engine.pool.free_blocks == engine.pool.blocks
    assert engine.step(9.0) is None


def test_runs_of_blocks_behave_as_single_blocks_do():
    """512-token keys, the Mooncake form: 32 blocks each, the last one cut where the prompt ends."""
    engine = Engine(TINY, kv_tokens=200 * 16)
    engine.add(request("a", 1300, 1, keys=[1, 2, 3], blocks_per_key=32), 0.0)
    drain(engine)
    b = engine.add(request("b", 1300, 1, keys=[1, 2, 3], blocks_per_key=32), 0.0)
    c = engine.add(request("c", 1300, 1, keys=[1, 2, 4], blocks_per_key=32), 0.0)
    drain(engine)
    assert (b.cached_tokens, c.cached_tokens) == (81 * 16, 1024)


def test_a_run_is_evicted_from_its_end():
    engine = Engine(TINY, kv_tokens=64 * 16)
    engine.add(request("a", 1024 - 16, 1, keys=[1, 2], blocks_per_key=32), 0.0)
    drain(engine)
    engine.add(request("b", 160, 1), 0.0)  # the spare block and a's last nine
    drain(engine)
    c = engine.add(request("c", 1000, 1, keys=[1, 2], blocks_per_key=32), 0.0)
    drain(engine)
    assert c.cached_tokens == (63 - 9) * 16


def test_folded_steps_tell_the_same_story():
    def run(fold: bool):
        engine = Engine(TINY)
        sequences = [engine.add(request(str(i), 40 + 7 * i, 60 + i), 0.0) for i in range(5)]
        now, results = 0.0, 0
        while step := engine.step(now, 1e9 if fold else None):
            now, results = step.end_ms, results + 1
        return [(s.first_token_ms, s.finished_ms) for s in sequences], engine.snapshot(), results

    single, folded = run(False), run(True)
    assert single[:2] == folded[:2]
    assert folded[2] < single[2] / 2


def test_the_next_finish_is_predicted_exactly_while_nothing_else_happens():
    engine = Engine(TINY)
    engine.add(request("a", 40, 30), 0.0)
    engine.add(request("b", 50, 90), 0.0)
    step = engine.step(0.0)
    assert step is not None
    predicted = engine.next_finish_ms(step.end_ms)
    while not step.finished:
        step = engine.step(step.end_ms)
        assert step is not None
    assert step.end_ms == pytest.approx(predicted)


def test_the_cache_is_forgotten_only_when_nothing_runs():
    engine = Engine(TINY)
    engine.add(request("a", 64, 3, keys=keys("p", 4)), 0.0)
    engine.step(0.0)
    assert not engine.reset_prefix_cache()
    drain(engine, 1.0)
    assert engine.reset_prefix_cache()
    b = engine.add(request("b", 64, 1, keys=keys("p", 4)), 0.0)
    drain(engine)
    assert b.cached_tokens == 0
