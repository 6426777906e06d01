"""The emulator's canonical prompts, answers and request checks."""

import pytest
from headway_sim.emulator.requests import BadRequestError, decode_body, parse_chat, parse_completion
from headway_sim.emulator.text import render_chat
from headway_sim.filler import filler_text
from hypothesis import given
from hypothesis import strategies as st

MODELS = ("m",)


def chat(**more):
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], **more}


def test_the_next_turn_s_prompt_starts_with_this_one_and_its_answer():
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hällo"}]
    answer = filler_text(7, 0, 20)
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    assert render_chat(second).startswith(render_chat(first) + answer.encode())


def test_parts_tools_and_images_are_part_of_the_prompt():
    def prompt(url, tools=None):
        parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
        return render_chat([{"role": "user", "content": parts}], tools)

    assert prompt("a") != prompt("b")
    assert prompt("a") == prompt("a")
    assert prompt("a", [{"x": 1, "y": 2}]) == prompt("a", [{"y": 2, "x": 1}]) != prompt("a")
    assert b"see" in prompt("a")


@given(st.integers(0, 2**64), st.integers(0, 40_000), st.integers(0, 300), st.integers(0, 300))
def test_an_answer_is_the_same_however_it_is_cut(seed, start, one, two):
    whole = filler_text(seed, start, start + one + two)
    assert whole == filler_text(seed, start, start + one) + filler_text(seed, start + one, start + one + two)
    assert len(whole.encode()) == 4 * (one + two)


def test_equal_prompts_of_one_model_share_keys_and_a_salt_parts_them():
    def keys(**more):
        body = chat(messages=[{"role": "user", "content": "x" * 300}], max_tokens=40, **more)
        return parse_chat(body, MODELS).for_engine("id").keys

    assert keys() == keys()
    assert len(keys()) == (len(b"<|user|>" + b"x" * 300 + b"\n<|assistant|>") + 160) // 64
    assert not set(keys()) & set(keys(cache_salt="tenant"))


def test_token_ids_count_as_they_are():
    request = parse_completion({"model": "m", "prompt": [1, 2, 3] * 16, "max_tokens": 1}, MODELS)
    assert request.prompt_tokens == 48
    assert len(request.for_engine("id").keys) == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "model"),
        ({"model": "m"}, "messages"),
        (chat(messages=[]), "messages"),
        (chat(messages=[{"content": "x"}]), "messages[0].role"),
        (chat(messages=[{"role": "user", "content": 1}]), "messages[0].content"),
        (chat(max_tokens=-1), "max_tokens"),
        (chat(max_tokens=True), "max_tokens"),
        (chat(max_completion_tokens=0), "max_completion_tokens"),
        (chat(n=2), "n"),
        (chat(stream="yes"), "stream"),
        (chat(stream_options={"include_usage": True}), "stream_options"),
        (chat(stream=True, stream_options={"include_usage": 1}), "include_usage"),
        (chat(cache_salt=""), "cache_salt"),
    ],
)
def test_a_bad_request_names_its_field(body, param):
    with pytest.raises(BadRequestError) as caught:
        parse_chat(body, MODELS)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("prompt", [None, "", [], [-1], [1 << 32], ["a", "b"], [1, "a"], [True], {}])
def test_a_bad_prompt_is_refused(prompt):
    with pytest.raises(BadRequestError) as caught:
        parse_completion({"model": "m", "prompt": prompt}, MODELS)
    assert caught.value.param == "prompt"


def test_an_unknown_model_is_not_found():
    with pytest.raises(BadRequestError) as caught:
        parse_chat(chat(model="other"), MODELS)
    assert caught.value.status == 404


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'"x"'])
def test_a_body_must_be_an_object(data):
    with pytest.raises(BadRequestError):
        decode_body(data)
