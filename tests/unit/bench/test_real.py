"""The parts of `headway bench vllm` that need no engine; `make test-vllm` runs it with real ones."""

import itertools
import json
import subprocess
import sys
import time

import psutil
import pytest
from headway_bench.commands import bench_app
from headway_bench.real.model import write_model
from headway_bench.real.run import shortcomings
from headway_bench.real.sessions import LongSessions
from headway_scheduler.domain.desired import Model
from headway_scheduler.domain.request import TextPrompt
from headway_scheduler.tokenizing import Tokenizers
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return folder, write_model(folder / "tiny")


def test_the_model_is_whole_and_the_same_each_time(model, tmp_path):
    folder, tokenizer = model
    config = json.loads((folder / "tiny" / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    write_model(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tiny" / "tokenizer.json").read_bytes()


def test_the_scheduler_renders_its_chats_as_its_template_does(model):
    folder, tokenizer = model
    tokenizers = Tokenizers(folder)
    tokenizers.set_models([Model("tiny", tokenizer="tiny")])
    known = tokenizers.ids("tiny", TextPrompt(b"\x01user\x02\x03hello", chat=True))
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert known.data == b"".join(each.to_bytes(4, "little") for each in tokenizer.encode(rendered).ids)


def test_sessions_have_the_length_they_promise_and_share_nothing(model):
    _, tokenizer = model
    sessions = LongSessions(tokenizer, 3, sessions=2, turns=3, opening_tokens=1000, turn_tokens=50)
    texts = []
    for session in sessions.conversations():
        turns = [next(session)]
        turns += [session.send("an answer") for _ in range(2)]
        with pytest.raises(StopIteration):
            session.send("the last answer")
        assert [len(turn.messages) for turn in turns] == [1, 3, 5]
        assert all(later.messages[: len(turn.messages)] == turn.messages for turn, later in itertools.pairwise(turns))
        texts += [message["content"] for message in turns[-1].messages if message["role"] == "user"]
    assert [len(tokenizer.encode(text).ids) for text in texts] == [1000, 50, 50] * 2
    assert len({text[:20] for text in texts}) == len(texts)
    other = LongSessions(tokenizer, 4, sessions=2, turns=3, opening_tokens=1000)
    assert other.opening(0)[0]["content"][:20] not in {text[:20] for text in texts}


def measured(gain=3.0, ok=50, approximate=0, kv_events=4096):
    row = {"plane": "envoy", "index": "kv_events", "requests": 50, "ok": ok}
    rows = [{**row, "strategy": "round_robin"}, {**row, "strategy": "adaptive", "gain": gain}]
    known = {"approximate": approximate, "kv_events": kv_events, "of": 4096}
    return {"measurements": rows, "known_after_scheduler_restart": known}


def test_a_good_run_lacks_nothing():
    assert shortcomings(measured()) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gain": 2.4}, "envoy, kv_events, adaptive: round_robin's mean TTFT is only 2.4 times as long"),
        ({"gain": None}, "envoy, kv_events, adaptive: round_robin's mean TTFT is only None times as long"),
        ({"ok": 49}, "envoy, kv_events, adaptive: 1 of 50 requests were not answered"),
        ({"kv_events": 100}, "after a restart 100 of 4096 cached tokens were known from KV events"),
        ({"approximate": 7}, "after a restart 7 tokens were known, though nobody could tell"),
    ],
)
def test_what_a_run_lacks_is_told(changes, told):
    assert told in shortcomings(measured(**changes))


def test_an_interpreter_without_vllm_is_told_in_a_line(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    broken.chmod(0o755)
    result = CliRunner().invoke(bench_app, ["vllm", "--python", str(broken), "--engines", "1"])
    assert result.exit_code == 1
    assert "engine-0 ended with status 1" in result.output
    assert "no such module" in result.output
    assert "Traceback" not in result.output


def test_told_to_end_it_leaves_no_engine_behind(tmp_path):
    told = tmp_path / "pid"
    engine = tmp_path / "python"
    engine.write_text(f"#!/bin/sh\necho $$ >{told}.new\nmv {told}.new {told}\nexec sleep 600\n")
    engine.chmod(0o755)
    code = "from headway_bench.commands import bench_app; bench_app()"
    command = [sys.executable, "-c", code, "vllm", "--python", str(engine), "--engines", "1"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 60
        while not told.exists() and time.monotonic() < deadline and driver.poll() is None:
            time.sleep(0.02)
        assert psutil.pid_exists(int(told.read_text()))
        driver.terminate()
        output, _ = driver.communicate(timeout=60)
    finally:
        driver.kill()
        driver.wait()
    assert driver.returncode == 1
    assert "told to end" in output
    assert "Traceback" not in output
    assert not psutil.pid_exists(int(told.read_text()))
