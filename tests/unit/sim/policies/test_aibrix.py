from collections import Counter

import pytest
from fakes.views import chosen, request_of, view_of
from headway_sim.policies.aibrix import Aibrix, AibrixParameters

ASK = request_of(tokens=1000)


@pytest.fixture
def policy():
    return Aibrix(AibrixParameters())


def test_more_than_8_apart_is_imbalanced(policy):
    # Alone with its match, at the mean and one deviation: 8 and 0 have mean 4, deviation 4.
    assert chosen(policy, ASK, view_of([8, 0], hits=[900, 0])) == 0
    assert chosen(policy, ASK, view_of([9, 0], hits=[900, 0])) == 1


def test_the_best_match_within_one_deviation_wins(policy):
    # Mean 3, deviation sqrt((9 + 1 + 1 + 9) / 4) = 2.236: up to 5.236.
    loads = [6, 2, 4, 0]
    assert chosen(policy, ASK, view_of(loads, hits=[900, 500, 700, 0])) == 2
    assert chosen(policy, ASK, view_of(loads, hits=[0, 500, 400, 0])) == 1


def test_one_percent_outweighs_any_load(policy):
    # Mean 2, deviation 2: up to 4.
    assert chosen(policy, ASK, view_of([4, 0, 4, 0], hits=[20, 10, 0, 0])) == 0


def test_where_only_the_busy_match_it_is_least_request(policy):
    assert chosen(policy, ASK, view_of([6, 2, 4, 0], hits=[900, 0, 0, 0])) == 3


def test_nothing_matched_is_least_request_ties_at_random(policy):
    view = view_of([1, 1, 2], last_chosen=[1, 2, 0], random=2)
    counts = Counter(chosen(policy, ASK, view) for _ in range(400))
    assert set(counts) == {0, 1}
    assert min(counts.values()) > 140


def test_equal_percentages_go_to_the_fewer_running_whole_percents_only(policy):
    assert chosen(policy, ASK, view_of([3, 2, 3], hits=[509, 500, 0])) == 1
    assert chosen(policy, ASK, view_of([3, 2, 3], hits=[510, 500, 0])) == 0
    # Less than 1 % is no match.
    assert chosen(policy, ASK, view_of([3, 2, 3], hits=[9, 0, 0])) == 1


def test_a_prompt_of_unknown_length_is_least_request(policy):
    assert chosen(policy, request_of(), view_of([1, 0])) == 1


def test_the_deviations_allowed_can_be_set():
    lenient = Aibrix(AibrixParameters(deviations=2.0))
    assert chosen(lenient, ASK, view_of([6, 2, 4, 0], hits=[900, 500, 700, 0])) == 0
