"""Each trace format, read from a tiny file made here; and the prompts made from it."""

import gzip
import json

import pytest
from headway_sim.traces import (
    ChatPrompt,
    HashedPrompt,
    LengthPrompt,
    TextPrompt,
    TokenPrompt,
    TraceError,
    TraceFormat,
    TraceRequest,
    load_trace,
    render_prompt,
)
from hypothesis import given
from hypothesis import strategies as st

MOONCAKE = {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]}
SHAREGPT = {
    "input_toks": 3,
    "output_toks": 2,
    "arrival_time_ns": 5_000_000,
    "input_tok_ids": [7, 8, 9],
    "output_tok_ids": [1, 2],
}
PLAIN = {"timestamp": 10, "input": "hello", "output": "12345678", "session_id": "s"}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(path, *lines):
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_mooncake(tmp_path):
    path = write(tmp_path / "t.jsonl", MOONCAKE, {**MOONCAKE, "timestamp": 3500})
    first, second = load_trace(path)
    assert first == TraceRequest(0.0, HashedPrompt((0, 5), 600), 7)
    assert second.arrival_ms == 500.0


def test_azure_with_windows_line_ends(tmp_path):
    path = tmp_path / "t.csv"
    rows = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,0"]
    path.write_bytes("\r\n".join([AZURE, *rows]).encode())
    first, second = load_trace(path)
    assert first == TraceRequest(0.0, LengthPrompt(4808, 0), 10)
    assert second.arrival_ms == pytest.approx(52.0, abs=0.01)
    assert second.output_tokens == 1


def test_sharegpt_gzipped_and_out_of_order(tmp_path):
    later = {**SHAREGPT, "arrival_time_ns": 9_000_000}
    first, second = load_trace(write(tmp_path / "t.jsonl.gz", later, SHAREGPT))
    assert first == TraceRequest(0.0, TokenPrompt((7, 8, 9)), 2)
    assert second.arrival_ms == pytest.approx(4.0)


def test_plain_text_and_messages(tmp_path):
    chat = {"timestamp": 11.5, "messages": [{"role": "user", "content": "hi"}], "output_length": 9}
    first, second = load_trace(write(tmp_path / "t.jsonl", PLAIN, "", chat))
    assert first == TraceRequest(0.0, TextPrompt("hello"), 2, "s")
    assert second == TraceRequest(1.5, ChatPrompt(({"role": "user", "content": "hi"},)), 9)


def test_a_folder_is_one_trace(tmp_path):
    write(tmp_path / "a.csv", AZURE, "2023-11-16 18:00:01.0,100,1")
    write(tmp_path / "b.csv", AZURE, "2023-11-16 18:00:00.0,100,1")
    write(tmp_path / "c.jsonl", MOONCAKE)
    (tmp_path / "README.md").write_text("not a trace")
    trace = load_trace(tmp_path)
    assert [request.arrival_ms for request in trace] == [0.0, 0.0, 1000.0]
    lengths = [request for request in trace if isinstance(request.prompt, LengthPrompt)]
    assert len({render_prompt(request) for request in lengths}) == 2
    assert len(load_trace(tmp_path, limit=2)) == 2


def test_the_format_can_be_given(tmp_path):
    both = {**PLAIN, **MOONCAKE}
    path = write(tmp_path / "t.jsonl", both)
    assert isinstance(load_trace(path)[0].prompt, HashedPrompt)
    assert isinstance(load_trace(path, trace_format=TraceFormat.PLAIN)[0].prompt, TextPrompt)


@pytest.mark.parametrize(
    ("good", "bad", "field"),
    [
        (MOONCAKE, {**MOONCAKE, "hash_ids": [1]}, "hash_ids"),
        (MOONCAKE, {**MOONCAKE, "hash_ids": [0, -5]}, "hash_ids"),
        (MOONCAKE, {**MOONCAKE, "input_length": "600"}, "input_length"),
        (MOONCAKE, {**MOONCAKE, "output_length": 0}, "output_length"),
        (MOONCAKE, {**MOONCAKE, "timestamp": -1}, "timestamp"),
        (SHAREGPT, {**SHAREGPT, "input_tok_ids": []}, "input_tok_ids"),
        (SHAREGPT, {**SHAREGPT, "arrival_time_ns": None}, "arrival_time_ns"),
        (PLAIN, {**PLAIN, "input": ""}, "input"),
        (PLAIN, {**PLAIN, "messages": [{"content": "x"}]}, "messages"),
        (PLAIN, {**PLAIN, "output": 3}, "output"),
        (PLAIN, {"timestamp": 1, "input": "x"}, "output_length"),
        (PLAIN, {**PLAIN, "session_id": []}, "session_id"),
        (PLAIN, "{", None),
        (PLAIN, "[]", None),
        (AZURE, "2023-11-16 18:00:01.0,x,1", "ContextTokens"),
        (AZURE, "2023-11-16 18:00:01.0,0,1", "ContextTokens"),
        (AZURE, "2023-11-16 18:00:01.0,1,-1", "GeneratedTokens"),
        (AZURE, "yesterday,1,1", "TIMESTAMP"),
        (AZURE, "2023-11-16 18:00:01.0,1", None),
    ],
)
def test_a_bad_line_is_named(tmp_path, good, bad, field):
    path = write(tmp_path / "trace", good, bad)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, 2, field)
    assert str(caught.value).startswith(f"{path}:2: {field or ''}")


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(TraceError, match="holds no trace"):
        load_trace(tmp_path)
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match="unknown format"):
        load_trace(write(tmp_path / "odd.jsonl", {"a": 1}))
    with pytest.raises(TraceError, match="holds no request"):
        load_trace(write(tmp_path / "empty.csv", AZURE))
    with pytest.raises(TraceError, match="not valid JSON"):
        load_trace(write(tmp_path / "nothing.jsonl"))
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "torn.jsonl.gz")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "binary.jsonl")


def hashed(ids, tokens):
    return TraceRequest(0.0, HashedPrompt(tuple(ids), tokens), 1)


def test_a_hash_id_is_2048_bytes_and_the_last_is_cut():
    whole, cut = render_prompt(hashed([1, 2], 1024)), render_prompt(hashed([1, 2], 600))
    assert (len(whole), len(cut)) == (4096, 2400)
    assert whole.startswith(cut)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.sampled_from([0.05, 0.25, 1.0]),
)
def test_equal_hash_prefixes_are_equal_bytes_and_others_part_at_their_block(one, other, scale):
    texts = [render_prompt(hashed(ids, 512 * len(ids)), scale) for ids in (one, other)]
    block = len(render_prompt(hashed([1], 512), scale))
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    size = min(map(len, texts))
    common = next((i for i in range(size) if texts[0][i] != texts[1][i]), size)
    assert shared * block <= common < (shared + 1) * block


def test_scale_cuts_what_can_be_cut():
    def rendered(prompt):
        return render_prompt(TraceRequest(0.0, prompt, 1), 0.5)

    assert rendered(TextPrompt("abcdef")) == "abc"
    assert rendered(TokenPrompt((1, 2, 3, 4))) == [1, 2]
    assert len(rendered(LengthPrompt(100, 1))) == 200
    messages = ({"role": "user", "content": "hello"},)
    assert rendered(ChatPrompt(messages)) == list(messages)
    with pytest.raises(ValueError, match="scale"):
        render_prompt(TraceRequest(0.0, TextPrompt("a"), 1), 0.0)
