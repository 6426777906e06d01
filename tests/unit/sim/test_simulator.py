"""Small fleets, computed by hand: what the scheduler is told and when, and what clients then see."""

import math
import random
from typing import ClassVar

import numpy as np
import pytest
from headway_scheduler.core import EVERYTHING
from headway_scheduler.strategies.base import Costs, Parameters, SoftGuard
from headway_scheduler.strategies.catalog import algorithms
from headway_sim.engine import HARDWARE, Hardware
from headway_sim.simulation import Policy, SessionSource, Setup, TraceSource, parse_fleet, simulate
from headway_sim.traces import HashedPrompt, LengthPrompt, TextPrompt, TokenPrompt, TraceRequest
from headway_sim.workloads import ArticleWorkload

A100 = HARDWARE["a100-40g-8b"]
# One step of up to 128 tokens takes 10 ms, each more token 0.1 ms; contexts and attention are free.
PLAIN = Hardware("plain", 10.0, 0.1, 0.0, 0.0, kv_tokens=1600, step_budget_tokens=2048, max_sequences=8)


class Spy:
    """Always the first endpoint; notes what it is shown."""

    name: ClassVar[str] = "spy"
    parameters_type: ClassVar[type[Parameters]] = Parameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = frozenset()
    seen: ClassVar[list] = []

    def __init__(self, parameters):
        self.parameters = parameters

    def cost(self, request, view, now):
        self.seen.append((now, request, view.running.tolist(), view.inflight.tolist(), view.hit_tokens.tolist()))
        return Costs(np.arange(len(view), dtype=float))


class Roomy(Spy):
    """The first endpoint with room for the whole request."""

    name: ClassVar[str] = "roomy"
    guards: ClassVar[frozenset[SoftGuard]] = frozenset({SoftGuard.KV_ROOM})


class Broken(Spy):
    name: ClassVar[str] = "broken"

    def cost(self, request, view, now):
        raise ZeroDivisionError


@pytest.fixture(autouse=True)
def forget():
    Spy.seen.clear()


def run(source, policy="round_robin", engines=(A100,), **more):
    known = {**algorithms(), **{each.name: each for each in (Spy, Roomy, Broken)}}
    return simulate(Policy(policy, policy), known, source, Setup(engines, **more))


def lengths(*requests):
    """(arrival, prompt, output) that share nothing."""
    return TraceSource(
        [TraceRequest(at_ms, LengthPrompt(prompt, n), output) for n, (at_ms, prompt, output) in enumerate(requests)]
    )


def test_one_request_alone():
    record = run(lengths((50.0, 1000, 4))).records[0]
    prefill_ms = 9.8 + 0.0666 * (1000 - 128) + 2.8e-6 * 1000 * 500
    # Three decode steps, over contexts of 1000, 1001 and 1002 tokens.
    decode_ms = 3 * 9.8 + 1.05e-4 * (1000 + 1001 + 1002)
    assert record.first_token_ms == pytest.approx(50.0 + prefill_ms)
    assert record.finished_ms == pytest.approx(50.0 + prefill_ms + decode_ms)
    assert (record.held_ms, record.cached_tokens, record.engine) == (0.0, 0, 0)


def test_a_prompt_beyond_the_budget_takes_several_steps():
    record = run(lengths((0.0, 3000, 1))).records[0]
    first = 9.8 + 0.0666 * (2048 - 128) + 2.8e-6 * 2048 * 1024
    second = 9.8 + 0.0666 * (952 - 128) + 2.8e-6 * 952 * (2048 + 476)
    assert record.finished_ms == pytest.approx(first + second)


def test_a_repeated_prefix_is_a_hit_for_engine_and_index():
    again = HashedPrompt((7, 8), 1024)
    longer = HashedPrompt((7, 8, 9), 1536)
    run_ = run(TraceSource([TraceRequest(0.0, again, 1), TraceRequest(5000.0, longer, 1)]), "spy")
    assert [record.cached_tokens for record in run_.records] == [0, 1024]
    assert [hits for *_, hits in Spy.seen] == [[0.0], [1024.0]]
    ttft_ms = 9.8 + 0.0666 * (512 - 128) + 2.8e-6 * 512 * (1024 + 256)
    assert run_.records[1].first_token_ms == pytest.approx(5000.0 + ttft_ms)


def test_a_full_hit_recomputes_the_last_block():
    same = TokenPrompt(tuple(range(256)))
    run_ = run(TraceSource([TraceRequest(at_ms, same, 1) for at_ms in (0.0, 5000.0)]))
    assert [record.cached_tokens for record in run_.records] == [0, 240]


def test_two_at_once_go_to_two_engines_and_a_third_waits_for_a_step():
    run_ = run(lengths((0.0, 128, 1), (0.0, 128, 1), (1.0, 128, 1)), engines=(PLAIN, PLAIN))
    assert [record.engine for record in run_.records] == [0, 1, 0]
    assert [record.finished_ms for record in run_.records] == pytest.approx([10.0, 10.0, 20.0])


def test_an_engine_refuses_beyond_its_waiting_limit():
    run_ = run(lengths((0.0, 128, 1), (1.0, 128, 1), (2.0, 128, 1)), engines=(PLAIN,), waiting_limit=1)
    assert [record.refused for record in run_.records] == ["", "", "ENGINE_FULL"]
    assert run_.records[2].first_token_ms is None


def test_a_prompt_beyond_the_memory_is_refused():
    run_ = run(lengths((0.0, 1600, 1), (0.0, 100, 1)), engines=(PLAIN,))
    assert [record.refused for record in run_.records] == ["TOO_LONG", ""]


def test_a_hold_ends_in_the_instant_that_makes_room():
    # 1,600 KV tokens: the second request finds no room until the first has ended; limits are not stated, so 256
    # tokens of answer are expected of each.
    run_ = run(lengths((0.0, 1128, 3), (5.0, 1128, 1)), "roomy", engines=(PLAIN,))
    first, second = run_.records
    assert first.finished_ms == pytest.approx(110.0 + 2 * 10.0)
    assert second.held_ms == pytest.approx(125.0)
    assert second.first_token_ms == pytest.approx(130.0 + 110.0)


def test_a_hold_expires():
    # The first one's prefill takes nine seconds, so that the second waits for the window all the while.
    run_ = run(lengths((0.0, 60_000, 1), (5.0, 100, 1)), "adaptive", max_wait_s=1.0)
    assert [record.refused for record in run_.records] == ["", "HOLD_EXPIRED"]
    assert 1000.0 <= run_.records[1].held_ms <= 1050.0 + 1e-6


def test_a_hold_for_room_goes_to_the_engines_own_queue_at_half_of_its_wait():
    run_ = run(lengths((0.0, 1128, 200), (5.0, 1128, 1)), "roomy", engines=(PLAIN,), max_wait_s=1.0)
    first, second = run_.records
    assert (first.refused, second.refused) == ("", "")
    assert 500.0 <= second.held_ms <= 550.0
    assert second.first_token_ms > first.finished_ms


def test_what_may_not_wait_queues_in_the_engine():
    run_ = run(lengths((0.0, 1128, 3), (5.0, 1128, 1)), "roomy", engines=(PLAIN,), max_wait_s=0.0)
    first, second = run_.records
    assert (first.held_ms, second.held_ms) == (0.0, 0.0)
    assert second.first_token_ms == pytest.approx(first.finished_ms + 110.0)


def running_seen(**more):
    """What the scheduler believed to be running at 4,000 ms, where one request ran from 0 to 3,500 ms."""
    run(lengths((0.0, 100, 350), (4000.0, 100, 1)), "spy", engines=(PLAIN,), **more)
    return Spy.seen[-1][2]


def test_fresh_telemetry_shows_the_present():
    assert running_seen(telemetry_period_ms=0.0) == [0.0]


def test_telemetry_comes_late():
    assert running_seen(telemetry_period_ms=100.0, telemetry_delay_ms=300.0) == [0.0]
    assert running_seen(telemetry_period_ms=100.0, telemetry_delay_ms=900.0) == [1.0]


def test_telemetry_counts_nothing_twice():
    """What our own reservations account for is not in flight again because a sample says so."""
    run(lengths((0.0, 100, 350), (2000.0, 100, 1)), "spy", engines=(PLAIN,))
    assert Spy.seen[-1][2:4] == ([1.0], [1.0])


def test_reports_teach_the_scheduler():
    """Outputs are unknown at first; once one of 3 tokens has been reported, so much is expected."""
    run_ = run(
        TraceSource([TraceRequest(at_ms, TextPrompt("x" * 400), 3) for at_ms in (0.0, 1000.0)]), "spy", engines=(PLAIN,)
    )
    assert run_.records[0].prompt_tokens == run_.records[1].prompt_tokens
    requests = [request for _, request, *_ in Spy.seen]
    assert [request.max_tokens for request in requests] == [None, None]
    assert [request.prompt_tokens for request in requests] == [run_.records[0].prompt_tokens] * 2


def test_a_closed_loop_keeps_its_concurrency():
    workload = ArticleWorkload(sessions=5, turns=2, concurrency=2, input_tokens=20, output_tokens=10)
    records = run(SessionSource(workload)).records
    assert len(records) == 10
    moments = sorted([(r.arrival_ms, 1) for r in records] + [(r.finished_ms, -1) for r in records])
    active = most = 0
    for _, change in moments:
        active += change
        most = max(most, active)
    assert most == 2


def test_the_next_turn_finds_the_one_before():
    workload = ArticleWorkload(sessions=1, turns=3, concurrency=1, input_tokens=200, output_tokens=100)
    first, second, third = run(SessionSource(workload)).records
    assert first.cached_tokens == 0
    assert second.cached_tokens == (first.prompt_tokens + 100 - 1) // 16 * 16
    assert third.cached_tokens == (second.prompt_tokens + 100 - 1) // 16 * 16


def test_a_limit_cuts_sessions_short():
    source = SessionSource(ArticleWorkload(sessions=5, turns=2, concurrency=2, output_tokens=5), limit=7)
    assert source.total == 7
    assert len(run(source).records) == 7


def test_same_seed_same_run():
    def times(seed):
        requests = [TraceRequest(float(n // 4), LengthPrompt(500 + 37 * n, n), 20) for n in range(40)]
        return [r.finished_ms for r in run(TraceSource(requests), "random", (A100,) * 4, seed=seed).records]

    assert times(3) == times(3)
    assert times(3) != times(4)


def test_reordering_changes_nothing_that_matters():
    requests = [TraceRequest(100.0 * n, LengthPrompt(500 + 37 * n, n), 20) for n in range(40)]
    plain, reordered = (
        run(TraceSource(requests), "least_request", (A100,) * 4, reordered=each) for each in (False, True)
    )
    assert [r.finished_ms for r in reordered.records] == pytest.approx([r.finished_ms for r in plain.records])


def test_a_strategy_that_fails_ends_the_run():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(lengths((0.0, 10, 1)), "broken")


def test_unlike_engines_by_their_own_speed():
    engines = parse_fleet("a100-40g-8b+h100-8b")
    run_ = run(lengths((0.0, 1000, 1), (0.0, 1000, 1)), engines=engines)
    expected = [each.step_ms(1000, 1000 * 500.0, 0) for each in engines]
    assert [record.finished_ms for record in run_.records] == pytest.approx(expected)


def test_timeline_stays_bounded():
    requests = [TraceRequest(5000.0 * n, LengthPrompt(10, n), 1) for n in range(1500)]
    timeline = run(TraceSource(requests)).timeline
    assert 1000 <= len(timeline.times_ms) <= 2000
    assert timeline.times_ms == sorted(timeline.times_ms)
    assert timeline.times_ms[-1] > 5000.0 * 1480


@pytest.mark.parametrize(("learn", "right"), [(EVERYTHING, True), (frozenset(), False)])
def test_predictions_become_right_whatever_was_believed(learn, right):
    """Believed twice as fast or slow as they are; a light load, so that a TTFT is a prefill and little else."""
    dice = random.Random(3)
    jobs = lengths(*[(number * 400.0, dice.randrange(500, 6000), dice.randrange(20, 60)) for number in range(400)])
    engines = (A100, HARDWARE["h100-8b"], A100)
    records = run(jobs, "adaptive", engines, prior_error=2.0, learn=learn).records[200:]
    errors = [abs(math.log(each.predicted_ttft_ms / (each.first_token_ms - each.arrival_ms))) for each in records]
    assert (sorted(errors)[len(errors) // 2] < 0.15) is right
