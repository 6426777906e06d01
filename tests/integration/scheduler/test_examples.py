"""The programs in docs/examples run as they stand there."""

import asyncio
import json
import os
import re
import shlex
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from fakes.scheduler import serving
from headway_scheduler.http import HttpServer

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "examples"
CLIENTS = ROOT / "docs" / "clients.md"
SHOWN_ID = "s1.5d3c1f0e.1"


async def run(program: str, *arguments: str, paths: tuple[str, ...] = ()) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / program), *arguments, env=environment, stdout=pipe, stderr=pipe
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, err) == (0, b"")
    return out.decode()


@pytest.fixture
async def served(database_url):
    async with serving(database_url) as found:
        await found.agent()
        yield found


async def test_route_by_reflection(served):
    said = await run("route_by_reflection.py", f"127.0.0.1:{served.server.port}", "m")
    (reservation,) = served.reservations
    assert "headway.routing.v1.Router\n" in said
    assert f'"reservation_id": "{reservation}"' in said


async def test_route_and_report(served):
    paths = (str(ROOT / "protos/gen"),)
    said = await run("route_and_report.py", f"127.0.0.1:{served.server.port}", "m", paths=paths)
    assert "send it to http://10.0.0." in said
    assert not served.reservations


async def test_the_trace_is_one_that_replay_reads(tmp_path):
    from headway_sim.traces import load_trace

    file = tmp_path / "small.jsonl"
    file.write_text(await run("make_trace.py"))
    requests = list(load_trace(file))
    assert len(requests) == 60


@pytest.mark.parametrize("title", ["Connect", "HTTP/JSON"])
async def test_the_curl_commands_of_the_clients_page(served, title):
    """Each is sent as curl would; it answers the fields that the page shows, with the ids of this run."""
    (section,) = re.findall(rf"^## {title}\n.*?```console\n(.*?)```", CLIENTS.read_text(), re.MULTILINE | re.DOTALL)
    told = re.findall(r"^\$ (curl .*)\n(\{.*)$", section, re.MULTILINE)
    assert len(told) == 3
    http = HttpServer(served.scheduler)
    await http.start("127.0.0.1:0")
    reservation = ""
    try:
        for command, shown in told:
            command = command.replace("127.0.0.1:7071", f"127.0.0.1:{http.port}").replace(SHOWN_ID, reservation)
            said = await asyncio.to_thread(curl, shlex.split(command))
            answer = json.loads(said)
            reservation = answer.get("reservationId", reservation)
            assert list(answer) == re.findall(r'"(\w+)":', top_level(shown))
            if "results" in answer:
                assert answer["results"] == [{"reservationId": reservation, "status": "REPORT_STATUS_APPLIED"}]
            if "error" in answer or "code" in answer:
                assert without_values(answer) == without_values(json.loads(shown))
    finally:
        await http.stop()
    assert not served.reservations


def curl(words):
    """What the page's curl commands do: POST the data with these headers, print the body."""
    assert words[:2] == ["curl", "-s"]
    url, *options = words[2:]
    given = list(zip(options[::2], options[1::2], strict=True))
    headers = dict(value.split(": ", 1) for option, value in given if option == "-H" and "TOKEN" not in value)
    (data,) = [value for option, value in given if option == "-d"]
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data.encode(), headers)) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()


def without_values(error):
    """A serialised message has its map's entries in any order; `debug` says the same."""
    for detail in error.get("details", ()):
        del detail["value"]
    return error


def top_level(shown):
    """The outermost object's own text, without what is nested in it."""
    inner = shown[1:]
    while (shorter := re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]", "_", inner)) != inner:
        inner = shorter
    return inner
