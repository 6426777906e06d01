"""Reading bodies, and changing as little of them as possible."""

import json
from dataclasses import replace

import pytest
from headway.routing.v1 import routing_pb2 as pb
from headway_openai.body import forwarded_body, parse_body
from headway_openai.errors import ApiError

DEEP = b"[" * 100_000 + b"]" * 100_000


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], "model": "m", **fields}).encode()


def test_chat_becomes_messages_limits_and_tools() -> None:
    raw = chat(
        messages=[
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "text", "text": "this"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        ],
        max_tokens=5,
        max_completion_tokens=9,
        tools=[{"type": "function"}],
    )
    parsed = parse_body("chat/completions", raw)
    assert [(m.role, m.content) for m in parsed.route.chat.messages] == [
        ("system", "be kind"),
        ("user", "see this"),
        ("assistant", '[{"id": "1"}]'),
    ]
    assert parsed.route.chat.tools == '[{"type": "function"}]'
    assert parsed.route.max_tokens == 9
    assert not parsed.stream and not parsed.wants_usage


def test_images_stand_as_digests() -> None:
    def content(url: str) -> str:
        part = {"type": "image_url", "image_url": {"url": url}}
        raw = chat(messages=[{"role": "user", "content": [part, {"type": "text", "text": "!"}]}])
        return parse_body("chat/completions", raw).route.chat.messages[0].content

    one, same, other = content("data:a"), content("data:a"), content("data:b")
    assert one == same != other
    assert one.startswith("<image_url:") and one.endswith(">!") and "data:a" not in one


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", pb.RouteRequest(model="m", text="one")),
        (["one", "two"], pb.RouteRequest(model="m", text="one\ntwo")),
        ([1, 2], pb.RouteRequest(model="m", tokens=pb.TokenIds(ids=[1, 2]))),
        ([[1], [2, 3]], pb.RouteRequest(model="m", tokens=pb.TokenIds(ids=[1, 2, 3]))),
    ],
)
def test_completions_take_text_and_tokens(prompt: object, expected: pb.RouteRequest) -> None:
    raw = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert parse_body("completions", raw).route == expected


@pytest.mark.parametrize("before", [b" ", b"\r\n\t ", b" " * 100])
def test_space_in_an_array_means_nothing(before: bytes) -> None:
    def route(prompt: bytes) -> pb.RouteRequest:
        return parse_body("completions", b'{"model": "m", "prompt": ' + prompt.replace(b" ", before) + b"}").route

    assert route(b'[ "one", "two"]').text == "one\ntwo"
    assert list(route(b"[ 1, 2]").tokens.ids) == [1, 2]
    assert list(route(b"[ [1], [2]]").tokens.ids) == [1, 2]
    assert route(b"[ ]").WhichOneof("prompt") == "text"


def test_a_body_too_deep_to_be_changed_is_refused() -> None:
    read = replace(parse_body("chat/completions", chat()), raw=b'{"model": "m", "x": ' + DEEP + b"}")
    with pytest.raises(ApiError) as caught:
        forwarded_body(read, "other", "")
    assert caught.value.status == 400


def test_embeddings_are_short() -> None:
    parsed = parse_body("embeddings", b'{"model": "m", "input": ["a", "b"]}')
    assert (parsed.route.text, parsed.route.task_hint) == ("a\nb", pb.TASK_HINT_SHORT)


@pytest.mark.parametrize(
    ("api", "raw", "param"),
    [
        ("chat/completions", b'{"model": "m"}', "messages"),
        ("chat/completions", b'{"messages": []}', "messages"),
        ("chat/completions", chat(model=""), "model"),
        ("chat/completions", chat(model=7), "model"),
        ("chat/completions", chat(max_tokens=-1), "max_tokens"),
        ("chat/completions", chat(messages=[{"role": "user", "content": 1}]), "messages[0].content"),
        (
            "chat/completions",
            chat(messages=[{"role": "user", "content": [{"text": "x"}]}]),
            "messages[0].content[0]",
        ),
        ("completions", b'{"model": "m"}', "prompt"),
        ("completions", b'{"model": "m", "prompt": [1, -2]}', "prompt[1]"),
        ("completions", b'{"model": "m", "prompt": {"a": 1}}', "prompt"),
        ("embeddings", b'{"model": "m"}', "input"),
        ("chat/completions", b'{"model": "secret words', None),
        ("chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}', None),
        ("chat/completions", b"[]", None),
        ("chat/completions", b'{"model": "m", "x": ' + DEEP + b"}", None),
        ("completions", b'{"model": "m", "prompt": ' + DEEP + b"}", None),
        ("other", b'{"model": "m", "x": ' + DEEP + b"}", None),
        ("chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', None),
    ],
)
def test_what_is_wrong_is_named(api: str, raw: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(api, raw)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "secret" not in caught.value.message


def test_an_unchanged_body_is_forwarded_as_it_came() -> None:
    raw = b'{ "model":"m",  "messages":[{"role":"user","content":"a"}] }'
    assert forwarded_body(parse_body("chat/completions", raw), "m", "") is raw


def test_only_what_must_change_changes() -> None:
    raw = chat(stream=True, stream_options={"continuous_usage_stats": False}, seed=1.50, cache_salt="mine")
    changed = json.loads(forwarded_body(parse_body("chat/completions", raw), "full-name", "salt"))
    assert changed == {
        **json.loads(raw),
        "stream_options": {"continuous_usage_stats": False, "include_usage": True},
        "cache_salt": "salt",
        "model": "full-name",
    }


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {}])
def test_usage_is_asked_for_unless_the_client_did(options: object) -> None:
    parsed = parse_body("chat/completions", chat(stream=True, stream_options=options))
    assert json.loads(forwarded_body(parsed, "m", ""))["stream_options"] == {"include_usage": True}
    asked = parse_body("chat/completions", chat(stream=True, stream_options={"include_usage": True}))
    assert asked.wants_usage and forwarded_body(asked, "m", "") is asked.raw


def test_of_another_api_only_the_model_is_read() -> None:
    parsed = parse_body("other", b'{"input": {"any": "thing"}, "max_tokens": "?", "model": "m"}')
    assert (parsed.model, parsed.route, parsed.stream) == ("m", pb.RouteRequest(model="m"), False)
    with pytest.raises(ApiError) as refused:
        parse_body("other", b'{"input": 1}')
    assert refused.value.param == "model"


def test_what_changes_is_told_by_the_bodys_own_model_and_the_usage_can_be_left_alone() -> None:
    parsed = parse_body("chat/completions", chat(stream=True))
    parsed.route.model = "rewritten"
    assert forwarded_body(parsed, "m", "", include_usage=False) == parsed.raw
    assert json.loads(forwarded_body(parsed, "served", "", include_usage=False))["model"] == "served"
    assert "stream_options" not in json.loads(forwarded_body(parsed, "served", "", include_usage=False))


@pytest.mark.parametrize("end", ["", " ", "\r\n\t"])
@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"stream": True, "stream_options": {"x": 1}}, {"cache_salt": "theirs"}]
)
def test_additions_are_the_same_whether_the_body_is_read_again_or_not(fields: dict[str, object], end: str) -> None:
    raw = chat(**fields) + end.encode()
    found = json.loads(forwarded_body(parse_body("chat/completions", raw), "m", "ours"))
    expected = json.loads(raw) | {"cache_salt": "ours"}
    if "stream" in fields:
        expected["stream_options"] = {**expected.get("stream_options", {}), "include_usage": True}
    assert found == expected


def test_a_field_spelled_with_escapes_does_not_win() -> None:
    raw = b'{"messages":[{"role":"user","content":"hi"}],"cache\\u005fsalt":"theirs","model":"m"}'
    assert json.loads(raw)["cache_salt"] == "theirs"
    assert json.loads(forwarded_body(parse_body("chat/completions", raw), "m", "ours"))["cache_salt"] == "ours"
