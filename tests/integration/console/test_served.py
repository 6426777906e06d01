"""The console of a whole scheduler process."""

import asyncio
import contextlib
import json
import os
import signal
import sys

import aiohttp
from fakes.waiting import eventually


@contextlib.asynccontextmanager
async def scheduler(directory, database_url, **environment):
    """A process with this environment: itself, and the address of its HTTP port."""
    ports = directory / "ports.json"
    settings = {
        "HEADWAY_DATABASE_URL": database_url,
        "HEADWAY_SCHEDULER_LISTEN": "127.0.0.1:0",
        "HEADWAY_SCHEDULER_LISTEN_HTTP": "127.0.0.1:0",
        "HEADWAY_SCHEDULER_PORT_FILE": str(ports),
    }
    paths = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headway_scheduler.main"),
        env={**paths, **settings, **environment},
        cwd=directory,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await eventually(ports.exists, timeout_s=60)
        yield process, f"http://127.0.0.1:{json.loads(ports.read_text())['http']}"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_it_is_there_and_an_open_page_keeps_no_scheduler_from_ending(tmp_path, database_url):
    jar = aiohttp.CookieJar(unsafe=True)
    async with scheduler(tmp_path, database_url) as (process, url), aiohttp.ClientSession(cookie_jar=jar) as browser:
        async with browser.get(url) as answer:
            assert (answer.status, answer.url.path) == (200, "/console/fleet")
            assert "No node has reported yet" in await answer.text()
        async with browser.get(f"{url}/console/live") as stream:
            assert await stream.content.readuntil(b"\n\n")
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_it_can_be_turned_off(tmp_path, database_url):
    off = {"HEADWAY_SCHEDULER_CONSOLE": "false"}
    async with scheduler(tmp_path, database_url, **off) as (_, url), aiohttp.ClientSession() as browser:
        async with browser.get(f"{url}/console/fleet") as answer:
            assert answer.status == 404
        async with browser.get(f"{url}/readyz") as answer:
            assert answer.status == 200
