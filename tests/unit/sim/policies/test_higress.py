from collections import Counter

import pytest
from fakes.views import Draws, chat, chosen, request_of, view_of
from headway_scheduler.domain.request import BlocksPrompt, TextPrompt, TokensPrompt
from headway_sim.policies.higress_least import HigressLeast
from headway_sim.policies.higress_prefix import HigressPrefix, HigressPrefixParameters

SYSTEM = ("system", "You help.")
FIRST = (SYSTEM, ("user", "one"))
SECOND = (*FIRST, ("assistant", "1"), ("user", "two"))
THIRD = (*SECOND, ("assistant", "2"), ("user", "three"))


@pytest.fixture
def policy():
    return HigressPrefix(HigressPrefixParameters())


def talk(*messages):
    return request_of(TextPrompt(chat(*messages)))


def blocks(*hashes):
    return request_of(BlocksPrompt("tokens-xxh3-128", hashes))


def test_least_takes_the_fewest_in_flight_counting_others_requests_too():
    least = HigressLeast(HigressLeast.parameters_type())
    assert chosen(least, request_of(), view_of([3, 2, 4])) == 1
    assert chosen(least, request_of(), view_of([3, 2, 4], external=[0.0, 2.0, 0.0])) == 0


def test_least_breaks_ties_at_random_and_no_other_way():
    least = HigressLeast(HigressLeast.parameters_type())
    view = view_of([1, 1, 1, 2], last_chosen=[1, 9, 5, 0], random=3)
    counts = Counter(chosen(least, request_of(), view) for _ in range(600))
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 150
    # The random part never outweighs one request.
    assert chosen(least, request_of(), view_of([1, 0], random=Draws([0.0, 0.999]))) == 1


def test_a_new_conversation_goes_to_the_least_loaded_ties_at_random(policy):
    assert chosen(policy, talk(*FIRST), view_of([2, 1, 2])) == 1
    view = view_of([0, 0, 0], random=Draws([0.9, 0.8, 0.1]))
    assert chosen(policy, talk(SYSTEM, ("user", "else")), view) == 2


def test_later_turns_follow_whatever_the_load(policy):
    assert chosen(policy, talk(*FIRST), view_of([2, 1, 2])) == 1
    assert chosen(policy, talk(*SECOND), view_of([0, 50, 0])) == 1
    assert chosen(policy, talk(*THIRD), view_of([0, 50, 0])) == 1


def test_a_shared_system_prompt_is_no_turn(policy):
    assert chosen(policy, talk(*FIRST), view_of([2, 1, 2])) == 1
    assert chosen(policy, talk(SYSTEM, ("user", "another")), view_of([0, 50, 2])) == 0


def test_the_longest_known_chain_decides(policy):
    assert chosen(policy, talk(*FIRST), view_of([0, 1, 1])) == 0
    # A branch that is not known past its first turn follows that one, and is recorded from there on.
    branch = (*FIRST, ("assistant", "other"), ("user", "branch"))
    assert chosen(policy, talk(*branch), view_of([9, 0, 0])) == 0
    # The first turn's host is gone: the second turn is recorded for a new host, the first one too.
    assert chosen(policy, talk(*SECOND), view_of([5, 4], slots=[1, 2])) == 1
    assert chosen(policy, talk(*THIRD), view_of([0, 0, 9])) == 2
    assert chosen(policy, talk(*FIRST), view_of([0, 0, 9])) == 2


def test_known_turns_keep_their_own_hosts(policy):
    assert chosen(policy, talk(*SECOND), view_of([1, 0, 1])) == 1
    # Endpoint 1 is out for a while, and the conversation's first turn is asked again by another.
    assert chosen(policy, talk(*FIRST), view_of([0, 1], slots=[0, 2])) == 0
    assert chosen(policy, talk(*THIRD), view_of([0, 9, 0])) == 1
    assert chosen(policy, talk(*FIRST), view_of([9, 0, 0])) == 0


def test_a_turn_is_forgotten_1800_seconds_after_its_last_use(policy):
    assert chosen(policy, talk(*FIRST), view_of([1, 0]), now=0.0) == 1
    assert chosen(policy, talk(*SECOND), view_of([0, 1]), now=1799.0) == 1
    assert chosen(policy, talk(*FIRST), view_of([0, 1]), now=3598.9) == 1
    assert chosen(policy, talk(*SECOND), view_of([0, 1]), now=3599.0) == 1  # by its first turn, used 0.1 s ago
    assert chosen(policy, talk(*FIRST), view_of([0, 1]), now=3599.0 + 1800.0) == 0


def test_the_time_to_live_can_be_set():
    policy = HigressPrefix(HigressPrefixParameters(ttl_s=10.0))
    assert chosen(policy, talk(*FIRST), view_of([1, 0]), now=0.0) == 1
    assert chosen(policy, talk(*FIRST), view_of([0, 1]), now=10.0) == 0


def test_block_hashes_follow_the_longest_earlier_prompt(policy):
    shared = tuple(range(8))
    assert chosen(policy, blocks(*shared, 100, 101, 102, 103), view_of([1, 0, 1])) == 1
    assert chosen(policy, blocks(*shared, 200, 201, 202, 203), view_of([1, 9, 0])) == 2  # extends nothing
    assert chosen(policy, blocks(*shared, 100, 101, 102, 103, 104), view_of([0, 9, 9])) == 1
    assert chosen(policy, blocks(*shared, 200, 201, 202, 203, 204, 205), view_of([0, 9, 9])) == 2


def test_the_end_of_an_earlier_prompt_lives_on_when_it_is_extended(policy):
    def branch(number):
        return blocks(*range(8), *range(number, number + 5))

    assert chosen(policy, blocks(*range(8)), view_of([1, 0]), now=0.0) == 1
    assert chosen(policy, branch(100), view_of([0, 9]), now=1000.0) == 1
    assert chosen(policy, branch(200), view_of([0, 9]), now=2000.0) == 1
    assert chosen(policy, branch(300), view_of([0, 9]), now=3800.0) == 0


def test_a_cut_last_block_does_not_hide_the_end(policy):
    # The trace's last block was cut: three of our blocks that no later prompt has.
    assert chosen(policy, blocks(*range(12), 900, 901, 902), view_of([1, 0])) == 1
    assert chosen(policy, blocks(*range(12), 100, 101, 102, 103), view_of([0, 9])) == 1
    assert chosen(policy, blocks(*range(11), 200, 201, 202, 203), view_of([0, 9])) == 0


def test_a_prompt_of_fewer_than_eight_blocks_attracts_nobody(policy):
    assert chosen(policy, blocks(*range(7)), view_of([1, 0])) == 1
    assert chosen(policy, blocks(*range(9)), view_of([0, 1])) == 0
    assert chosen(policy, blocks(*range(20, 28)), view_of([1, 0])) == 1
    assert chosen(policy, blocks(*range(20, 29)), view_of([0, 1])) == 1


def test_token_ids_and_plain_text_work_like_blocks(policy):
    ids = bytes(range(256)) * 2 * 9
    for whole, prompt in ((ids, TokensPrompt), (b"plain " * 1000, TextPrompt)):
        earlier, later = request_of(prompt(whole[:-512])), request_of(prompt(whole))
        assert chosen(policy, earlier, view_of([1, 0])) == 1
        assert chosen(policy, later, view_of([0, 1])) == 1


def test_a_request_without_prompt_is_least_request(policy):
    assert chosen(policy, request_of(), view_of([1, 0])) == 1
    assert chosen(policy, request_of(), view_of([0, 1])) == 0
