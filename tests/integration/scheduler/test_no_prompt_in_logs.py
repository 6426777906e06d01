"""Prompts never reach a log, an error, a page of Fleet or a metric: whatever is sent, and however it fails."""

import io
import logging

import pytest
import structlog
from aiohttp import ClientSession
from fakes.scheduler import Stream, finished, refused, serving
from fakes.standin import Standin
from google.protobuf.duration_pb2 import Duration
from headway.fleet.v1 import fleet_pb2 as fpb
from headway.routing.v1 import routing_pb2 as pb
from headway_scheduler.http import HttpServer
from headway_scheduler.serve import configure_logging

SECRET = "correct horse battery staple"


@pytest.fixture
def log(monkeypatch):
    """Everything that the process's own logging configuration writes."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.DEBUG)
    configure_logging("debug")
    yield stream
    structlog.reset_defaults()
    logging.getLogger().removeHandler(handler)
    logging.getLogger().setLevel(logging.WARNING)


def prompts():
    yield {"text": SECRET * 30}
    message = pb.ChatMessage(role="user", name=SECRET, content=SECRET * 30)
    yield {"chat": pb.ChatPrompt(messages=[message], tools=SECRET)}
    yield {"tokens": pb.TokenIds(ids=list(SECRET.encode()) * 30)}


def leaks(text):
    spelled = ", ".join(str(each) for each in SECRET[:8].encode())
    return SECRET in text or SECRET.encode().hex() in text or spelled in text


async def test_no_prompt_in_logs(database_url, log, monkeypatch):
    async with serving(database_url) as served:
        agent = await served.agent()
        answers, errors = [], []
        stream: Stream = await served.stream()
        for number, prompt in enumerate(prompts()):
            answers.append(await served.route(f"r{number}", **prompt))
            await served.router.Explain(pb.ExplainRequest(request=pb.RouteRequest(model="m", **prompt)))
            for wrong in ({"model": "nope"}, {"tenant": "nope"}, {"max_wait": Duration(seconds=-1)}, {"task_hint": 77}):
                errors.append(await refused(served.route(**(prompt | wrong))))
            await stream.route(number, **prompt)
            await stream.answered(number)
        errors.append(await refused(served.route("r0", text=SECRET)))

        def broken(self, request, view, now):
            raise KeyError(request.prompt, SECRET)

        adaptive = type(served.scheduler.registry.installed["adaptive"].strategy)
        monkeypatch.setattr(adaptive, "cost", broken)
        for _ in range(7):
            await served.finish(await served.route(text=SECRET))

        def poisoned(request, *_rest):
            raise ValueError(SECRET, request)

        monkeypatch.setattr(served.scheduler, "dispatcher", Standin(served.scheduler.dispatcher, submit=poisoned))
        errors.append(await refused(served.route(text=SECRET)))
        await stream.route(100, text=SECRET)
        await stream.answered(100)
        await stream.send(reports=[finished(SECRET)])
        status = await served.fleet.GetStatus(fpb.GetStatusRequest())
        endpoints = await served.fleet.ListEndpoints(fpb.ListEndpointsRequest())
        http = HttpServer(served.scheduler)
        await http.start("127.0.0.1:0")
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{http.port}/metrics") as page:
            metrics = await page.text()
        await http.stop()
        await agent.leave()
        said = [*answers, status, endpoints, metrics, *(f"{e.message} {e.facts}" for e in errors), str(stream.answers)]
        assert not any(leaks(str(each)) for each in said)
    text = log.getvalue()
    assert "strategy_tripped" in text
    assert "rpc_failed" in text
    assert "request_failed" in text
    assert not leaks(text)
