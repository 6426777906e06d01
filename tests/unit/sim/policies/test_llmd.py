from collections import Counter

import numpy as np
import pytest
from fakes.views import chosen, request_of, view_of
from headway_sim.policies.llmd import Llmd, LlmdParameters

ASK = request_of(tokens=1000)
NAN = float("nan")


@pytest.fixture
def policy():
    return Llmd(LlmdParameters())


def test_the_weighted_sum_decides(policy):
    # 3·0.5 + 2·0 + 2·0.5 = 2.5 against 0 + 2·1 + 2·0.2 = 2.4.
    kv_use, waiting = [0.5, 0.8], [4.0, 0.0]
    assert chosen(policy, ASK, view_of([0, 0], hits=[500, 0], kv_use=kv_use, waiting=waiting)) == 0
    # 3·0.4 + 1.0 = 2.2 against 2.4.
    assert chosen(policy, ASK, view_of([0, 0], hits=[400, 0], kv_use=kv_use, waiting=waiting)) == 1


def test_a_queue_between_the_longest_and_the_shortest_scores_in_between(policy):
    # Queue scores 0, 0.75, 1 → 0, 1.5, 2; prefixes 3·0.6 = 1.8, 3·0.2 = 0.6, 0.
    view = view_of([0, 0, 0], hits=[600, 200, 0], waiting=[8.0, 2.0, 0.0], kv_use=[0.5] * 3)
    assert chosen(policy, ASK, view) == 1


def test_equal_queues_all_score_one(policy):
    assert chosen(policy, ASK, view_of([0, 0], waiting=[7.0, 7.0], kv_use=[0.6, 0.5])) == 1


def test_the_hit_is_at_most_the_whole_prompt(policy):
    # Both cached in full, though the index rounds one up: then KV use decides.
    view = view_of([0, 0], hits=[1100, 1000], waiting=[0.0, 0.0], kv_use=[0.5, 0.4])
    assert chosen(policy, ASK, view) == 1


def test_unknown_telemetry_counts_as_an_empty_endpoint(policy):
    assert chosen(policy, ASK, view_of([0, 0], waiting=[0.0, NAN], kv_use=[0.1, NAN])) == 1
    assert chosen(policy, ASK, view_of([0, 0], hits=[1, 0], waiting=[NAN, NAN], kv_use=[NAN, NAN])) == 0


def test_equal_scores_are_drawn_whatever_is_in_flight(policy):
    view = view_of([9, 0], last_chosen=[2, 1], random=4)
    counts = Counter(chosen(policy, ASK, view) for _ in range(400))
    assert min(counts[0], counts[1]) > 140


def test_weights_can_be_set():
    queue_only = Llmd(LlmdParameters(prefix_weight=0.0, kv_weight=0.0))
    view = view_of([0, 0], hits=[1000, 0], waiting=[1.0, 0.0], kv_use=[0.0, 1.0])
    assert chosen(queue_only, ASK, view) == 1
    assert np.array_equal(np.argsort(queue_only.cost(ASK, view, 0.0).cost), [1, 0])
