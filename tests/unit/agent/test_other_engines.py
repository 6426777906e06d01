"""Every engine's dialect against golden metrics, written from the engines' documented names."""

from pathlib import Path

import aiohttp
import pytest
from fakes.engine import running_engine
from headway_agent.config import EngineSettings, ProbeSettings
from headway_agent.devices.base import MissingReason
from headway_agent.engines.base import EngineContext, EngineReading
from headway_agent.engines.catalog import ENGINES
from headway_agent.engines.probe import Prober

GOLDEN = Path(__file__).parents[2] / "golden"
UNKNOWN = MissingReason.UNSUPPORTED
SCRAPED = sorted(set(ENGINES) - {"openai"})


def golden(name):
    return (GOLDEN / name).read_text()


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def engine():
    async with running_engine() as engine:
        yield engine


@pytest.fixture
def reader(engine, session):
    def make(kind, **settings):
        config = EngineSettings(address=engine.address, engine=kind, metrics_url=f"http://{engine.address}", **settings)
        return ENGINES[kind](config, EngineContext(session, lambda: 0.0))

    return make


@pytest.mark.parametrize(
    ("rank", "running", "waiting", "kv_use", "capacity"),
    [(0, 7.0, 2.0, 0.5, 160_000.0), (1, 3.0, 0.0, 0.25, 160_000.0), (None, 10.0, 2.0, 0.375, 320_000.0)],
)
async def test_sglang_and_its_ranks(engine, reader, rank, running, waiting, kv_use, capacity):
    engine.pages |= {
        "/metrics": golden("sglang/metrics.txt"),
        "/version": 404,
        "/server_info": {"version": "0.5.4", "max_running_requests": 128},
    }
    state = await reader("sglang", dp_rank=rank).read(5.0)
    assert state.reading == EngineReading(True, running, waiting, kv_use, 9000.0, 3000.0)
    facts = state.facts
    assert (facts.version, facts.max_num_seqs, facts.boot_id) == ("0.5.4", 128.0, "boot-0")
    assert (facts.block_size_tokens, facts.kv_capacity_tokens) == (16.0, capacity)


async def test_sglang_of_old_has_only_a_rate_of_hits(engine, reader):
    engine.pages |= {"/metrics": golden("sglang/old.txt"), "/get_server_info": {"version": "0.4.0"}}
    state = await reader("sglang").read(5.0)
    assert state.reading == EngineReading(True, 1.0, 4.0, 0.75, 100.0, UNKNOWN)
    assert (state.facts.version, state.facts.kv_capacity_tokens) == ("0.4.0", 50_000.0)
    assert state.facts.block_size_tokens is UNKNOWN


@pytest.mark.parametrize("page", ["/prometheus/metrics", "/metrics"])
@pytest.mark.parametrize("names", ["metrics", "colons"])
async def test_tensorrt_llm(engine, reader, page, names):
    engine.pages |= {"/metrics": 404, page: golden(f"tensorrt_llm/{names}.txt"), "/version": {"version": "1.1.0"}}
    one = reader("tensorrt_llm")
    state = await one.read(5.0)
    assert state.reading == EngineReading(True, 5.0, 1.0, 0.625)
    assert (state.facts.version, state.facts.kv_capacity_tokens) == ("1.1.0", UNKNOWN)
    engine.asked.clear()
    await one.read(5.0)
    assert [path for path in engine.asked if "metrics" in path] == [page], "which page answers stays known"


async def test_triton(engine, reader):
    engine.pages |= {
        "/metrics": golden("triton/metrics.txt"),
        "/v2": {"name": "triton", "version": "2.60.0"},
        "/v2/health/ready": "",
        "/v1/models": 404,
        "/v2/repository/index": [
            {"name": "ensemble", "version": "1", "state": "READY"},
            {"name": "broken", "version": "1", "state": "UNAVAILABLE"},
        ],
    }
    state = await reader("triton").read(5.0)
    assert state.reading == EngineReading(True, 6.0, 2.0, 0.4875)
    facts = state.facts
    assert (facts.models, facts.version, facts.max_num_seqs) == (("ensemble",), "2.60.0", 512.0)
    assert (facts.block_size_tokens, facts.kv_capacity_tokens) == (64.0, 128_000.0)
    engine.pages["/v2/health/ready"] = 400
    assert not (await reader("triton").read(5.0)).reading.ready


async def test_tritons_metrics_are_on_their_own_port_unless_configured(session):
    made = ENGINES["triton"](EngineSettings(address="[::1]:8000", engine="triton"), EngineContext(session, lambda: 0.0))
    assert made._metrics_http.settings.base_url == "http://[::1]:8002"


async def test_tgi(engine, reader):
    engine.pages |= {
        "/metrics": golden("tgi/metrics.txt"),
        "/v1/models": 404,
        "/info": {"version": "3.3.6", "model_id": "tiiuae/falcon-7b", "max_batch_total_tokens": 66_000},
    }
    state = await reader("tgi").read(5.0)
    assert state.reading == EngineReading(True, 9.0, 3.0)
    facts = state.facts
    assert (facts.models, facts.version, facts.kv_capacity_tokens) == (("tiiuae/falcon-7b",), "3.3.6", 66_000.0)


async def test_llama_cpp(engine, reader):
    engine.pages |= {
        "/metrics": golden("llama_cpp/metrics.txt"),
        "/props": {"total_slots": 4, "build_info": "b6700", "default_generation_settings": {"n_ctx": 4096}},
        "/slots": [{"id": 0, "n_ctx": 4096, "is_processing": True}, {"id": 1, "n_ctx": 4096, "is_processing": True}],
    }
    state = await reader("llama_cpp").read(5.0)
    assert state.reading == EngineReading(True, 2.0, 1.0, UNKNOWN), "slots that say not how full they are"
    facts = state.facts
    assert (facts.version, facts.max_num_seqs, facts.kv_capacity_tokens) == ("b6700", 4.0, 16_384.0)
    engine.pages["/slots"] = [{"n_ctx": 1000, "n_past": 250}, {"n_ctx": 1000, "n_past": 0}]
    assert (await reader("llama_cpp").read(5.0)).reading.kv_use == 0.125


async def test_llama_cpp_of_old(engine, reader):
    engine.pages["/metrics"] = golden("llama_cpp/old.txt")
    assert (await reader("llama_cpp").read(5.0)).reading == EngineReading(True, 1.0, 0.0, 0.125)
    assert "/slots" not in engine.asked, "the metrics said it all"


async def test_llama_cpp_without_metrics_still_has_its_slots(engine, reader):
    engine.pages |= {"/metrics": 501, "/slots": [{"is_processing": True}, {"is_processing": False}]}
    assert (await reader("llama_cpp").read(5.0)).reading == EngineReading(True, running=1.0)
    engine.pages["/slots"] = 501
    assert (await reader("llama_cpp").read(5.0)).reading == EngineReading(True)


@pytest.mark.parametrize("kind", SCRAPED)
async def test_what_an_engine_does_not_say_is_unknown_and_not_zero(engine, reader, kind):
    engine.pages |= {"/metrics": "other 1\n", "/info": {"model_id": "m"}, "/v2": {}, "/v2/health/ready": ""}
    state = await reader(kind).read(5.0)
    assert state.reading == EngineReading(ready=True)
    assert {state.facts.kv_capacity_tokens, state.facts.block_size_tokens, state.facts.max_num_seqs} == {UNKNOWN}


@pytest.mark.parametrize("kind", sorted(ENGINES))
async def test_no_answer_is_stale_and_not_ready(session, kind):
    settings = EngineSettings(address="127.0.0.1:1", engine=kind, models=["configured"])
    state = await ENGINES[kind](settings, EngineContext(session, lambda: 0.0)).read(5.0)
    assert state.reading == EngineReading.failed()
    assert state.facts.models == ("configured",)


@pytest.mark.parametrize(
    ("kind", "counter"),
    [
        ("sglang", "sglang:generation_tokens_total"),
        ("tensorrt_llm", "trtllm_request_success_total"),
        ("triton", "nv_inference_request_success"),
        ("tgi", "tgi_request_count"),
        ("llama_cpp", "llamacpp:tokens_predicted_total"),
    ],
)
async def test_counters_that_go_back_are_a_restart(engine, reader, kind, counter):
    one = reader(kind)
    engine.pages |= {"/info": {}, "/v2": {}, "/v2/health/ready": ""}
    boots = []
    for value in (5, 6, 1):
        engine.pages["/metrics"] = f"{counter} {value}\n"
        boots.append((await one.read(5.0)).facts.boot_id)
    assert boots == ["boot-0", "boot-0", "boot-1"]


async def test_an_engine_asleep_is_not_ready_and_has_lost_its_cache(engine, reader):
    one = reader("vllm")
    awake = golden("vllm/asleep.txt").replace('"awake"} 0.0', '"awake"} 1.0').replace('"discard_all"} 1.0', "")
    engine.pages["/metrics"] = awake
    before = await one.read(5.0)
    engine.pages["/metrics"] = golden("vllm/asleep.txt")
    asleep = await one.read(5.0)
    engine.pages["/metrics"] = awake
    after = await one.read(5.0)
    assert [s.reading.ready for s in (before, asleep, after)] == [True, False, True]
    boots = [s.facts.boot_id for s in (before, asleep, after)]
    assert boots[0] != boots[1] == boots[2], "it restarted once, for those who count its cache"


async def test_an_engine_without_the_metric_is_asked_whether_it_sleeps(engine, reader):
    one = reader("vllm")
    engine.pages |= {"/metrics": "process_start_time_seconds 1\n", "/is_sleeping": {"is_sleeping": True}}
    assert not (await one.read(5.0)).reading.ready
    engine.pages["/is_sleeping"] = {"is_sleeping": False}
    assert (await one.read(5.0)).reading.ready


async def test_an_engine_that_does_not_tell_is_not_asked_every_time(engine, reader):
    one = reader("vllm")
    for _ in range(5):
        assert (await one.read(5.0)).reading.ready
    assert engine.asked.count("/is_sleeping") <= 2


@pytest.mark.parametrize(
    ("kind", "pages"),
    [
        ("vllm", {"/metrics": "vllm/v1.txt"}),
        ("sglang", {"/metrics": "sglang/metrics.txt"}),
        ("tensorrt_llm", {"/metrics": 404, "/prometheus/metrics": "tensorrt_llm/metrics.txt"}),
        ("tgi", {"/metrics": "tgi/metrics.txt", "/v1/models": 404}),
        ("llama_cpp", {"/metrics": "llama_cpp/metrics.txt"}),
        ("llama_cpp", {"/metrics": 501, "/props": {}}),
        ("triton", {"/metrics": 404, "/v1/models": 404, "/v2/health/ready": ""}),
        ("openai", {"/metrics": "# nothing\n"}),
        (None, {"/v1/models": 404, "/metrics": "vllm/v1.txt"}),
    ],
)
async def test_the_prober_recognises_each(engine, session, kind, pages):
    engine.pages |= {
        path: golden(page) if isinstance(page, str) and page.endswith(".txt") else page for path, page in pages.items()
    }
    port = int(engine.address.rpartition(":")[2])
    found = await Prober(ProbeSettings(ports=[port]), session).find(set(), 5.0)
    assert [one.engine for one in found] == ([] if kind is None else [kind])
