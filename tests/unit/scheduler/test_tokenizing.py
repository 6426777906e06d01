"""Text prompts as the models' own tokenizers see them."""

from dataclasses import replace

import numpy as np
import pytest
import structlog
from fakes import tokenizer as words
from fakes.rig import Rig, desired_state
from headway.routing.v1 import routing_pb2 as pb
from headway_scheduler.config import ConfigError, load
from headway_scheduler.domain.desired import Model
from headway_scheduler.domain.request import TextPrompt
from headway_scheduler.domain.telemetry import KvEvents
from headway_scheduler.errors import InvalidField
from headway_scheduler.index.kv import KvPrompt, kv_root
from headway_scheduler.rpc.convert.routing import canonical_chat
from headway_scheduler.tokenizing import Tokenizers

CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TEXT = " ".join(f"w{n % 50}" for n in range(600))


def tokenizers(folder, name="t.json"):
    found = Tokenizers(folder)
    found.set_models([Model("m", tokenizer=name), Model("none")])
    return found


def ids(found):
    return np.frombuffer(found.data, "<u4").tolist()


def chat(*messages, tools="", name=""):
    told = [pb.ChatMessage(role=role, content=content, name=name) for role, content in messages]
    return TextPrompt(canonical_chat(pb.ChatPrompt(messages=told, tools=tools)), chat=True)


def test_a_text_is_what_the_tokenizer_makes_of_it(tmp_path):
    made = words.make(tmp_path / "t.json")
    found = tokenizers(tmp_path).ids("m", TextPrompt(TEXT.encode()))
    assert ids(found) == made.encode(TEXT).ids
    assert ids(found)[0] == 1, "with the beginning that the tokenizer adds"


def test_a_folder_holds_its_tokenizer_json(tmp_path):
    words.make(tmp_path / "llama" / "tokenizer.json")
    assert tokenizers(tmp_path, "llama").ids("m", TextPrompt(b"w1")) is not None


@pytest.mark.parametrize(
    ("markers", "rendered"),
    [
        (CHATML, "<|im_start|>user\n w1 <|im_end|>\n<|im_start|>assistant\nw2<|im_end|>\n<|im_start|>assistant\n"),
        (
            LLAMA,
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nw1<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nw2<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_a_chat_is_written_as_its_family_does(tmp_path, markers, rendered):
    made = words.make(tmp_path / "t.json", *markers)
    found = tokenizers(tmp_path).ids("m", chat(("user", " w1 "), ("assistant", "w2")))
    assert ids(found) == made.encode(rendered, add_special_tokens=False).ids
    assert found.chat


@pytest.mark.parametrize(
    "prompt",
    [chat(("user", "w1"), tools="[]"), chat(("user", "w1"), name="ann")],
    ids=["tools", "names"],
)
def test_what_models_write_each_in_its_way_is_left_alone(tmp_path, prompt):
    words.make(tmp_path / "t.json", *CHATML)
    assert tokenizers(tmp_path).ids("m", prompt) is None


def test_no_template_no_tokenizer_no_folder(tmp_path):
    words.make(tmp_path / "t.json")
    found = tokenizers(tmp_path)
    assert found.ids("m", chat(("user", "w1"))) is None
    assert found.ids("none", TextPrompt(b"w1")) is None
    assert Tokenizers().ids("m", TextPrompt(b"w1")) is None


def test_of_a_long_text_only_the_beginning_is_tokenised(tmp_path):
    made = words.make(tmp_path / "t.json")
    text = TEXT * 100
    found = tokenizers(tmp_path).ids("m", TextPrompt(text.encode()))
    assert not found.whole
    assert ids(found) == made.encode(text).ids[: len(ids(found))]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent.json", "no file"),
        ("../secret.json", "outside"),
        ("bad.json", "no tokenizer"),
        ("/etc/passwd", "outside"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_names_the_field(tmp_path, name, told):
    folder = tmp_path / "tokenizers"
    words.make(folder / "t.json")
    (folder / "bad.json").write_text("{}")
    (tmp_path / "secret.json").write_text("{}")
    with pytest.raises(InvalidField, match=told) as refused:
        Tokenizers(folder).check(Model("m", tokenizer=name))
    assert refused.value.field == "model.tokenizer"
    with structlog.testing.capture_logs() as logs:
        assert tokenizers(folder, name).ids("m", TextPrompt(b"w1")) is None
    assert [entry["event"] for entry in logs] == ["tokenizer_not_loaded"]
    Tokenizers().check(Model("m", tokenizer=name))  # who does not tokenise does not mind


def test_a_folder_that_is_none_is_told_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_SCHEDULER_TOKENIZERS_DIR", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="tokenizers_dir: there is no folder"):
        load()


class Served(Rig):
    """One endpoint whose engine holds TEXT, and tells."""

    def __init__(self, folder, made):
        super().__init__(
            desired_state("prefix_match", models={"m": Model("m", tokenizer="t.json")}), tokenizers_dir=folder
        )
        self.scheduler.tokenizers.set_models(self.store.desired.models.values())
        self.endpoints(2, engine="vllm")
        data = np.array(made.encode(TEXT).ids, "<u4").tobytes()
        salt = self.scheduler.salts.of("tenant/default")
        self.keys = KvPrompt.of_ids(data, 99).keys(kv_root("", salt))
        for endpoint in self.fleet.endpoints.values():
            told = self.keys if endpoint.slot == 1 else []
            events = KvEvents(endpoint.id, 1, "tokens-xxh3-128", tuple(told), complete=True)
            self.scheduler.core.apply_kv_events(endpoint, events)

    def desire(self, **changes):
        """Without reading files in a thread, which no loop would wait for here."""
        self.store.desired = replace(self.store.desired, version=self.store.desired.version + 1, **changes)
        self.scheduler.core.set_desired(self.store.desired)


def test_a_text_goes_where_events_say_its_tokens_are(tmp_path):
    made = words.make(tmp_path / "t.json")
    one = Served(tmp_path, made)
    decision = one.route(text=TEXT)
    assert one.where(decision) == "2"
    assert (decision.why.matched_tokens, decision.why.prompt_tokens) == (512, 601), "counted, not estimated"
