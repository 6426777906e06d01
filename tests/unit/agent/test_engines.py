"""Engine readers against a fake engine over real HTTP."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import aiohttp
import pytest
from fakes.engine import running_engine
from headway_agent.config import EngineSettings, ProbeSettings
from headway_agent.devices.base import MissingReason
from headway_agent.engines.base import EngineContext, EngineReading
from headway_agent.engines.catalog import ENGINES
from headway_agent.engines.probe import Prober

GOLDEN = Path(__file__).parents[2] / "golden" / "vllm"
UNSUPPORTED = MissingReason.UNSUPPORTED


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def engine():
    async with running_engine() as engine:
        yield engine


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def reader(engine, session, clock):
    def make(kind="vllm", **settings):
        config = EngineSettings(address=engine.address, engine=kind, **settings)
        return ENGINES[kind](config, EngineContext(session, clock))

    return make


def golden(name):
    return (GOLDEN / name).read_text()


def test_the_catalogue_knows_every_engine_of_the_configuration():
    assert set(get_args(EngineSettings.model_fields["engine"].annotation)) == set(ENGINES)


async def test_vllm_today(engine, reader):
    engine.pages["/metrics"] = golden("v1.txt")
    engine.serves("meta-llama/Llama-3.1-8B-Instruct", adapters=["sql"])
    state = await reader().read(5.0)
    assert state.reading == EngineReading(
        ready=True, running=12.0, waiting=3.0, kv_use=0.8125, prefix_queries=120000.0, prefix_hits=90000.0
    )
    assert state.facts.models == ("meta-llama/Llama-3.1-8B-Instruct",)
    assert state.facts.adapters == ("legal", "poet", "sql")
    assert (state.facts.block_size_tokens, state.facts.kv_capacity_tokens) == (16.0, 16.0 * 8812)
    assert (state.facts.version, state.facts.boot_id) == ("0.11.0", "1760000000.000")
    assert state.facts.max_num_seqs is UNSUPPORTED


async def test_vllm_of_old(engine, reader):
    engine.pages |= {"/metrics": golden("v0.txt"), "/version": 404}
    state = await reader(max_num_seqs=64).read(5.0)
    assert state.reading == EngineReading(
        ready=True, running=2.0, waiting=0.0, kv_use=0.25, prefix_queries=1000.0, prefix_hits=400.0
    )
    assert (state.facts.block_size_tokens, state.facts.kv_capacity_tokens) == (16.0, UNSUPPORTED)
    assert (state.facts.version, state.facts.max_num_seqs) == ("", 64.0)


async def test_an_absent_metric_is_unknown_and_not_zero(engine, reader):
    engine.pages["/metrics"] = "vllm:num_requests_running 0\nvllm:kv_cache_usage_perc NaN\n"
    reading = (await reader().read(5.0)).reading
    assert reading == EngineReading(ready=True, running=0.0)
    assert reading.waiting is UNSUPPORTED
    assert reading.kv_use is UNSUPPORTED


@pytest.mark.parametrize(
    ("rank", "running", "kv_use", "capacity"),
    [(0, 5.0, 0.25, 3200.0), (1, 9.0, 0.75, 3200.0), (None, 14.0, 0.5, 6400.0)],
)
async def test_ranks_of_one_server(engine, reader, rank, running, kv_use, capacity):
    engine.pages["/metrics"] = golden("two_ranks.txt")
    state = await reader(dp_rank=rank).read(5.0)
    assert (state.reading.running, state.reading.kv_use) == (running, kv_use)
    assert state.facts.kv_capacity_tokens == capacity


async def test_a_rank_that_the_server_does_not_have_is_unknown(engine, reader):
    engine.pages["/metrics"] = golden("two_ranks.txt")
    assert (await reader(dp_rank=7).read(5.0)).reading.running is UNSUPPORTED


async def test_a_single_rank_counts_whatever_it_calls_itself(engine, reader):
    engine.pages["/metrics"] = golden("v1.txt")
    assert (await reader(dp_rank=3).read(5.0)).reading.running == 12.0


@pytest.mark.parametrize(("kind", "page"), [("vllm", "/metrics"), ("openai", "/health")])
async def test_late_once_is_stale_and_as_ready_as_before_late_twice_is_not_ready(engine, reader, kind, page):
    engine.pages["/metrics"] = golden("v1.txt")
    one = reader(kind)
    before = await one.read(5.0)
    engine.hang.add(page)
    late = await one.read(0.1)
    assert late.reading == replace(EngineReading.failed(), ready=True)
    assert late.reading.running is MissingReason.STALE
    later = await one.read(0.1)
    assert later.reading == EngineReading.failed()
    assert before.facts == late.facts == later.facts, "what was known stays known"
    engine.hang.clear()
    assert (await one.read(5.0)).reading.ready
    engine.hang.add(page)
    assert (await one.read(0.1)).reading.ready, "it may be late again"


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_late_from_the_start_was_never_ready(engine, reader, kind):
    engine.hang |= {"/metrics", "/health"}
    assert (await reader(kind).read(0.1)).reading == EngineReading.failed()


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_a_broken_answer_is_not_late(engine, reader, kind):
    one = reader(kind)
    assert (await one.read(5.0)).reading.ready
    engine.pages |= {"/metrics": 500, "/health": 500}
    assert not (await one.read(5.0)).reading.ready


@pytest.mark.parametrize("broken", [{"/metrics": 500}, {"/health": 503}, {"/v1/models": 500}, {"/v1/models": "no"}])
async def test_a_broken_page_is_not_ready(engine, reader, broken):
    engine.pages |= broken
    assert not (await reader().read(5.0)).reading.ready


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_nobody_there(session, clock, kind):
    settings = EngineSettings(address="127.0.0.1:1", engine=kind, models=["configured"])
    state = await ENGINES[kind](settings, EngineContext(session, clock)).read(5.0)
    assert state.reading == EngineReading.failed()
    assert state.facts.models == ("configured",)


async def test_a_restart_shows_in_the_process_start(engine, reader):
    one = reader()
    boots = []
    for started in (100.0, 100.0, 200.5):
        engine.pages["/metrics"] = f"process_start_time_seconds {started}\nvllm:prompt_tokens_total 5\n"
        boots.append((await one.read(5.0)).facts.boot_id)
    assert boots == ["100.000", "100.000", "200.500"]


async def test_a_restart_shows_in_counters_that_go_back(engine, reader):
    one = reader()
    boots = []
    for tokens in (5, 70, 0, 3):
        engine.pages["/metrics"] = f"vllm:prompt_tokens_total {tokens}\n"
        boots.append((await one.read(5.0)).facts.boot_id)
    assert boots == ["boot-0", "boot-0", "boot-1", "boot-1"]


async def test_another_model_after_a_restart_is_seen_at_once(engine, reader):
    one = reader()
    engine.pages["/metrics"] = "process_start_time_seconds 1\n"
    assert (await one.read(5.0)).facts.models == ("m",)
    engine.pages["/metrics"] = "process_start_time_seconds 2\n"
    engine.serves("n")
    assert (await one.read(5.0)).facts.models == ("n",)


async def test_adapters_come_and_go(engine, reader, clock):
    one = reader()
    engine.serves("m", adapters=["a", "b"])
    assert (await one.read(5.0)).facts.adapters == ("a", "b")
    engine.serves("m", adapters=["b", "c"])
    assert (await one.read(5.0)).facts.adapters == ("a", "b")
    clock.now += 60
    assert (await one.read(5.0)).facts.adapters == ("b", "c")


async def test_models_are_not_asked_for_at_every_look(engine, reader):
    one = reader()
    for _ in range(5):
        await one.read(5.0)
    assert engine.asked.count("/v1/models") == 1
    assert engine.asked.count("/metrics") == 5


async def test_an_engine_that_wants_a_key_gets_it(engine, reader, tmp_path):
    (tmp_path / "key").write_text("s3cret\n")
    assert (await reader(api_key_file=tmp_path / "key").read(5.0)).reading.ready
    assert set(engine.keys) == {"Bearer s3cret"}


async def test_any_openai_server_is_alive_or_not_and_its_load_unknown(engine, reader, clock):
    engine.pages["/health"] = 404
    engine.serves("gpt", adapters=["tuned"])
    one = reader("openai")
    state = await one.read(5.0)
    assert state.reading == EngineReading(ready=True)
    assert (state.facts.models, state.facts.adapters) == (("gpt",), ("tuned",))
    engine.pages["/v1/models"] = 500
    assert not (await one.read(5.0)).reading.ready


async def test_probing_finds_engines_and_their_kind(engine, session):
    async with running_engine() as other:
        engine.pages["/metrics"] = golden("v1.txt")
        other.pages["/metrics"] = 404
        ports = [int(e.address.rpartition(":")[2]) for e in (engine, other)]
        prober = Prober(ProbeSettings(ports=[*ports, 1], advertise_host="10.0.0.7"), session)
        found = await prober.find(set(), 5.0)
        assert [(f.address, f.engine) for f in found] == [
            (f"10.0.0.7:{ports[0]}", "vllm"),
            (f"10.0.0.7:{ports[1]}", "openai"),
        ]
        assert await prober.find({f"http://127.0.0.1:{p}" for p in ports}, 5.0) == ()
