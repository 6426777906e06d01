from collections import Counter

from fakes.views import Draws, chosen, request_of, view_of
from headway_sim.policies.sglang import Fallback, Sglang, SglangParameters

ASK = request_of(tokens=1000)


def policy(**parameters):
    return Sglang(SglangParameters(**parameters))


def test_balanced_and_matching_goes_to_the_longest_match():
    assert chosen(policy(), ASK, view_of([60, 3, 0], hits=[900, 500, 0])) == 0


def test_more_than_64_apart_and_more_than_one_and_a_half_times_is_imbalanced():
    matched = [900, 0]
    assert chosen(policy(), ASK, view_of([64, 0], hits=matched)) == 0  # 64 apart: not more than 64
    assert chosen(policy(), ASK, view_of([65, 0], hits=matched)) == 1
    assert chosen(policy(), ASK, view_of([195, 130], hits=matched)) == 0  # 1.5 times: not more
    assert chosen(policy(), ASK, view_of([196, 130], hits=matched)) == 1


def test_a_match_of_30_percent_is_not_enough():
    assert chosen(policy(), ASK, view_of([5, 4], hits=[300, 0])) == 1
    assert chosen(policy(), ASK, view_of([5, 4], hits=[301, 0])) == 0
    assert chosen(policy(cache_threshold=0.5), ASK, view_of([5, 4], hits=[500, 0])) == 1
    assert chosen(policy(cache_threshold=0.5), ASK, view_of([5, 4], hits=[501, 0])) == 0


def test_the_least_loaded_rotate_and_equal_matches_are_drawn():
    assert chosen(policy(), ASK, view_of([1, 1, 1], last_chosen=[3, 1, 2])) == 1
    view = view_of([1, 2, 3], hits=[900, 900, 0], random=5)
    counts = Counter(chosen(policy(), ASK, view) for _ in range(400))
    assert set(counts) == {0, 1}
    assert min(counts.values()) > 140


def test_a_prompt_of_unknown_length_goes_to_the_least_loaded():
    assert chosen(policy(), request_of(tokens=0), view_of([1, 0])) == 1


def test_the_older_fallback_goes_to_the_smallest_tree():
    older = policy(fallback=Fallback.SMALLEST_TREE)
    assert chosen(older, request_of(tokens=1000), view_of([5, 0])) == 1  # both empty: fewest in flight
    assert chosen(older, request_of(tokens=400), view_of([5, 0])) == 0  # 0 against 1000
    assert chosen(older, request_of(tokens=700), view_of([5, 0])) == 0  # 400 against 1000
    assert chosen(older, request_of(tokens=100), view_of([5, 0])) == 1  # 1100 against 1000
    # 500 of 1000 match: affinity, and only the other 500 grow the tree: 1600 against 1100, then 1601 more.
    assert chosen(older, request_of(tokens=1000), view_of([5, 0], hits=[0, 500])) == 1
    assert chosen(older, request_of(tokens=501), view_of([5, 0])) == 0
    assert chosen(older, request_of(tokens=1), view_of([5, 0])) == 1


def test_a_tree_is_evicted_at_its_size():
    older = policy(fallback=Fallback.SMALLEST_TREE, max_tree_bytes=4000)
    assert chosen(older, request_of(tokens=5000), view_of([0, 1])) == 0
    assert chosen(older, request_of(tokens=1001), view_of([0, 1])) == 1
    # Both trees are full at 1000 tokens: equal again, so the fewest in flight.
    assert chosen(older, request_of(tokens=1), view_of([0, 1])) == 0


def test_an_imbalanced_fleet_ignores_trees_and_draws_nothing():
    older = policy(fallback=Fallback.SMALLEST_TREE)
    assert chosen(older, request_of(tokens=10), view_of([0, 100], random=Draws([0.5, 0.5]))) == 0
    assert chosen(older, request_of(tokens=10), view_of([0, 100], random=Draws([0.5, 0.5]))) == 0
