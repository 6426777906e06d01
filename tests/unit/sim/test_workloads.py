"""The article's workload and the filler text it is made of."""

from itertools import pairwise

from headway_sim.filler import unique_text
from headway_sim.workloads import ArticleWorkload
from hypothesis import given
from hypothesis import strategies as st


def play(workload, session, answer="ok"):
    conversation = workload.conversation(session)
    turns = [next(conversation)]
    try:
        while True:
            turns.append(conversation.send(answer))
    except StopIteration:
        return turns


def test_the_article_s_numbers_are_the_defaults():
    workload = ArticleWorkload()
    assert (workload.sessions, workload.turns, workload.concurrency) == (60, 5, 20)
    assert workload.requests == 300
    assert len(list(workload.conversations())) == 60


def test_each_turn_resends_the_conversation_and_adds_200_tokens():
    turns = play(ArticleWorkload(), 3, answer="the answer")
    assert [len(turn.messages) for turn in turns] == [1, 3, 5, 7, 9]
    for earlier, later in pairwise(turns):
        assert later.messages[: len(earlier.messages)] == earlier.messages
        assert later.messages[len(earlier.messages)] == {"role": "assistant", "content": "the answer"}
    for turn in turns:
        assert turn.messages[-1]["role"] == "user"
        assert len(turn.messages[-1]["content"].encode()) == 4 * 200
        assert (turn.session_id, turn.output_tokens) == ("session-3", 800)


def test_sessions_differ_from_the_first_byte_on():
    workload = ArticleWorkload()
    first = [next(conversation).messages[0]["content"][0] for conversation in workload.conversations()]
    assert len(set(first)) == 60


def test_the_text_depends_on_the_seed_alone():
    assert play(ArticleWorkload(seed=1), 5) == play(ArticleWorkload(seed=1), 5)
    assert play(ArticleWorkload(seed=1), 5) != play(ArticleWorkload(seed=2), 5)


def test_a_shared_system_prompt_comes_first_for_all():
    workload = ArticleWorkload(shared_system_prompt_tokens=50)
    systems = {next(conversation).messages[0]["content"] for conversation in workload.conversations()}
    assert [len(system) for system in systems] == [200]


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(4, 200)), min_size=2, max_size=5))
def test_unique_texts_have_their_size_and_part_within_the_label(pairs):
    texts = [unique_text(serial, tokens) for serial, tokens in pairs]
    assert [len(text.encode()) for text in texts] == [4 * tokens for _, tokens in pairs]
    assert len({text[:16] for text in texts}) == len({serial for serial, _ in pairs})
