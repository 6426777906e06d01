import pytest
from fakes.views import chat, request_of
from headway_scheduler.domain.request import BlocksPrompt, TextPrompt
from headway_scheduler.index.hashing import chain_of
from headway_sim.emulator.text import render_chat
from headway_sim.policies.turns import Ends, TurnMemory, first_user_bytes, turn_ends


def ends_of(*messages, tools=b""):
    return turn_ends(request_of(TextPrompt(tools + chat(*messages))))


def test_every_user_message_ends_a_turn_and_longer_chats_extend_shorter_ones():
    system, one, two = ("system", "s"), ("user", "1"), ("user", "2")
    first = ends_of(system, one)
    second = ends_of(system, one, ("assistant", "a"), two)
    assert first.marked
    assert [len(first.hashes), len(second.hashes)] == [1, 2]
    assert second.hashes[:1] == first.hashes
    assert ends_of(system, one, two).hashes[0] == first.hashes[0]
    assert ends_of(("system", "t"), one).hashes != first.hashes
    assert ends_of(system, one, ("assistant", "b"), two).hashes[1] != second.hashes[1]


def test_what_follows_the_last_user_message_is_a_turn_of_its_own():
    done = ends_of(("user", "1"), ("assistant", "a"))
    assert len(done.hashes) == 2
    assert done.hashes[:1] == ends_of(("user", "1")).hashes
    assert len(ends_of(("system", "s")).hashes) == 1


def test_tools_belong_to_the_first_turn():
    plain, tooled = ends_of(("user", "1")), ends_of(("user", "1"), tools=b"[{}]")
    assert len(tooled.hashes) == 1
    assert tooled.hashes != plain.hashes


def test_unmarked_prompts_end_at_blocks():
    blocks = request_of(BlocksPrompt("tokens-xxh3-128", (4, 5)))
    assert turn_ends(blocks) == Ends((4, 5), False)
    text = request_of(TextPrompt(b"x" * 600))
    assert turn_ends(text) == Ends(chain_of(text, 4.0, 4096).hashes, False)
    assert turn_ends(request_of()) == Ends([], False)


@pytest.mark.parametrize(
    ("count", "marked", "expected"),
    [
        (0, True, []),
        (1, True, [0]),
        (3, True, [2]),
        (0, False, []),
        (7, False, []),
        (8, False, [7]),
        (9, False, [7, 8]),
        (20, False, [16, 17, 18, 19]),
    ],
)
def test_a_prompt_s_own_end_tells_it_from_others(count, marked, expected):
    assert list(Ends(tuple(range(count)), marked).own(8)) == expected


def test_the_first_user_message_may_be_named_and_is_cut():
    assert first_user_bytes(b"\x01system\x02\x03sys\x01user\x02ann\x03hello\x01assistant\x02\x03x", 100) == b"hello"
    assert first_user_bytes(b"\x01user\x02\x03hello", 3) == b"hel"


def test_the_workloads_text_of_a_chat_is_cut_like_the_scheduler_s():
    def ends(*messages):
        rendered = render_chat([{"role": role, "content": content} for role, content in messages])
        return turn_ends(request_of(TextPrompt(rendered)))

    system, one, two = ("system", "s"), ("user", "1"), ("user", "2")
    first, second = ends(system, one), ends(system, one, ("assistant", "a"), two)
    assert first.marked
    assert [len(first.hashes), len(second.hashes)] == [1, 2]
    assert second.hashes[0] == first.hashes[0]
    assert ends(("system", "t"), one).hashes != first.hashes
    step = ends(system, one, ("assistant", "call"), ("tool", "result"))
    assert len(step.hashes) == 2
    assert step.hashes[0] == first.hashes[0]


def test_the_first_user_message_of_the_workloads_text():
    rendered = render_chat([{"role": "system", "content": "s" * 200}, {"role": "user", "content": "hello"}])
    assert first_user_bytes(rendered, 100) == b"hello\n"
    assert first_user_bytes(rendered, 3) == b"hel"


def test_memory_keeps_for_its_time_from_the_last_touch():
    memory = TurnMemory[str](10.0)
    memory.keep(1, "a", 0.0)
    memory.keep(2, "b", 5.0)
    memory.touch(1, 8.0)
    memory.expire(15.0)
    assert (memory.longest([1, 2, 3]), memory.longest([2, 3]), len(memory)) == (0, -1, 1)
    assert memory.get(1) == "a"
    memory.expire(18.0)
    assert len(memory) == 0
    with pytest.raises(KeyError):
        memory.touch(1, 18.0)


def test_longest_is_the_last_known():
    memory = TurnMemory[int](10.0)
    memory.keep(7, 0, 0.0)
    memory.keep(9, 0, 0.0)
    assert memory.longest([7, 8, 9, 10]) == 2
    assert memory.longest([]) == -1
