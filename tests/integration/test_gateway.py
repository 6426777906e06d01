"""The gateway between a scriptable scheduler and scriptable engines; every hop is a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from fakes.openai_engine import USAGE, WORDS, OpenAIEngine
from fakes.router import FakeRouter, Held, status_of
from fakes.waiting import eventually
from headway.routing.v1 import routing_pb2 as pb
from headway_gateway.app import Gateway
from headway_gateway.config import GatewaySettings

SECRET = "the-prompt-nobody-may-log"
KEY = "sk-acme"
CHAT = {"model": "m", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 64}


@dataclass
class Stack:
    """Everything that runs in a test."""

    gateway: Gateway
    router: FakeRouter
    engines: dict[str, OpenAIEngine]
    http: aiohttp.ClientSession

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.gateway.port}{path}"

    def post(self, body: dict[str, Any] | bytes, path: str = "/v1/chat/completions", **headers: str) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        sent.update({name.replace("_", "-"): value for name, value in headers.items()})
        return self.http.post(self.url(path), data=data, headers=sent)

    def get(self, path: str, key: str = KEY) -> Any:
        return self.http.get(self.url(path), headers={"Authorization": f"Bearer {key}"})

    def engine_of(self, held: Held) -> OpenAIEngine:
        return self.engines[held.endpoint.removeprefix("endpoints/").removesuffix("@0")]

    @property
    def seen(self) -> list[Any]:
        return [seen for engine in self.engines.values() for seen in engine.seen]

    async def settled(self, count: int = 1) -> list[Held]:
        """Wait until every reservation has ended."""
        await self.router.until(lambda: len(self.router.history) >= count and not self.router.live)
        return self.router.history


GOLDEN = Path(__file__).parents[1] / "golden"
Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as closers:

        async def make(count: int = 3, tenants: tuple[str, ...] = ("*",), **settings: Any) -> Stack:
            engines = [await OpenAIEngine().start() for _ in range(count)]
            router = FakeRouter([e.address for e in engines], tenants=tenants)
            await router.start()
            closers.push_async_callback(router.kill)
            for engine in engines:
                closers.push_async_callback(engine.stop)
            given: dict[str, Any] = {
                "port": 0,
                "schedulers": [router.target],
                "api_keys": {KEY: "acme", "sk-rival": "rival"},
                "fail_open_after_s": 0.4,
                "drain_timeout_s": 5.0,
                **settings,
            }
            gateway = await closers.enter_async_context(Gateway(GatewaySettings(**given)))
            http = await closers.enter_async_context(aiohttp.ClientSession())
            async with asyncio.timeout(10):
                await gateway.client.wait_connected()
            return Stack(gateway, router, {e.address: e for e in engines}, http)

        yield make


@pytest.fixture(autouse=True)
def no_prompt_in_logs(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Any:
    yield
    out, err = capfd.readouterr()
    logged = out + err + caplog.text
    assert SECRET not in logged
    assert "Grüße" not in logged
    assert KEY not in logged


def events_of(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def content_of(text: str) -> str:
    chunks = [json.loads(event) for event in events_of(text) if event != "[DONE]"]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c.get("choices"))


async def test_a_session_that_is_no_text_is_one_nevertheless(start: Start) -> None:
    stack = await start(count=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    body = json.dumps(CHAT).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-headway-session: s\xff\r\n")
    writer.write(f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()
    await stack.settled()
    assert [route.session_id for route in stack.router.requests] == ["s?"]


async def test_json_goes_through_and_is_settled(start: Start) -> None:
    stack = await start()
    async with stack.post(CHAT, x_request_id="req-1", x_headway_session="s-1") as answer:
        body = await answer.json()
    assert (answer.status, body["usage"]) == (200, USAGE)
    assert answer.headers["x-request-id"] == "req-1"
    [held] = await stack.settled()
    assert answer.headers["x-headway-endpoint"] == stack.engine_of(held).address
    assert "x-headway-strategy" not in answer.headers
    assert held.outcome == pb.OUTCOME_SUCCESS
    usage = held.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (11, 4, 8)
    [route] = stack.router.requests
    assert (route.tenant, route.session_id, route.model, route.max_tokens) == ("acme", "s-1", "m", 64)
    assert route.chat.messages[0].content == SECRET
    assert route.request_id.startswith("req-1/")
    [seen] = stack.seen
    assert seen.raw == json.dumps(CHAT).encode()
    assert seen.headers["x-request-id"] == "req-1"
    assert "authorization" not in seen.headers


async def test_request_ids_are_made_and_never_shared_by_reservations(start: Start) -> None:
    stack = await start()
    async with stack.post(CHAT) as answer:
        assert answer.headers["x-request-id"]
    for _ in range(2):
        async with stack.post(CHAT, x_request_id="same") as answer:
            await answer.read()
    ids = [r.request_id for r in stack.router.requests]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("cut", [0, 1, 7])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_streams_go_through_and_our_usage_is_taken_out(start: Start, cut: int, path: str) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.cut = cut
    ask = {**CHAT, "stream": True, "prompt": SECRET}
    async with stack.post(ask, path) as answer:
        text = await answer.text()
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = events_of(text)
    assert events[-1] == "[DONE]"
    assert not any("usage" in json.loads(e) for e in events[:-1])
    assert "".join(WORDS) in (
        content_of(text)
        if path.startswith("/v1/chat")
        else json.dumps("".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]), ensure_ascii=False)
    )
    [held] = await stack.settled()
    assert [r.WhichOneof("event") for r in held.events] == ["first_token", "finished"]
    assert held.events[0].first_token.ttft_ms > 0
    assert (held.outcome, held.finished.usage.cached_tokens) == (pb.OUTCOME_SUCCESS, 8)
    assert stack.seen[0].body["stream_options"] == {"include_usage": True}


async def test_who_asks_for_usage_gets_it(start: Start) -> None:
    stack = await start()
    ask = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with stack.post(ask) as answer:
        events = events_of(await answer.text())
    assert json.loads(events[-2])["usage"] == USAGE
    assert stack.seen[0].raw == json.dumps(ask).encode()


async def test_embeddings_are_routed(start: Start) -> None:
    stack = await start()
    async with stack.post({"model": "m", "input": [1, 2, 3]}, "/v1/embeddings") as answer:
        assert answer.status == 200
    assert list(stack.router.requests[0].tokens.ids) == [1, 2, 3]


async def test_salt_alias_and_headers_reach_the_engine(start: Start) -> None:
    stack = await start(debug_headers=True)
    stack.router.scene.cache_salt = "salt-1"
    stack.router.scene.aliases = {"m": "org/m-8b"}
    stack.router.scene.headers = {"x-data-parallel-rank": "3"}
    async with stack.post({**CHAT, "cache_salt": "my-own"}) as answer:
        assert answer.headers["x-headway-strategy"] == "strategies/round_robin"
    [seen] = stack.seen
    assert (seen.body["cache_salt"], seen.body["model"]) == ("salt-1", "org/m-8b")
    assert seen.headers["x-data-parallel-rank"] == "3"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_connection_goes_to_the_next_fallback(start: Start, stream: bool) -> None:
    stack = await start()
    first, *_ = stack.engines.values()
    stack.router.scene.first = first.address
    await first.stop()
    async with stack.post({**CHAT, "stream": stream}) as answer:
        await answer.read()
    assert (answer.status, answer.headers["x-headway-endpoint"] != first.address) == (200, True)
    [held] = await stack.settled()
    assert held.events[0].WhichOneof("event") == "served_by"
    assert held.outcome == pb.OUTCOME_SUCCESS
    assert stack.engine_of(held).address == answer.headers["x-headway-endpoint"]


async def test_a_5xx_goes_on_and_without_fallbacks_a_new_route_excludes_it(start: Start) -> None:
    stack = await start()
    first, *_ = stack.engines.values()
    stack.router.scene.first = first.address
    stack.router.scene.fallbacks = 0
    first.script.status = 503
    async with stack.post(CHAT) as answer:
        assert answer.status == 200
    failed, served = await stack.settled(2)
    assert (failed.outcome, failed.finished.http_status) == (pb.OUTCOME_SERVER_ERROR, 503)
    assert served.outcome == pb.OUTCOME_SUCCESS
    assert list(stack.router.requests[1].excluded_endpoints) == [f"endpoints/{first.address}@0"]


async def test_a_retry_beyond_the_schedulers_budget_is_the_failure_that_it_was(start: Start) -> None:
    stack = await start()
    first, *_ = stack.engines.values()
    stack.router.scene.first = first.address
    stack.router.scene.fallbacks = 0
    first.script.status = 500
    first.script.pause_before = True
    asking = asyncio.create_task(stack.post(CHAT).__aenter__())
    await first.paused.wait()
    stack.router.scene.refusal = status_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "RETRY_BUDGET", "too many", 1.0)
    first.script.resume.set()
    answer = await asking
    assert (answer.status, answer.headers["x-headway-reason"]) == (502, "ENGINE_FAILED")
    async with stack.http.get(stack.url("/metrics")) as metrics:
        assert "headway_gateway_retries_denied_total 1.0" in await metrics.text()
    [held] = await stack.settled()
    assert held.outcome == pb.OUTCOME_SERVER_ERROR


async def test_a_stream_that_breaks_before_its_first_byte_is_saved(start: Start) -> None:
    stack = await start()
    first, *_ = stack.engines.values()
    stack.router.scene.first = first.address
    first.script.die_after = 0
    async with stack.post({**CHAT, "stream": True}) as answer:
        text = await answer.text()
    assert content_of(text) == "".join(WORDS)
    [held] = await stack.settled()
    assert held.outcome == pb.OUTCOME_SUCCESS


async def test_when_all_fail_the_client_is_told_so(start: Start) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.status = 500
    async with stack.post(CHAT) as answer:
        body = await answer.json()
    # Every endpoint was tried, and the scheduler has no other.
    assert (answer.status, answer.headers["x-headway-reason"]) == (503, "NO_ENDPOINTS")
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(stack.seen) == 3
    assert not stack.router.live


async def test_the_retry_budget_ends_retries(start: Start) -> None:
    stack = await start(retry_ratio=0.0, retry_min=0)
    for engine in stack.engines.values():
        engine.script.status = 500
    async with stack.post(CHAT) as answer:
        assert (answer.status, answer.headers["x-headway-reason"]) == (502, "ENGINE_FAILED")
    assert len(stack.seen) == 1
    [held] = await stack.settled()
    assert held.outcome == pb.OUTCOME_SERVER_ERROR
    async with stack.get("/metrics") as answer:
        assert "headway_gateway_retries_denied_total 1.0" in await answer.text()


async def test_mid_stream_death_is_an_error_event_settled_on_what_was_delivered(start: Start) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.die_after = 3
    async with stack.post({**CHAT, "stream": True}) as answer:
        events = events_of(await answer.text())
    assert answer.status == 200
    assert json.loads(events[-1])["error"]["code"] == "engine_failed"
    assert "[DONE]" not in events
    [held] = await stack.settled()
    assert held.outcome == pb.OUTCOME_SERVER_ERROR
    assert (held.finished.usage.prompt_tokens, held.finished.usage.completion_tokens) == (7, 2)


async def test_a_body_that_breaks_off_is_a_bad_gateway(start: Start) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.die_after = 0
    async with stack.post(CHAT) as answer:
        body = await answer.json()
    assert (answer.status, body["error"]["code"]) == (502, "engine_failed")
    [held] = await stack.settled()
    assert held.outcome == pb.OUTCOME_SERVER_ERROR


async def test_an_engines_own_error_event_is_a_server_error(start: Start) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.error_event = True
    async with stack.post({**CHAT, "stream": True}) as answer:
        assert "inside" in await answer.text()
    [held] = await stack.settled()
    assert held.outcome == pb.OUTCOME_SERVER_ERROR


async def test_a_4xx_is_the_clients_own(start: Start) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.status = 422
    async with stack.post({**CHAT, "stream": True}) as answer:
        assert (answer.status, await answer.json()) == (422, {"error": {"message": "no"}})
    [held] = await stack.settled()
    assert (held.outcome, held.finished.http_status) == (pb.OUTCOME_CLIENT_ERROR, 422)
    assert len(stack.seen) == 1


async def test_a_silent_engine_times_out_and_is_not_tried_again(start: Start) -> None:
    stack = await start(read_timeout_s=0.1)
    for engine in stack.engines.values():
        engine.script.pause_before = True
    async with stack.post(CHAT) as answer:
        assert answer.status == 504
    [held] = await stack.settled()
    assert held.outcome == pb.OUTCOME_TIMEOUT
    await eventually(lambda: sum(e.aborted for e in stack.engines.values()) == 1)


async def test_a_client_that_leaves_cancels_the_engine_and_the_reservation(start: Start) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.pause_after = 3
    answer = await stack.post({**CHAT, "stream": True})
    await answer.content.readany()
    [held] = stack.router.history
    await asyncio.wait_for(stack.engine_of(held).paused.wait(), 10)
    answer.close()
    await stack.settled()
    assert (held.outcome, held.finished.usage.completion_tokens) == (pb.OUTCOME_CANCELLED, 2)
    await eventually(lambda: stack.engine_of(held).aborted == 1)


async def test_a_client_that_leaves_before_the_answer_cancels_too(start: Start) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.pause_before = True
    task = asyncio.ensure_future(stack.post(CHAT).__aenter__())
    await stack.router.until(lambda: stack.router.history)
    [held] = stack.router.history
    await asyncio.wait_for(stack.engine_of(held).paused.wait(), 10)
    task.cancel()
    await stack.settled()
    assert held.outcome == pb.OUTCOME_CANCELLED
    await eventually(lambda: stack.engine_of(held).aborted == 1)


async def test_a_client_that_leaves_while_held_gives_the_call_up(start: Start) -> None:
    stack = await start()
    stack.router.scene.hold = True
    task = asyncio.ensure_future(stack.post(CHAT).__aenter__())
    await stack.router.until(lambda: stack.router.requests)
    task.cancel()
    await stack.router.until(lambda: stack.router.cancels)
    assert not stack.router.history and not stack.seen


async def test_a_client_that_leaves_after_done_was_served(start: Start) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.linger = True
    answer = await stack.post({**CHAT, "stream": True})
    async for line in answer.content:
        if line == b"data: [DONE]\n":
            break
    answer.close()
    [held] = await stack.settled()
    assert (held.outcome, held.finished.usage.completion_tokens) == (pb.OUTCOME_SUCCESS, len(WORDS))


@pytest.mark.parametrize(
    ("code", "reason", "retry_after_s", "status", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "SATURATED", 2.2, 429, "rate_limit_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_TOKENS", 0.01, 429, "rate_limit_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "RETRY_BUDGET", 1.0, 429, "rate_limit_error"),
        (grpc.StatusCode.UNAVAILABLE, "NO_ENDPOINTS", None, 503, "server_error"),
        (grpc.StatusCode.UNAVAILABLE, "ALL_EJECTED", 5.0, 503, "server_error"),
        (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", None, 404, "not_found_error"),
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", None, 400, "invalid_request_error"),
        (grpc.StatusCode.PERMISSION_DENIED, "MODEL_NOT_ALLOWED", None, 403, "permission_error"),
    ],
)
async def test_refusals_have_openais_shape(
    start: Start, code: grpc.StatusCode, reason: str, retry_after_s: float | None, status: int, kind: str
) -> None:
    stack = await start()
    stack.router.scene.refusal = status_of(code, reason, "because", retry_after_s)
    async with stack.post(CHAT) as answer:
        body = await answer.json()
    assert (answer.status, answer.headers["x-headway-reason"]) == (status, reason)
    assert (body["error"]["message"], body["error"]["type"]) == ("because", kind)
    wanted = {2.2: "3", 0.01: "1", 1.0: "1", 5.0: "5", None: None}[retry_after_s]
    assert answer.headers.get("Retry-After") == wanted
    assert not stack.seen


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_are_told_what_is_left_of_their_quotas(start: Start, stream: bool) -> None:
    told = {"x-ratelimit-remaining-requests": "7", "x-ratelimit-reset-requests": "8.64s"}
    stack = await start()
    stack.router.scene.answer_headers = told
    async with stack.post(CHAT | {"stream": stream}) as answer:
        await answer.read()
    assert {name: answer.headers.get(name) for name in told} == told
    assert not any(name in seen.headers for seen in stack.seen for name in told), "the engine is told nothing"
    refusal = status_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_REQUESTS", "because", 2.0, **told)
    stack.router.scene.refusal = refusal
    async with stack.post(CHAT) as answer:
        await answer.read()
    assert answer.status == 429
    assert {name: answer.headers.get(name) for name in told} == told


@pytest.mark.parametrize("key", ["sk-unknown", "", "acme"])
async def test_unknown_keys_are_refused(start: Start, key: str) -> None:
    stack = await start()
    async with stack.post(CHAT, Authorization=f"Bearer {key}") as answer:
        body = await answer.json()
    assert (answer.status, body["error"]["type"]) == (401, "authentication_error")
    assert not stack.router.requests


async def test_the_tenant_header_counts_only_where_it_is_trusted(start: Start) -> None:
    stack = await start()
    async with stack.post(CHAT, x_headway_tenant="rival", x_headway_priority="critical") as answer:
        await answer.read()
    assert (stack.router.requests[0].tenant, stack.router.requests[0].priority) == ("acme", 0)
    trusting = await start(trust_tenant_header=True, allow_priority_header=True)
    async with trusting.post(CHAT, x_headway_tenant="rival", x_headway_priority="critical") as answer:
        await answer.read()
    route = trusting.router.requests[0]
    assert (route.tenant, route.priority) == ("rival", pb.PRIORITY_CRITICAL)
    async with trusting.post(CHAT, x_headway_priority="urgent") as answer:
        assert answer.status == 400


async def test_bad_bodies_name_the_field(start: Start) -> None:
    stack = await start(max_body_bytes=10_000)
    async with stack.post({"model": "m", "messages": [{"role": "user", "content": 3}]}) as answer:
        body = await answer.json()
    assert (answer.status, body["error"]["param"]) == (400, "messages[0].content")
    async with stack.post(b'{"model": "' + SECRET.encode()) as answer:
        assert answer.status == 400
    async with stack.post({**CHAT, "pad": "x" * 20_000}) as answer:
        body = await answer.json()
    assert (answer.status, body["error"]["code"]) == (413, "body_too_large")
    async with stack.get("/v1/nothing") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
    assert not stack.router.requests


async def test_models_are_the_tenants_own(start: Start) -> None:
    stack = await start(tenants=("tenants/acme",))
    async with stack.get("/v1/models") as answer:
        assert [m["id"] for m in (await answer.json())["data"]] == ["m"]
    async with stack.get("/v1/models", key="sk-rival") as answer:
        assert (await answer.json())["data"] == []
    async with stack.get("/v1/models", key="sk-unknown") as answer:
        assert answer.status == 401


async def test_health_ready_and_metrics(start: Start) -> None:
    stack = await start()
    async with stack.post({**CHAT, "stream": True}) as answer:
        await answer.read()
    for path in ("/health", "/ready"):
        async with stack.get(path) as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")
    async with stack.get("/metrics") as answer:
        text = await answer.text()
    assert 'headway_gateway_requests_total{api="chat/completions",status="200"} 1.0' in text
    assert "headway_client_routes_total 1.0" in text
    assert "headway_gateway_ttft_seconds_count 1.0" in text


async def test_a_hung_scheduler_does_not_stop_the_gateway(start: Start) -> None:
    stack = await start()
    stack.router.scene.hung = True
    async with stack.post({**CHAT, "stream": True}) as answer:
        assert content_of(await answer.text()) == "".join(WORDS)
    assert stack.gateway.client.stats.fail_open_routes == 1
    async with stack.get("/ready") as answer:
        assert answer.status == 200
    await stack.router.wake()
    await stack.router.until(lambda: stack.router.outcomes["OUTCOME_SUCCESS"] == 1)
    assert stack.router.resumes[0].reservation_id.startswith("failopen-")


async def test_a_restarted_scheduler_learns_of_what_runs(start: Start) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.pause_after = 2
    answer = await stack.post({**CHAT, "stream": True})
    before = stack.router.history[0]
    await stack.router.kill()
    await stack.router.start()
    await stack.router.until(lambda: stack.router.resumes)
    stack.engine_of(before).script.resume.set()
    assert content_of(await answer.text()) == "".join(WORDS)
    await stack.router.until(lambda: stack.router.outcomes["OUTCOME_SUCCESS"] == 1)
    [resumed] = stack.router.resumes
    assert (resumed.reservation_id, resumed.first_token_seen) == (before.id, True)
    assert stack.router.history[-1].finished.usage.completion_tokens == len(WORDS)


async def test_progress_is_reported(start: Start) -> None:
    stack = await start(progress_interval_s=0.02)
    for engine in stack.engines.values():
        engine.script.pause_after = 2
    answer = await stack.post({**CHAT, "stream": True})
    [held] = stack.router.history
    await stack.router.until(lambda: any(e.progress.completion_tokens == 1 for e in held.events))
    stack.engine_of(held).script.resume.set()
    await answer.read()
    await stack.settled()


async def test_closing_lets_what_is_in_flight_finish(start: Start) -> None:
    stack = await start()
    for engine in stack.engines.values():
        engine.script.pause_after = 2
    answer = await stack.post({**CHAT, "stream": True})
    [held] = stack.router.history
    closing = asyncio.create_task(stack.gateway.close())

    async def is_refused() -> bool:
        try:
            async with aiohttp.ClientSession() as http, http.get(stack.url("/ready")) as other:
                return other.status == 503
        except aiohttp.ClientConnectorError:
            return True

    async with asyncio.timeout(10):
        while not await is_refused():  # noqa: ASYNC110  # a closed port has no event
            await asyncio.sleep(0.005)
    assert not closing.done()
    stack.engine_of(held).script.resume.set()
    assert content_of(await answer.text()) == "".join(WORDS)
    await closing
    assert held.outcome == pb.OUTCOME_SUCCESS


async def test_no_request_is_lost_while_the_scheduler_dies_hangs_and_an_engine_goes(start: Start) -> None:
    stack = await start()
    statuses: list[tuple[int, str]] = []

    async def user(turns: int) -> None:
        for _ in range(turns):
            async with stack.post({**CHAT, "stream": True}) as answer:
                statuses.append((answer.status, content_of(await answer.text())))

    users = [asyncio.create_task(user(20)) for _ in range(10)]
    await stack.router.until(lambda: len(stack.router.history) > 20)
    await stack.router.kill()
    await stack.router.start()
    await stack.router.until(lambda: len(stack.router.history) > 60)
    stack.router.scene.hung = True
    await eventually(lambda: stack.gateway.client.stats.fail_open_routes > 20)
    await stack.router.wake()
    await eventually(lambda: stack.gateway.client.connected)
    gone, *_ = stack.engines.values()
    gone.script.status = 503
    await asyncio.gather(*users)
    assert statuses == [(200, "".join(WORDS))] * 200
    await eventually(lambda: stack.gateway.client.live == 0)
    await stack.router.until(lambda: not [h for h in stack.router.live.values() if h.owner in stack.router.owners])


async def test_tls_to_the_scheduler_with_a_private_authority() -> None:
    key, certificate = GOLDEN / "tls/loopback-key.pem", GOLDEN / "tls/loopback-certificate.pem"
    engine = await OpenAIEngine().start()
    router = FakeRouter([engine.address])
    router.credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    settings = {"port": 0, "token": "t0ken", "schedulers": [await router.start()]}
    try:
        async with Gateway(GatewaySettings(**settings, scheduler_ca=certificate)) as gateway, asyncio.timeout(10):
            await gateway.client.wait_connected()
        assert router.metadata[-1]["authorization"] == "Bearer t0ken"
        others = GOLDEN / "tls/certificate.pem"
        async with Gateway(GatewaySettings(**settings, scheduler_ca=others)) as gateway, asyncio.timeout(10):
            await eventually(lambda: gateway.client.stats.connect_failures)
            assert not gateway.client.connected
    finally:
        await router.kill()
        await engine.stop()
