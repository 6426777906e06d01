import pytest
from fakes.views import chat, chosen, request_of, view_of
from headway_scheduler.domain.request import BlocksPrompt, TextPrompt
from headway_sim.policies.smetric import SMetric, SMetricParameters


@pytest.fixture
def policy():
    return SMetric(SMetricParameters())


def turn(tokens, session="s1"):
    return request_of(tokens=tokens, session_id=session)


def test_a_session_stays_where_more_than_half_of_it_is_cached(policy):
    assert chosen(policy, turn(1000), view_of([1, 0])) == 1
    assert chosen(policy, turn(1200), view_of([0, 9], hits=[0, 501])) == 1  # of 1000


def test_half_is_not_more_than_half(policy):
    chosen(policy, turn(1000), view_of([1, 0]))
    # 1200·1 against 700·10
    assert chosen(policy, turn(1200), view_of([0, 9], hits=[0, 500])) == 0


def test_it_waits_up_to_a_second_and_62_ms_per_thousand_tokens(policy):
    # 2000 tokens: 1000 + 125 ms. Own prefill 1000 ms for 1000 uncached tokens.
    chosen(policy, turn(1500), view_of([1, 0]))
    assert chosen(policy, turn(2000), view_of([0, 9], hits=[0, 1000], queued_ms=[0, 125])) == 1
    chosen(policy, turn(1500, "s2"), view_of([1, 0]))
    assert chosen(policy, turn(2000, "s2"), view_of([0, 9], hits=[0, 1000], queued_ms=[0, 126])) == 0


def test_otherwise_time_multiplied_by_load_decides(policy):
    # (100 + 1000)·(2 + 1) = 3300 against (700 + 1000)·(1 + 1) = 3400.
    assert chosen(policy, turn(1000), view_of([2, 1], queued_ms=[100, 700])) == 0
    assert chosen(policy, turn(1000, "s2"), view_of([2, 1], queued_ms=[100, 600])) == 1
    # An idle endpoint's load is 1, so its cache counts.
    assert chosen(policy, turn(1000, "s3"), view_of([0, 0], hits=[0, 300])) == 1


def test_a_new_session_does_not_stick_to_a_shared_system_prompt(policy):
    # 100·10 against 1000·0.9…: it pays to move; only sticking would choose 1.
    assert chosen(policy, turn(1000), view_of([0, 10], hits=[0, 900])) == 0


def test_the_last_prompt_is_what_the_session_could_hit(policy):
    chosen(policy, turn(1000), view_of([1, 0]))
    chosen(policy, turn(4000), view_of([1, 0]))
    assert chosen(policy, turn(4400), view_of([0, 99], hits=[0, 1999], tok_ms=[0.1, 0.1])) == 0
    chosen(policy, turn(4000), view_of([1, 0]))
    assert chosen(policy, turn(4400), view_of([0, 99], hits=[0, 2001], tok_ms=[0.1, 0.1])) == 1


def test_a_shorter_prompt_could_hit_no_more_than_itself(policy):
    chosen(policy, turn(4000), view_of([1, 0]))
    assert chosen(policy, turn(500), view_of([0, 9], hits=[0, 251])) == 1


def test_of_equal_hits_the_one_with_less_prefill(policy):
    chosen(policy, turn(1000), view_of([1, 0, 0]))
    view = view_of([0, 9, 9], hits=[0, 900, 900], queued_ms=[0, 300, 200])
    assert chosen(policy, turn(1000), view) == 2


def test_a_session_is_forgotten_after_its_time(policy):
    chosen(policy, turn(1000), view_of([1, 0]), now=0.0)
    sticky = {"hits": [0, 600]}
    assert chosen(policy, turn(1000), view_of([0, 9], **sticky), now=1799.0) == 1
    assert chosen(policy, turn(1000), view_of([0, 9], **sticky), now=3599.0) == 0


def test_without_a_name_the_session_is_the_longest_earlier_prompt(policy):
    def ask(*hashes):
        return request_of(BlocksPrompt("tokens-xxh3-128", hashes), tokens=128 * len(hashes))

    base = tuple(range(12))
    chosen(policy, ask(*base), view_of([1, 0]))
    # 256 uncached tokens at 99 + 1 in flight lose against 1792 · 1, unless it sticks.
    assert chosen(policy, ask(*base, 100, 101), view_of([0, 99], hits=[0, 1536])) == 1
    # Eight shared blocks extend nobody's prompt.
    assert chosen(policy, ask(*base[:8], 200, 201, 202, 203), view_of([0, 99], hits=[0, 1024])) == 0


def test_a_short_unmarked_prompt_makes_no_session(policy):
    def ask(count):
        return request_of(BlocksPrompt("tokens-xxh3-128", tuple(range(count))), tokens=128 * count)

    chosen(policy, ask(7), view_of([1, 0]))
    assert chosen(policy, ask(9), view_of([0, 99], hits=[0, 896])) == 0


def test_a_chat_without_a_name_is_known_by_its_turns(policy):
    def ask(tokens, *messages):
        return request_of(TextPrompt(chat(*messages)), tokens=tokens)

    first = (("system", "s"), ("user", "one"))
    chosen(policy, ask(100, *first), view_of([1, 0]))
    later = (*first, ("assistant", "1"), ("user", "two"))
    assert chosen(policy, ask(150, *later), view_of([0, 99], hits=[0, 100])) == 1
    assert chosen(policy, ask(150, ("system", "s"), ("user", "new")), view_of([0, 99], hits=[0, 100])) == 0


def test_without_prompt_and_name_there_is_no_session(policy):
    assert chosen(policy, request_of(tokens=10), view_of([1, 0])) == 1
    assert chosen(policy, request_of(tokens=10), view_of([0, 1], hits=[0, 6])) == 1  # 10·1 against 4·2
    assert chosen(policy, request_of(tokens=10), view_of([0, 2], hits=[0, 6])) == 0  # against 4·3


def test_an_endpoint_of_unknown_speed_has_a_cost(policy):
    assert chosen(policy, turn(100), view_of([0, 1], tok_ms=[float("nan"), 1.0])) == 0
