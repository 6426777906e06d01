"""deploy/nginx in Debian's nginx with njs, before engines, with a real scheduler: `make test-system`."""

import asyncio
import contextlib
import hashlib
import io
import json
import socket
import tempfile
from pathlib import Path

import aiohttp
import pytest
from fakes.faults import outcomes
from fakes.openai_engine import USAGE, WORDS, OpenAIEngine
from fakes.scheduler import serving
from fakes.standin import told
from fakes.waiting import eventually
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_scheduler.domain.desired import Credential, Model, Role, Tenant
from headway_scheduler.domain.report import Finished, FirstToken, Outcome, ServedBy
from headway_scheduler.http import HttpServer
from headway_scheduler.store.base import Write

DEPLOY = Path(__file__).parents[2] / "deploy" / "nginx"
TOKEN = "the-token-of-this-nginx"
WRITE = Write(principal="test", method="Test")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Grüße"}]}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}


class Plane:
    """nginx, two engines, and the scheduler between them."""

    def __init__(self, served, engines, http_server, url, session, agent, log):
        self.served, self.engines, self.http_server = served, engines, http_server
        self.url, self.session, self.agent, self.log = url, session, agent, log
        self.usage, self.ends = [], []
        served.scheduler.reporting.record_usage = lambda *used: self.usage.append(used)
        served.scheduler.ledger.on_end.append(lambda reservation, cause, _: self.ends.append(cause.value))

    def post(self, body=CHAT, path="/v1/chat/completions", **options):
        data, kind = io.BytesIO(json.dumps(body).encode()), {"Content-Type": "application/json"}
        return self.session.post(f"{self.url}{path}", data=data, headers=kind, **options)

    async def answer(self, body=CHAT):
        async with self.post(body) as answer:
            return answer.status, await answer.text(), answer.headers

    def seen(self):
        return [seen for engine in self.engines for seen in engine.seen]

    async def settled(self):
        scheduler = self.served.scheduler
        await eventually(lambda: not scheduler.ledger.reservations and not len(scheduler.dispatcher.holds))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def configuration(directory, port, scheduler, engines):
    """The file with what it says to CHANGE changed."""
    text = (DEPLOY / "nginx.conf").read_text()
    for before, after in {
        "pid /run/nginx-headway.pid": f"pid {directory}/pid",
        "error_log /var/log/nginx/headway.log": f"error_log {directory}/log",
        "js_path /etc/nginx/headway": f"js_path {DEPLOY}",
        "server 10.0.0.1:8000": f"server {engines[0]}",
        "server 10.0.0.2:8000": f"server {engines[1]}",
        "listen 8080": f"listen 127.0.0.1:{port}",
        "http://127.0.0.1:7071": f"http://127.0.0.1:{scheduler}",
        "worker_processes auto": "worker_processes 1",
    }.items():
        assert before in text, before
        text = text.replace(before, after)
    path = directory / "nginx.conf"
    path.write_text(text)
    return path


@contextlib.asynccontextmanager
async def nginx(directory, port, scheduler, engines):
    path = configuration(directory, port, scheduler, engines)
    log = directory / "log"
    process = await asyncio.create_subprocess_exec(
        "nginx", "-c", str(path), "-g", "daemon off;", env={"HEADWAY_TOKEN": TOKEN, "PATH": "/usr/sbin:/usr/bin:/bin"}
    )

    async def listens():
        assert process.returncode is None, log.read_text()
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return True
        return False

    try:
        await eventually(listens)
        yield log
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        print(log.read_text())


@pytest.fixture
async def plane(database_url):
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(database_url))
        digest = hashlib.sha256(TOKEN.encode()).digest()
        await served.store.create(Credential("nginx", Role.ROUTER, digest, tenants=("default",)), WRITE)
        await served.scheduler.refresh()
        engines = [await OpenAIEngine().start() for _ in range(2)]
        for engine in engines:
            stack.push_async_callback(engine.stop)
        agent = await served.agent("n", *[endpoint(engine) for engine in engines])
        http_server = HttpServer(served.scheduler)
        await http_server.start("127.0.0.1:0")
        stack.push_async_callback(http_server.stop)
        # Not pytest's tmp_path: nginx's workers are another user, who must read it.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hw-nginx-")))
        await asyncio.to_thread(directory.chmod, 0o755)
        port = free_port()
        addresses = [engine.address for engine in engines]
        log = await stack.enter_async_context(nginx(directory, port, http_server.port, addresses))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Plane(served, engines, http_server, f"http://127.0.0.1:{port}", session, agent, log)


def endpoint(of, **fields):
    return tpb.EngineEndpoint(address=of.address, models=["m"], ready=True, **fields)


async def test_an_answer_goes_through_and_its_usage_is_reported(plane):
    status, text, _ = await plane.answer()
    assert (status, json.loads(text)["usage"]) == (200, USAGE)
    await plane.settled()
    (seen,) = plane.seen()
    assert seen.raw == json.dumps(CHAT).encode(), "the client's own bytes"
    ((tenant, model, usage),) = plane.usage
    assert (tenant, model) == ("default", "m")
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (11, len(WORDS), 8)
    assert plane.ends == ["reported"]


async def test_a_stream_comes_as_it_is_made(plane):
    reports = told(plane.served.scheduler)
    for engine in plane.engines:
        engine.script.pause_after = 2
        engine.script.cut = 7
    async with plane.post(STREAM) as answer:
        first = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 10)
        assert first.startswith(b"data: "), "while the engine still waits"
        for engine in plane.engines:
            engine.script.resume.set()
        rest = (await answer.content.read()).decode()
    assert rest.endswith("data: [DONE]\n\n")
    assert all(word in rest or word in first.decode() for word in WORDS)
    await plane.settled()
    (finished,) = (each for each in reports if isinstance(each, Finished))
    assert finished.usage.completion_tokens == len(WORDS)
    ttft_ms = next((each.ttft_ms for each in reports if isinstance(each, FirstToken)), finished.ttft_ms)
    assert 0 <= ttft_ms <= finished.duration_ms


async def test_refusals_are_those_of_route(plane):
    status, text, headers = await plane.answer({**CHAT, "model": "nonsense"})
    assert (status, headers["x-headway-reason"]) == (404, "UNKNOWN_MODEL")
    assert json.loads(text)["error"]["code"] == "model_not_found"
    status, _, headers = await plane.answer({"messages": []})
    assert (status, headers["x-headway-reason"]) == (400, "INVALID_FIELD")
    for wrong in (b"{", b"null", b'{"model": "m", "messages": [null]}', b'{"model": {"toString": 1}, "messages": []}'):
        async with plane.session.post(f"{plane.url}/v1/chat/completions", data=wrong) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (400, "invalid_request_error")
    await plane.agent.hello()
    await eventually(lambda: not plane.served.scheduler.fleet.endpoints)
    status, _, headers = await plane.answer()
    assert (status, headers["x-headway-reason"]) == (503, "NO_ENDPOINTS")
    assert not plane.seen()


async def test_what_is_held_is_answered_when_there_is_room(plane):
    await plane.served.bind("gpu_aware")
    await fill(plane, 0.99)
    call = asyncio.create_task(plane.answer())
    await eventually(lambda: len(plane.served.scheduler.dispatcher.holds) == 1)
    await fill(plane, 0.1)
    assert (await call)[0] == 200
    await plane.settled()


async def test_a_client_that_leaves_while_it_is_held_gives_back_what_it_got(plane):
    await plane.served.bind("gpu_aware")
    await fill(plane, 0.99)
    call = asyncio.create_task(plane.answer())
    await eventually(lambda: len(plane.served.scheduler.dispatcher.holds) == 1)
    call.cancel()
    await asyncio.wait([call])
    await fill(plane, 0.1)
    await eventually(lambda: plane.ends == ["reported"])
    await plane.settled()
    assert not plane.usage


async def fill(plane, use):
    full = tpb.Measurement(value=use)
    await plane.agent.sample(*[tpb.EngineSample(address=e.address, kv_use=full, ready=True) for e in plane.engines])


async def test_an_engine_that_refuses_is_passed_over_and_who_served_is_told(plane):
    await plane.engines[0].stop()
    reports = told(plane.served.scheduler)
    for _ in range(4):
        assert (await plane.answer())[0] == 200
    await plane.settled()
    assert len(plane.engines[1].seen) == 4
    told_where = [each for each in reports if isinstance(each, ServedBy)]
    assert told_where, "the ones that were chosen for the dead engine are counted where they were served"
    assert plane.ends == ["reported"] * 4


async def test_a_client_that_leaves_after_the_end_had_its_answer(plane):
    for engine in plane.engines:
        engine.script.linger = True
    async with plane.post(STREAM) as answer:
        await asyncio.wait_for(answer.content.readuntil(b"data: [DONE]\n\n"), 10)
    await plane.settled()
    assert [usage.completion_tokens for _, _, usage in plane.usage] == [len(WORDS)]


async def test_a_client_that_leaves_in_the_middle_ends_its_reservation(plane):
    for engine in plane.engines:
        engine.script.pause_after = 2
    async with plane.post(STREAM) as answer:
        await answer.content.readany()
        assert len(plane.served.reservations) == 1
    await plane.settled()
    assert plane.ends == ["reported"]
    assert not plane.usage
    await eventually(lambda: sum(engine.aborted for engine in plane.engines) == 1)


@pytest.mark.parametrize("status", [400, 500])
async def test_an_engines_own_error_is_passed_on(plane, status):
    for engine in plane.engines:
        engine.script.status = status
    assert (await plane.answer())[0] == status
    await plane.settled()
    assert outcomes(plane.served.scheduler.fleet) == ([True] if status == 500 else []), (
        "a 4xx says nothing of the engine"
    )
    assert Outcome.SERVER_ERROR.is_endpoints_fault
    assert len(plane.seen()) == 1, "it is not tried again"


async def test_an_alias_and_a_salt_change_the_body_and_nothing_else(plane):
    await plane.served.store.update(Model("m", aliases=("nick",)), WRITE)
    await plane.served.store.create(Tenant("rival"), WRITE)
    await plane.served.scheduler.refresh()
    await plane.agent.hello(*[endpoint(engine, engine="vllm") for engine in plane.engines])
    fleet = plane.served.scheduler.fleet
    await eventually(lambda: all(each.spec.engine == "vllm" for each in fleet.endpoints.values()))
    body = {**STREAM, "model": "nick", "seed": 1}
    assert (await plane.answer(body))[0] == 200
    (seen,) = plane.seen()
    assert len(seen.body.pop("cache_salt")) == 32
    assert seen.body == {**body, "model": "m"}
    await plane.settled()


async def test_a_400_kb_prompt_and_an_image_go_through(plane):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    for content in ("ü" * 200_000, [{"type": "text", "text": "what is it?"}, image]):
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        assert (await plane.answer(body))[0] == 200
        assert plane.seen()[-1].body == body or plane.seen()[0].body == body
    await plane.settled()


async def test_while_the_scheduler_is_away_the_fallback_serves(plane):
    await plane.http_server.stop()
    for _ in range(4):
        assert (await plane.answer(STREAM))[0] == 200
    assert all(engine.seen for engine in plane.engines)
    assert not plane.served.reservations
    await plane.engines[0].stop()
    for _ in range(2):
        assert (await plane.answer())[0] == 200


async def test_a_scheduler_that_goes_away_is_no_refusal(plane):
    plane.served.scheduler.drain()
    assert (await plane.answer())[0] == 200


async def test_models_are_asked_of_an_engine(plane):
    async with plane.session.get(f"{plane.url}/v1/models") as answer:
        assert answer.status == 404, "the fake engine's own answer"
    assert not plane.served.scheduler.dispatcher.routes
