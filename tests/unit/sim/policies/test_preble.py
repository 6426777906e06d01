import pytest
from fakes.views import chosen, request_of, view_of
from headway_sim.policies.preble import Preble, PrebleParameters


@pytest.fixture
def policy():
    return Preble(PrebleParameters())


def ask(tokens=100):
    return request_of(tokens=tokens)


def give(policy, position, tokens, now=0.0):
    """Load an endpoint by a request that has no other one to go to."""
    assert chosen(policy, ask(tokens), view_of([0], slots=[position]), now) == 0


def test_it_explores_by_load_and_own_prefill(policy):
    give(policy, 0, 500)
    give(policy, 1, 470)
    # 500 + 60 against 470 + 100: 40 cached tokens are not more than 60 uncached ones.
    assert chosen(policy, ask(), view_of([0, 0], hits=[40, 0])) == 0
    # Now 560 + 60 against 470 + 100.
    assert chosen(policy, ask(), view_of([0, 0], hits=[40, 0])) == 1


def test_half_cached_explores_more_exploits(policy):
    give(policy, 0, 500)
    assert chosen(policy, ask(), view_of([0, 0], hits=[50, 0])) == 1  # 500 + 50 against 0 + 100
    assert chosen(policy, ask(), view_of([0, 0], hits=[51, 0])) == 0


def test_the_least_loaded_holder_of_the_longest_prefix_exploits(policy):
    give(policy, 0, 500)
    give(policy, 1, 300)
    assert chosen(policy, ask(), view_of([0, 0, 0], hits=[80, 80, 70])) == 1


def test_load_is_the_uncached_prefill_and_the_expected_decode(policy):
    # On 0: 20 ms of prefill and 45 steps of 2 ms are 110 ms; on 1: 111 ms of prefill, or 109.
    loaded = view_of([0], slots=[0], hits=[80], base_ms=[2.0], budget_tokens=[1e9])
    chosen(policy, ask(98), loaded)  # 18 tokens and one step of base
    give(policy, 1, 111)
    assert chosen(policy, ask(10), view_of([0, 0])) == 0
    policy = Preble(PrebleParameters())
    chosen(policy, ask(98), loaded)
    give(policy, 1, 109)
    assert chosen(policy, ask(10), view_of([0, 0])) == 1


def test_load_is_forgotten_after_the_window(policy):
    give(policy, 0, 500, now=0.0)
    give(policy, 1, 300, now=100.0)
    assert chosen(policy, ask(), view_of([0, 0]), now=179.9) == 1  # 500 against 300
    assert chosen(policy, ask(), view_of([0, 0]), now=180.0) == 0  # 0 against 400
    assert chosen(policy, ask(), view_of([0, 0]), now=500.0) == 0  # all forgotten: the core's ties


def test_equal_loads_are_fewest_in_flight_then_longest_not_chosen(policy):
    assert chosen(policy, ask(), view_of([2, 1, 2])) == 1
    policy = Preble(PrebleParameters())
    assert chosen(policy, ask(), view_of([1, 1, 1], last_chosen=[5, 4, 6])) == 1


def test_beyond_one_and_a_half_times_the_busiest_gives_to_the_least_loaded():
    def loaded(first):
        policy = Preble(PrebleParameters(rebalance_after=0))
        give(policy, 0, first)
        give(policy, 1, 1000)
        give(policy, 2, 1200)
        return policy

    holder = {"hits": [90, 0, 0]}
    assert chosen(loaded(1500), ask(), view_of([0, 0, 0], **holder)) == 0
    assert chosen(loaded(1501), ask(), view_of([0, 0, 0], **holder)) == 1
    # Not the busiest: it keeps its prefix.
    policy = loaded(1501)
    assert chosen(policy, ask(), view_of([0, 0, 0], hits=[0, 0, 90])) == 2


def test_load_is_moved_once_the_window_has_fifty_requests(policy):
    for _ in range(49):
        give(policy, 0, 100)
    assert chosen(policy, ask(), view_of([0, 0], hits=[90, 0])) == 0
    assert chosen(policy, ask(), view_of([0, 0], hits=[90, 0])) == 1


def test_a_prompt_of_unknown_length_and_speed_is_placed(policy):
    give(policy, 0, 500)
    assert chosen(policy, ask(0), view_of([0, 0])) == 1
    nan = float("nan")
    assert chosen(policy, ask(), view_of([0, 0], tok_ms=[nan, nan], base_ms=[nan, nan])) == 1
    # And leaves a load that is a number: 500 against 100.
    assert chosen(policy, ask(), view_of([0, 0])) == 1


def test_more_endpoints_may_come(policy):
    give(policy, 0, 500)
    assert chosen(policy, ask(), view_of([0, 0], slots=[0, 40])) == 1
    assert chosen(policy, ask(), view_of([0, 0], slots=[0, 40])) == 1
