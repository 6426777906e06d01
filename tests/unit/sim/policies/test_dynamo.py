from collections import Counter

import pytest
from fakes.views import chosen, request_of, view_of
from headway_sim.policies.dynamo import Dynamo, DynamoParameters

ASK = request_of(tokens=160)


@pytest.fixture
def policy():
    return Dynamo(DynamoParameters())


def test_prefill_and_decode_blocks_are_added(policy):
    # Prefill (160 − 96)/16 = 4 and 160/16 = 10; decode 128/16 = 8 and 1: 12 against 11.
    assert chosen(policy, ASK, view_of([0, 0], hits=[96, 0], context_tokens=[128, 16])) == 1
    # One block less in decode there than above, and it is 10 against 11.
    assert chosen(policy, ASK, view_of([0, 0], hits=[96, 0], context_tokens=[96, 16])) == 0


def test_a_prompt_in_prefill_counts_as_prefill_and_as_active(policy):
    # 32 tokens queued are 2 + 2 blocks: as much as 64 tokens in decode, less than 65.
    assert chosen(policy, ASK, view_of([0, 0], queued_tokens=[32, 0], context_tokens=[0, 65])) == 0
    assert chosen(policy, ASK, view_of([0, 0], queued_tokens=[32, 0], context_tokens=[0, 48])) == 1


def test_overlap_counts_in_whole_blocks_and_no_more_than_the_prompt(policy):
    # 31 cached tokens are one block of credit, as 16 are: then it is a tie, drawn at random.
    view = view_of([0, 0], hits=[31, 16], random=1)
    assert len({chosen(policy, ASK, view) for _ in range(50)}) == 2
    assert chosen(policy, ASK, view_of([0, 0], hits=[32, 31])) == 0
    view = view_of([0, 0], hits=[512, 160], random=1)
    assert len({chosen(policy, ASK, view) for _ in range(50)}) == 2


def test_ties_are_drawn_whatever_is_in_flight(policy):
    view = view_of([5, 0, 0], context_tokens=[0, 0, 99], last_chosen=[2, 1, 0], random=6)
    counts = Counter(chosen(policy, ASK, view) for _ in range(400))
    assert set(counts) == {0, 1}
    assert min(counts.values()) > 140


def test_the_weight_and_the_block_can_be_set():
    heavy = Dynamo(DynamoParameters(overlap_weight=2.0))
    # 2·4 + 8 = 16 against 2·10 + 1 = 21.
    assert chosen(heavy, ASK, view_of([0, 0], hits=[96, 0], context_tokens=[128, 16])) == 0
    coarse = Dynamo(DynamoParameters(block_tokens=128))
    # No whole block cached: 160/128 each, and the context decides.
    assert chosen(coarse, ASK, view_of([0, 0], hits=[96, 0], context_tokens=[129, 128])) == 1
