"""The programs in docs/examples run as they stand there."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from fakes.scheduler import serving

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "examples"


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
