"""What every peer must be, for the scheduler's core to run it."""

import numpy as np
import pytest
from fakes.views import chat, chosen, request_of, view_of
from headway_scheduler.domain.desired import StrategyConfig
from headway_scheduler.domain.request import BlocksPrompt, TextPrompt, TokensPrompt
from headway_scheduler.strategies.catalog import algorithms
from headway_scheduler.strategies.registry import StrategyRegistry
from headway_sim.policies import PEERS
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = [
    "round_robin",
    "random",
    "least_request",
    "power_of_two",
    "chwbl",
    "higress_least",
    "higress_prefix",
    "sglang",
    "aibrix",
    "llmd",
    "dynamo",
    "lmetric",
    "lpwl",
    "smetric",
    "preble",
    "mooncake",
]
PROMPTS = [
    None,
    TextPrompt(b""),
    TextPrompt(chat(("system", "s" * 900), ("user", "u"))),
    TokensPrompt(bytes(6000)),
    BlocksPrompt("tokens-xxh3-128", tuple(range(12))),
    BlocksPrompt("tokens-xxh3-128", ()),
]
MAYBE = st.one_of(st.just(float("nan")), st.floats(0.0, 1.0))


def build(name):
    return PEERS[name](PEERS[name].parameters_type())


def test_every_peer_of_the_table_is_there():
    assert list(PEERS) == NAMES
    for name, policy in PEERS.items():
        assert policy.name == name
        assert policy.guards == frozenset()


def test_the_scheduler_s_registry_can_build_them_all():
    registry = StrategyRegistry({**algorithms(), **PEERS}, timer=lambda: 0.0)
    for name in NAMES:
        registry.check(StrategyConfig(name, name, fallback_algorithm="round_robin"))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_state_has_a_price(name, data):
    count = data.draw(st.integers(1, 6))
    lists = lambda each: data.draw(st.lists(each, min_size=count, max_size=count))  # noqa: E731
    policy = build(name)
    for step in range(3):
        view = view_of(
            lists(st.integers(0, 300)),
            hits=lists(st.sampled_from([0, 128, 1500, 4000])),
            queued_tokens=lists(st.integers(0, 10_000)),
            queued_ms=lists(st.integers(0, 5_000)),
            context_tokens=lists(st.integers(0, 200_000)),
            waiting=lists(MAYBE),
            kv_use=lists(MAYBE),
            tok_ms=lists(MAYBE),
            random=step,
        )
        request = request_of(data.draw(st.sampled_from(PROMPTS)), tokens=data.draw(st.integers(0, 9000)))
        assert 0 <= chosen(policy, request, view, now=float(step)) < count


@pytest.mark.parametrize("name", NAMES)
def test_the_same_inputs_give_the_same_costs(name):
    request = request_of(PROMPTS[2], tokens=400, session_id="s")
    args = {"hits": [128, 0, 256], "queued_tokens": [0, 50, 0], "random": 7}
    first = build(name).cost(request, view_of([1, 2, 1], **args), 5.0).cost
    assert np.array_equal(first, build(name).cost(request, view_of([1, 2, 1], **args), 5.0).cost)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "chwbl"])
def test_ties_do_not_always_fall_to_the_same_endpoint(name):
    """Twelve new requests on four idle, equal endpoints; the last chosen rotates as the core's does."""
    policy, last_chosen, taken = build(name), [0, 0, 0, 0], set()
    random = np.random.default_rng(1)
    for number in range(1, 13):
        view = view_of([0] * 4, last_chosen=last_chosen, random=random)
        position = chosen(policy, request_of(tokens=100, session_id=f"s{number}"), view)
        last_chosen[position] = number
        taken.add(position)
    assert len(taken) >= 3
