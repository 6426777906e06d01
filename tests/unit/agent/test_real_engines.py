"""What real engines said (docs/real-engines.md tells how it was recorded), read by the agent and the data planes."""

import json
from pathlib import Path

import aiohttp
import pytest
from fakes.engine import running_engine
from headway_agent.config import EngineSettings
from headway_agent.devices.base import MissingReason
from headway_agent.engines.base import EngineContext, EngineReading
from headway_agent.engines.catalog import ENGINES
from headway_agent.kv.blocks import BlockSet
from headway_agent.kv.events import Cleared, Removed, Stored, Tier, decode
from headway_agent.kv.hashing import bound, chained, root_of, token_bytes
from headway_openai.sse import EventStream

GOLDEN = Path(__file__).parents[2] / "golden"
VLLM, LLAMA_CPP = GOLDEN / "vllm-0.32", GOLDEN / "llama_cpp-11549"


async def look(kind, pages):
    async with running_engine() as engine, aiohttp.ClientSession() as session:
        engine.pages |= pages
        settings = EngineSettings(address=engine.address, engine=kind)
        return await ENGINES[kind](settings, EngineContext(session, lambda: 0.0)).read(5.0)


async def test_vllm_under_load():
    pages = {"/metrics": (VLLM / "metrics.txt").read_text(), "/version": {"version": "0.32.0"}}
    state = await look("vllm", pages)
    assert state.reading == EngineReading(
        ready=True, running=1.0, waiting=0.0, kv_use=0.007813453790745939, prefix_queries=378232.0, prefix_hits=233312.0
    )
    facts = state.facts
    assert (facts.block_size_tokens, facts.kv_capacity_tokens) == (32.0, 262_144.0)
    assert (facts.version, facts.boot_id) == ("0.32.0", "1796048731.590")


async def test_vllm_asleep_by_its_own_metric():
    """Not one made of the engine's state, but the real text with the value turned."""
    awake = 'sleep_state="awake"} 1.0'
    text = (VLLM / "metrics.txt").read_text()
    assert awake in text
    state = await look("vllm", {"/metrics": text.replace(awake, 'sleep_state="awake"} 0.0')})
    assert not state.reading.ready


async def test_llama_cpp_under_load():
    pages = {
        "/metrics": (LLAMA_CPP / "metrics.txt").read_text(),
        "/slots": json.loads((LLAMA_CPP / "slots.json").read_text()),
        "/props": {"total_slots": 2, "default_generation_settings": {"n_ctx": 8192}},
    }
    state = await look("llama_cpp", pages)
    assert state.reading == EngineReading(
        ready=True,
        running=2.0,
        waiting=0.0,
        kv_use=MissingReason.UNSUPPORTED,
        prefix_queries=4588.0,
        prefix_hits=2293.0,
    )
    assert (state.facts.max_num_seqs, state.facts.kv_capacity_tokens) == (2.0, 16_384.0)


def messages():
    """Sequence numbers and payloads, as the replay socket gave them."""
    lines = (VLLM / "kv_events.hex").read_text().split("\n")
    return [
        (int(number), bytes.fromhex(payload)) for number, _, payload in (line.partition(" ") for line in lines if line)
    ]


def test_vllm_s_kv_events_are_all_understood():
    batches = [decode(payload) for _, payload in messages()]
    events = [event for batch in batches for event in batch.events]
    assert [number for number, _ in messages()] == list(range(len(batches)))
    assert {batch.dp_rank for batch in batches} == {0}
    assert {type(event) for event in events} == {Stored, Removed, Cleared}
    stored = [event for event in events if isinstance(event, Stored)]
    assert {(event.block_size, event.tier, event.group, event.adapter) for event in stored} == {(32, Tier.GPU, 0, "")}
    assert all(len(event.token_ids) == 32 * len(event.hashes) for event in stored)
    salted = [event for event in stored if any(event.extras)]
    assert [event.extras[0] for event in salted] == [("salt-of-acme",)], "the salt is in the first block's keys alone"
    assert not any(any(event.extras[1:]) for event in salted)


def test_what_vllm_s_events_leave_is_what_its_cache_holds():
    blocks = BlockSet()
    for _, payload in messages():
        for event in decode(payload).events:
            blocks.apply(event)
            if isinstance(event, Stored) and event.parent is None:
                held = {own for _, own in blocks.held()}
                assert keys(event) <= held, "a prompt that was just stored"
    assert blocks.complete and not blocks.skipped, "the cache was cleared, and what came then is all there is"


def keys(event):
    found, content, root = set(), 0, root_of("", event.extras[0][0] if event.extras[0] else "")
    for start in range(0, len(event.token_ids) // 128 * 128, 128):
        content = chained(token_bytes(event.token_ids[start : start + 128]), content)
        found.add(bound(content, root))
    return found


@pytest.mark.parametrize(("engine", "cached"), [(VLLM, 0), (LLAMA_CPP, 8)])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_streams_are_understood_wherever_they_are_cut(engine, cached, size):
    whole = (engine / "chat.sse").read_bytes()
    events = EventStream(strip_usage=False)
    passed = b"".join(events.feed(whole[start : start + size]) for start in range(0, len(whole), size))
    assert passed + events.rest() == whole
    assert events.done and not events.failed
    assert events.usage.completion_tokens == 4
    assert events.usage.cached_tokens == cached
