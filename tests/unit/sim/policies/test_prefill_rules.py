"""LMetric, LPWL and Mooncake: what is queued there, and what this request adds."""

import numpy as np
import pytest
from fakes.views import chosen, request_of, view_of
from headway_sim.policies import PEERS

ASK = request_of(tokens=1000)
NAN = float("nan")


def policy(name):
    return PEERS[name](PEERS[name].parameters_type())


def test_lmetric_multiplies_prefill_by_requests():
    # (200 + 100)·(3 + 1) = 1200 against 1000·1: the idle one; at 2 in flight 900: the holder.
    assert chosen(policy("lmetric"), ASK, view_of([3, 0], hits=[900, 0], queued_tokens=[200, 0])) == 1
    assert chosen(policy("lmetric"), ASK, view_of([2, 0], hits=[900, 0], queued_tokens=[200, 0])) == 0
    cost = policy("lmetric").cost(ASK, view_of([3, 0], hits=[900, 0], queued_tokens=[200, 0]), 0.0).cost
    assert cost.tolist() == [1200.0, 1000.0]


def test_lmetric_sees_the_cache_of_an_idle_endpoint():
    assert chosen(policy("lmetric"), ASK, view_of([0, 0], hits=[0, 500])) == 1


def test_lpwl_adds_up_prefill_only():
    assert chosen(policy("lpwl"), ASK, view_of([50, 0], hits=[900, 0], queued_tokens=[899, 0])) == 0
    assert chosen(policy("lpwl"), ASK, view_of([50, 0], hits=[900, 0], queued_tokens=[901, 0])) == 1


def test_lpwl_breaks_ties_by_fewest_requests_then_rotates():
    tied = {"hits": [900, 0, 0], "queued_tokens": [900, 0, 0]}
    assert chosen(policy("lpwl"), ASK, view_of([3, 2, 4], **tied)) == 1
    assert chosen(policy("lpwl"), ASK, view_of([2, 2, 2], **tied, last_chosen=[3, 2, 1])) == 2


@pytest.mark.parametrize("name", ["lmetric", "lpwl", "mooncake"])
def test_a_hit_beyond_the_prompt_is_no_credit(name):
    view = view_of([1, 1], hits=[1100, 1000], queued_tokens=[1, 0], queued_ms=[1, 0])
    assert chosen(policy(name), ASK, view) == 1


def test_mooncake_adds_up_time_there():
    # 1000 tokens at 0.1 ms behind 950 ms are 1050 ms; at 1 ms and nothing queued 1000 ms.
    speed = {"tok_ms": [0.1, 1.0]}
    assert chosen(policy("mooncake"), ASK, view_of([0, 9], queued_ms=[950, 0], **speed)) == 1
    assert chosen(policy("mooncake"), ASK, view_of([9, 0], queued_ms=[850, 0], **speed)) == 0


def test_mooncake_prices_a_hit_by_the_endpoint_s_own_coefficients():
    # 0.5·400 + 0.001·400·(600 + 200) + 20·max(1, 400/100) = 200 + 320 + 80.
    speed = {"tok_ms": [0.5], "pair_ms": [0.001], "base_ms": [20.0], "budget_tokens": [100.0]}
    cost = policy("mooncake").cost(ASK, view_of([0], hits=[600], queued_ms=[7], **speed), 0.0).cost
    assert cost.tolist() == pytest.approx([607.0])


def test_mooncake_gives_an_endpoint_of_unknown_speed_the_mean_of_the_others():
    cost = policy("mooncake").cost(ASK, view_of([0, 0, 0], tok_ms=[1.0, NAN, 2.0]), 0.0).cost
    assert cost.tolist() == [1000.0, 1500.0, 2000.0]
    cost = policy("mooncake").cost(ASK, view_of([0, 0], hits=[0, 400], tok_ms=[NAN, NAN]), 0.0).cost
    assert np.array_equal(cost, [1000.0, 600.0])
