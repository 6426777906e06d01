"""Watching streams whatever way they are cut."""

import json
from itertools import pairwise

from headway_openai.sse import EventStream, parse_usage
from hypothesis import given
from hypothesis import strategies as st

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def content(text: str) -> bytes:
    chunk = {"choices": [{"delta": {"content": text}}], "usage": None}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in pairwise(marks)]


@given(
    texts=st.lists(st.text(min_size=1), min_size=1, max_size=6),
    places=st.lists(st.integers(min_value=0, max_value=5000), max_size=40),
    strip=st.booleans(),
    crlf=st.booleans(),
)
def test_any_cut_gives_the_same(texts: list[str], places: list[int], strip: bool, crlf: bool) -> None:
    events = [ROLE, *(content(t) for t in texts), USAGE, DONE]
    expected = [e for e in events if not (strip and e is USAGE)]
    if crlf:
        events = [e.replace(b"\n", b"\r\n") for e in events]
        expected = [e.replace(b"\n", b"\r\n") for e in expected]
    stream = EventStream(strip_usage=strip)
    passed = b"".join(stream.feed(chunk) for chunk in cut(b"".join(events), places))
    assert passed == b"".join(expected)
    assert stream.done and stream.has_content and not stream.failed
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (3, 2)


def test_the_role_is_no_content() -> None:
    stream = EventStream(strip_usage=True)
    stream.feed(ROLE)
    assert not stream.has_content
    stream.feed(content("a") + content("b"))
    stream.feed(content("c"))
    assert (stream.has_content, stream.events) == (True, 3)


def test_half_an_event_is_kept_back() -> None:
    stream = EventStream(strip_usage=True)
    assert stream.feed(content("a") + content("b")[:20]) == content("a")
    assert stream.feed(content("b")[20:]) == content("b")


def test_what_only_looks_like_the_end_is_not() -> None:
    stream = EventStream(strip_usage=True)
    text = 'data: [DONE]\n\ndata: [DONE] "usage": {} data: {"error"'
    assert stream.feed(content(text)) == content(text)
    assert not stream.done and not stream.failed and stream.usage is None


def test_usage_on_a_chunk_with_content_is_read_and_passed_on() -> None:
    event = b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    stream = EventStream(strip_usage=True)
    assert stream.feed(event) == event
    assert stream.usage is not None and stream.usage.prompt_tokens == 1


def test_an_error_event_is_noticed() -> None:
    stream = EventStream(strip_usage=True)
    stream.feed(b'data: {"error": {"message": "oom"}}\n\n' + DONE)
    assert stream.failed and stream.done


def test_usage_of_a_whole_answer() -> None:
    usage = parse_usage(b'{"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}}')
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, None, 4)
    assert parse_usage(b"<html>") is None


def test_what_follows_the_last_whole_event_is_not_lost() -> None:
    events = EventStream(strip_usage=False)
    assert events.feed(content("a") + b'data: {"cho') == content("a")
    assert events.rest() == b'data: {"cho'
    assert events.rest() == b""
