"""The load driver against the emulator, and against servers that misbehave."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from headway_sim.driver import Ending, Target, run_closed_loop, run_trace, summarise
from headway_sim.emulator import Emulator, EmulatorConfig
from headway_sim.engine import HARDWARE
from headway_sim.traces import (
    ChatPrompt,
    HashedPrompt,
    LengthPrompt,
    TextPrompt,
    TokenPrompt,
    TraceRequest,
)
from headway_sim.workloads import ArticleWorkload

EVENT = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = b'data: {"choices":[{"delta":{"content":"hey"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def emulated(**more):
    config = EmulatorConfig(HARDWARE["a100-40g-8b"], ("demo",), "127.0.0.1", (0,), speedup=1000.0, **more)
    async with Emulator(config) as running:
        yield Target(f"http://{running.addresses[0]}", "demo")


@asynccontextmanager
async def served(handler, **more):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Target(f"http://127.0.0.1:{runner.addresses[0][1]}", "demo", **more)
    finally:
        await runner.cleanup()


def request(arrival_ms=0.0, prompt=None, output_tokens=5):
    return TraceRequest(arrival_ms, prompt or TextPrompt("hello"), output_tokens, "s")


async def one(handler, **more):
    async with served(handler, **more) as target:
        return (await run_trace(target, [request()])).outcomes[0]


def stream(*parts):
    async def handler(http):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for part in parts:
            await response.write(part)
        return response

    return handler


async def test_the_article_s_workload_in_a_closed_loop():
    workload = ArticleWorkload(sessions=6, turns=3, concurrency=2, output_tokens=50)
    seen = []
    async with emulated() as target:
        result = await run_closed_loop(
            target, workload.conversations(), concurrency=workload.concurrency, on_outcome=seen.append
        )
    assert list(result.outcomes) == seen
    summary = summarise(result)
    assert (summary["requests"], summary["ok"], summary["lost"]) == (18, 18, 0)
    assert summary["completion_tokens"] == 18 * 50
    # The second and third turns find all but the last blocks of what came before, answers included.
    per_turn = [[o.cached_tokens for o in seen if o.session_id == f"session-{index}"] for index in range(6)]
    assert all(first == 0 and 230 <= second < 270 <= 470 <= third for first, second, third in per_turn)
    for outcome in seen:
        assert outcome.virtual is not None
        assert 0 < outcome.virtual.ttft_ms < outcome.virtual.e2e_ms
        assert 0 < outcome.ttft_ms <= outcome.e2e_ms


async def test_every_kind_of_prompt_is_replayed_in_its_form():
    prompts = [
        HashedPrompt((1, 2), 600),
        TokenPrompt(tuple(range(33))),
        TextPrompt("some text"),
        LengthPrompt(300, 4),
        ChatPrompt(({"role": "user", "content": "hi"},)),
    ]
    async with emulated() as target:
        trace = [request(float(index), prompt) for index, prompt in enumerate(prompts)]
        result = await run_trace(target, trace, rate=10.0)
    assert [outcome.ending for outcome in result.outcomes] == [Ending.OK] * 5
    tokens = sorted(outcome.prompt_tokens for outcome in result.outcomes)
    assert 33 in tokens  # token ids count as they are
    assert 600 <= tokens[-1] < 610
    assert all(outcome.completion_tokens == 5 for outcome in result.outcomes)


async def test_a_trace_keeps_its_times_divided_by_the_rate():
    async with emulated() as target:
        result = await run_trace(target, [request(0.0), request(100.0), request(200.0)], rate=4.0)
    starts = sorted(outcome.started_s for outcome in result.outcomes)
    assert starts[1] >= 0.025
    assert starts[2] >= 0.05
    with pytest.raises(ValueError, match="rate"):
        await run_trace(target, [], rate=0.0)


async def test_headers_are_the_session_s():
    seen = {}

    async def handler(http):
        seen.update(http.headers)
        return await stream(TEXT, DONE)(http)

    outcome = await one(handler, headers=lambda session: {"Authorization": f"Bearer {session}"})
    assert outcome.ending is Ending.OK
    assert seen["Authorization"] == "Bearer s"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_is_not_a_loss(status):
    async def handler(_):
        return web.Response(status=status)

    outcome = await one(handler)
    assert (outcome.ending, outcome.status) == (Ending.REFUSED, status)


async def test_a_refusal_with_retry_after_is_tried_again_when_asked():
    answers = [web.Response(status=429, headers={"Retry-After": "0.01"}), None]

    async def handler(http):
        return answers.pop(0) or await stream(TEXT, USAGE, DONE)(http)

    outcome = await one(handler, retries=1)
    assert (outcome.ending, outcome.prompt_tokens, outcome.text) == (Ending.OK, 9, "hey")
    assert outcome.ttft_ms >= 10.0


@pytest.mark.parametrize(
    "parts",
    [
        (TEXT,),
        (TEXT, b'data: {"error":{"message":"upstream died"}}\n\n'),
        (TEXT, b"data: {nonsense\n\n", DONE),
        (),
    ],
)
async def test_an_answer_without_its_end_is_lost(parts):
    outcome = await one(stream(*parts))
    assert outcome.ending is Ending.LOST
    assert outcome.error


async def test_the_first_token_is_the_first_text_not_the_first_event():
    outcome = await one(stream(EVENT, DONE))
    assert (outcome.ending, outcome.ttft_ms) == (Ending.OK, None)


async def test_errors_and_dead_servers_are_lost():
    async def handler(_):
        return web.Response(status=500)

    assert (await one(handler)).ending is Ending.LOST
    result = await run_trace(Target("http://127.0.0.1:1", "demo"), [request()])
    assert (result.outcomes[0].ending, result.outcomes[0].status) == (Ending.LOST, None)


async def test_a_session_goes_on_after_a_refusal():
    async def handler(_):
        return web.Response(status=429)

    workload = ArticleWorkload(sessions=3, turns=2)
    async with served(handler) as target:
        result = await run_closed_loop(target, workload.conversations(), concurrency=2)
    assert summarise(result)["refused"] == 6
