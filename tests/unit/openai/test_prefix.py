"""Bodies cut anywhere."""

import contextlib
import json

import msgspec
import pytest
from headway_openai.body import parse_body
from headway_openai.errors import ApiError
from headway_openai.prefix import completed, parse_prefix
from hypothesis import given
from hypothesis import strategies as st

CHAT = {
    "messages": [
        {"role": "system", "content": 'Be "brief": {no, lists]} \\ '},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Grüße 👋 \u0007"}, {"type": "image_url", "image_url": {}}],
        },
        {"content": "then", "role": "user", "name": "x"},
    ],
    "max_tokens": 512,
    "temperature": 0.5,
    "stream": True,
    "stop": None,
    "model": "llama-8b",
}
ENCODED = [json.dumps(CHAT).encode(), json.dumps(CHAT, ensure_ascii=False, indent=1).encode()]


@pytest.mark.parametrize("raw", ENCODED, ids=["escaped", "utf-8"])
def test_a_prefix_of_any_length_becomes_json_and_tells_no_more_than_the_whole(raw):
    whole = parse_body("chat/completions", raw).route
    texts = [message.content for message in whole.chat.messages]
    for end in range(raw.index(b"{") + 1, len(raw) + 1):
        json.loads(completed(raw[:end]))
        route = parse_prefix("chat/completions", raw[:end])
        assert route.model in ("", "llama-8b")
        assert not route.HasField("max_tokens") or route.max_tokens == 512
        told = [message.content for message in route.chat.messages]
        for number, text in enumerate(told):
            assert texts[number].startswith(text.partition("<image_url")[0])
            assert number == len(told) - 1 or text == texts[number]
    assert parse_prefix("chat/completions", raw) == whole


def test_half_a_name_is_no_name():
    assert parse_prefix("chat/completions", b'{"model": "llama-8').model == ""
    assert parse_prefix("chat/completions", b'{"model": "llama-8b"').model == "llama-8b"
    assert not parse_prefix("completions", b'{"max_tokens": 51').HasField("max_tokens")


@pytest.mark.parametrize(
    ("api", "raw", "text", "tokens"),
    [
        ("completions", b'{"prompt": "once upon a ti', "once upon a ti", []),
        ("completions", b'{"prompt": ["one", "tw', "one\ntw", []),
        ("completions", b'{"prompt": [1, 2, 3', "", [1, 2]),
        ("embeddings", b'{"model": "m", "input": [[1, 2], [3', "", [1, 2]),
        ("completions", b'{"prompt": "caf\xc3', "caf", []),
        ("completions", b'{"prompt": "a\\', "a", []),
        ("completions", b'{"prompt": "a\\\\', "a\\", []),
        ("completions", b'{"prompt": "a\\u00', "a", []),
        ("completions", b'{"prompt": "a\\\\u00', "a\\u00", []),
        ("completions", b'{"prompt": "a\\ud83d', "a", []),
        ("completions", b'{"prompt": "a\\ud83d\\udc4', "a", []),
        ("completions", b'{"prompt": "a\\ud83d\\udc4b', "a👋", []),
        ("completions", b'{"prompt": "', "", []),
        ("other", b'{"model": "m", "x": "', "", []),
    ],
)
def test_where_it_is_cut(api, raw, text, tokens):
    route = parse_prefix(api, raw)
    assert (route.text, list(route.tokens.ids)) == (text, tokens)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello",
        b"[1, 2",
        b'{"messages": 3, ',
        b'{"model": {}, ',
        b"{]",
        b'{"a" 1, ',
        b"}",
        b'{"a": ' + b"[" * 100_000,
    ],
)
def test_what_can_become_no_body_is_refused(raw):
    with pytest.raises(ApiError) as refused:
        parse_prefix("chat/completions", raw)
    assert refused.value.status == 400


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["content", "text", "other", "m"]), VALUES), st.booleans(), st.data())
def test_any_object_cut_anywhere_is_json(value, ascii_only, data):
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "replace")
    end = data.draw(st.integers(1, len(raw)))
    json.loads(completed(raw[:end]))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(raw):
    with contextlib.suppress(ApiError):
        parse_prefix("chat/completions", b"{" + raw)
    with pytest.raises((msgspec.MsgspecError, UnicodeError)):
        msgspec.json.decode(completed(b"x" + raw))
