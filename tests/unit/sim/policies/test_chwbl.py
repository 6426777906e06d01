from collections import Counter

import numpy as np
import pytest
from fakes.views import chat, chosen, request_of, view_of
from headway_scheduler.domain.request import BlocksPrompt, TextPrompt, TokensPrompt
from headway_sim.policies.chwbl import Chwbl, ChwblParameters, key_of, ring_of


@pytest.fixture
def policy():
    return Chwbl(ChwblParameters())


def text(data):
    return request_of(TextPrompt(data))


def order_on_ring(request, view):
    """The endpoints in the order in which the ring offers them: each full one is passed over for the next."""
    policy, loads, order = Chwbl(ChwblParameters()), [0] * len(view), []
    while len(order) < len(view):
        order.append(chosen(policy, request, view_of(loads)))
        loads[order[-1]] = 10_000
    return order


def test_an_idle_fleet_gives_the_same_prefix_to_the_same_endpoint(policy):
    for number in range(20):
        prompt = f"{number:03}".encode() * 40
        first = chosen(policy, text(prompt), view_of([0, 0, 0, 0]))
        assert chosen(policy, text(prompt[:100] + b"another end"), view_of([0, 0, 0, 0])) == first


def test_prefixes_spread_over_all_endpoints(policy):
    counts = Counter(chosen(policy, text(f"{n} what".encode()), view_of([0] * 4)) for n in range(800))
    assert len(counts) == 4
    assert min(counts.values()) > 120


def test_the_bound_counts_the_request_itself(policy):
    # Four endpoints, total 31: (31 + 1)/4 · 1.25 = 10, so 9 may take one more and 10 may not.
    request = text(b"a prompt")
    first, second, *others = order_on_ring(request, view_of([0] * 4))
    loads = [0.0] * 4
    loads[first], loads[second], loads[others[0]], loads[others[1]] = 9, 9, 6, 7
    assert chosen(policy, request, view_of(loads)) == first
    loads[first], loads[others[0]] = 10, 5
    assert chosen(policy, request, view_of(loads)) == second
    loads[second], loads[others[0]] = 10, 4
    assert chosen(policy, request, view_of(loads)) == others[0]


def test_where_nobody_is_within_the_bound_the_first_on_the_ring_takes_it(policy):
    # (4 + 1)/4 · 1.25 = 1.56 < 2
    request = text(b"a prompt")
    first = order_on_ring(request, view_of([0] * 4))[0]
    assert chosen(policy, request, view_of([1, 1, 1, 1])) == first


def test_an_endpoint_that_joins_takes_keys_only_for_itself(policy):
    requests = [text(f"{n}".encode()) for n in range(200)]
    before = [chosen(policy, request, view_of([0] * 4)) for request in requests]
    after = [chosen(policy, request, view_of([0] * 5)) for request in requests]
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {4}
    assert 10 < len(moved) < 90


def test_the_choice_depends_on_the_endpoint_not_on_its_position(policy):
    for number in range(20):
        request = text(f"{number}".encode())
        slots = [3, 0, 2, 1]
        assert slots[chosen(policy, request, view_of([0] * 4, slots=slots))] == chosen(
            policy, request, view_of([0] * 4)
        )


def test_the_ring_has_every_endpoint_256_times_in_order_of_place():
    places, owners = ring_of(view_of([0] * 3).ring, 256)
    assert len(places) == 768
    assert (np.diff(places.astype(object)) > 0).all()
    assert np.bincount(owners).tolist() == [256, 256, 256]


def test_a_key_beyond_the_last_place_belongs_to_the_first():
    policy = Chwbl(ChwblParameters(virtual_nodes=1))
    owners = {chosen(policy, text(f"{n}".encode()), view_of([0] * 2)) for n in range(100)}
    assert owners == {0, 1}


def test_the_key_is_the_first_user_message_s_beginning():
    system = ("system", "s" * 300)
    assert key_of(text(chat(system, ("user", "hello"), ("assistant", "x"), ("user", "y"))), 100) == b"hello"
    assert key_of(text(chat(system, ("user", "u" * 150))), 100) == b"u" * 100
    assert key_of(text(chat(system)), 5) == chat(system)[:5]
    assert key_of(text(b"p" * 150), 100) == b"p" * 100


def test_the_key_of_other_prompts():
    ids = np.arange(40, dtype="<u4").tobytes()
    assert key_of(request_of(TokensPrompt(ids)), 100) == ids[:100]
    blocks = BlocksPrompt("tokens-xxh3-128", (7, 8))
    assert key_of(request_of(blocks), 100) == key_of(request_of(BlocksPrompt("tokens-xxh3-128", (7, 9))), 100)
    assert key_of(request_of(blocks), 100) != key_of(request_of(BlocksPrompt("tokens-xxh3-128", (6, 8))), 100)
    assert key_of(request_of(request_id="r7"), 100) == b"r7"
