"""What only real processes show: the documented example, SIGTERM, and a scheduler that is stopped."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from fakes.openai_engine import OpenAIEngine
from fakes.router import FakeRouter
from fakes.waiting import eventually
from headway.routing.v1 import routing_pb2 as pb
from headway_client import ClientOptions, HeadwayClient

ROOT = Path(__file__).parents[2]
PATHS = [ROOT / "services", ROOT / "protos/gen", ROOT / "tests", ROOT]
ROUTER_PROGRAM = """
import asyncio
from fakes.router import FakeRouter

async def main():
    router = FakeRouter(["10.0.0.1:8000"])
    print(await router.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def running(*arguments: str, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS)), **variables}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stdout=pipe, stderr=pipe
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_the_documented_example_routes_and_reports() -> None:
    router = FakeRouter(["10.0.0.1:8000"])
    target = await router.start()
    try:
        async with running(str(ROOT / "docs/examples/route_and_report.py"), target, "m") as process:
            out, err = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, err) == (0, b"")
        assert out.decode().splitlines() == [
            "send it to http://10.0.0.1:8000 asking for m",
            "REPORT_STATUS_APPLIED",
        ]
        assert router.outcomes == {"OUTCOME_SUCCESS": 1}
    finally:
        await router.kill()


def test_the_docs_show_the_example_as_it_is() -> None:
    shown = (ROOT / "docs/clients.md").read_text()
    assert (ROOT / "docs/examples/route_and_report.py").read_text() in shown


async def test_a_stopped_scheduler_is_routed_around_and_comes_back() -> None:
    options = ClientOptions(fail_open_after_s=0.4, connect_timeout_s=0.4, backoff_max_s=0.1)
    request = pb.RouteRequest(model="m", tenant="acme", text="hello")
    async with running("-c", ROUTER_PROGRAM) as scheduler:
        assert scheduler.stdout is not None
        target = (await asyncio.wait_for(scheduler.stdout.readline(), 30)).decode().strip()
        async with HeadwayClient([target], options=options) as client, asyncio.timeout(30):
            await client.wait_connected()
            held = await client.route(request)
            assert not held.fail_open
            scheduler.send_signal(signal.SIGSTOP)
            alone = await client.route(request)
            assert alone.fail_open
            scheduler.send_signal(signal.SIGCONT)
            await client.wait_connected()
            await eventually(lambda: not alone.id.startswith("failopen-"))
            assert not (await client.route(request)).fail_open
            assert client.stats.resumed == 1  # The one that it had given before.
            assert client.stats.recreated == 1


async def test_the_gateway_drains_on_sigterm(tmp_path: Path) -> None:
    engine = await OpenAIEngine().start()
    engine.script.pause_after = 2
    router = FakeRouter([engine.address])
    target = await router.start()
    config = tmp_path / "gateway.toml"
    config.write_text(f'port = 0\nschedulers = ["{target}"]\nlog_requests = true\n[api_keys]\nsk = "acme"\n')
    try:
        async with running("-m", "headway_gateway.main", "--config", str(config)) as process:
            assert process.stderr is not None
            async with asyncio.timeout(30), aiohttp.ClientSession() as http:
                port = json.loads(await process.stderr.readline())["port"]
                body = {
                    "model": "m",
                    "stream": True,
                    "messages": [{"role": "user", "content": "secret-words"}],
                }
                answer = await http.post(
                    f"http://127.0.0.1:{port}/v1/chat/completions",
                    json=body,
                    headers={"Authorization": "Bearer sk"},
                )
                process.terminate()
                while b"gateway_draining" not in await process.stderr.readline():
                    pass
                engine.script.resume.set()
                assert (await answer.text()).endswith("data: [DONE]\n\n")
                _, logged = await process.communicate()
        assert process.returncode == 0
        assert b"request_answered" in logged
        assert b"secret-words" not in logged
        assert router.outcomes == {"OUTCOME_SUCCESS": 1}
    finally:
        await router.kill()
        await engine.stop()


async def test_a_wrong_configuration_is_told_and_ends_the_process() -> None:
    variables = {"HEADWAY_GATEWAY_PORT": "high", "HEADWAY_GATEWAY_NOPE": "1"}
    async with running("-m", "headway_gateway.main", **variables) as process:
        _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert re.search(r"HEADWAY_GATEWAY_NOPE: no such setting\nport: ", err.decode())
