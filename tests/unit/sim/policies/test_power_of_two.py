from collections import Counter

import pytest
from fakes.views import Draws, chosen, request_of, view_of
from headway_sim.policies import PEERS


@pytest.fixture
def policy():
    return PEERS["power_of_two"](PEERS["power_of_two"].parameters_type())


def test_the_less_loaded_of_the_two_drawn_wins_whatever_the_others_have(policy):
    draws = Draws([0.9, 0.2, 0.5, 0.1])  # draws endpoints 3 and 1
    assert chosen(policy, request_of(), view_of([0, 2, 0, 7], random=draws)) == 1
    assert chosen(policy, request_of(), view_of([0, 8, 0, 7], random=draws)) == 3


def test_equal_loads_go_to_the_one_drawn_first(policy):
    assert chosen(policy, request_of(), view_of([4, 4, 4], random=Draws([0.3, 0.1, 0.2]))) == 1
    assert chosen(policy, request_of(), view_of([4, 4, 4], random=Draws([0.3, 0.2, 0.1]))) == 2


def test_a_single_endpoint_is_chosen(policy):
    assert chosen(policy, request_of(), view_of([9])) == 0


def test_the_busiest_is_never_chosen_and_equal_ones_share(policy):
    view = view_of([5, 1, 1, 1], random=1)
    counts = Counter(chosen(policy, request_of(), view) for _ in range(600))
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) > 150
