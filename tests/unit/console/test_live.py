"""Pages that follow the fleet: one reading for all, none for nobody, and an end with the session."""

import asyncio
import json
from dataclasses import replace

import aiohttp
from fakes.console import TOKENS, change, console_of, credentials, fill, required, rigged
from fakes.rig import desired_state
from fakes.waiting import eventually
from headway_console import live
from headway_console.live import Live
from headway_scheduler.domain.desired import Role


async def event_of(answer, name="fleet"):
    """The next event of this name."""
    async with asyncio.timeout(10):
        said = ""
        async for line in answer.content:
            text = line.decode().strip()
            if text.startswith("event:"):
                said = text.removeprefix("event: ")
            elif text.startswith("data:") and said == name:
                return json.loads(text.removeprefix("data: "))
    raise AssertionError("the stream ended")


async def test_a_page_is_told_how_every_device_does():
    scheduler = await rigged(desired_state())
    fill(scheduler.fleet, 4, scheduler.clock())
    async with console_of(scheduler) as (console, browser):
        console.live._interval_s = 0.05
        await browser.get("/console/fleet")
        async with browser.session.get(browser.url + "/console/live") as answer:
            assert answer.content_type == "text/event-stream"
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            told = await event_of(answer)
            assert len(told["states"]) == len(told["pressure"]) == 33
            again = await event_of(answer)
            assert again["layout"] == told["layout"]


async def test_nobody_looks_nothing_is_read():
    scheduler = await rigged(desired_state())
    async with console_of(scheduler) as (console, browser):
        console.live._interval_s = 0.01
        await browser.get("/console/traffic")
        assert console.live.readings == 0
        async with browser.session.get(browser.url + "/console/live") as answer:
            await event_of(answer)
            assert len(console.live) == 1
        await eventually(lambda: len(console.live) == 0)
        await eventually(lambda: console.live._telling.done())


async def test_asking_for_a_head_opens_no_stream():
    async with console_of(await rigged(desired_state())) as (console, browser):
        async with browser.session.head(browser.url + "/console/live") as answer:
            assert answer.status == 404
        assert len(console.live) == 0


async def test_many_pages_share_one_reading():
    scheduler = await rigged(desired_state())
    async with console_of(scheduler) as (console, browser):
        console.live._interval_s = 5.0
        await browser.get("/console/fleet")
        answers = [await browser.session.get(browser.url + "/console/live") for _ in range(5)]
        await event_of(answers[0])
        assert console.live.readings == 1
        for answer in answers:
            answer.close()


async def test_a_stream_ends_with_its_credential():
    scheduler = await required()
    async with console_of(scheduler) as (console, browser):
        console.live._interval_s = 0.05
        await browser.sign_in(TOKENS[Role.VIEWER])
        async with browser.session.get(browser.url + "/console/live") as answer:
            await event_of(answer)
            await change(scheduler, replace(credentials()["viewer"], revoked=True))
            await event_of(answer, "ended")
            assert await answer.content.read() == b"\n"


async def test_there_are_never_too_many_streams(monkeypatch):
    monkeypatch.setattr(live, "MOST_STREAMS", 2)
    scheduler = await rigged(desired_state())
    async with console_of(scheduler) as (console, browser):
        await browser.get("/console/fleet")
        open_ = [await browser.session.get(browser.url + "/console/live") for _ in range(2)]
        third = await browser.session.get(browser.url + "/console/live")
        assert third.status == 503
        assert len(console.live) == 2
        for answer in (*open_, third):
            answer.close()


async def test_a_stream_without_a_session_ends_at_once():
    scheduler = await rigged(desired_state())
    async with console_of(scheduler) as (_, browser), aiohttp.ClientSession() as stranger:
        answer = await stranger.get(browser.url + "/console/live")
        await event_of(answer, "ended")
        answer.close()


async def test_stopping_twice_is_no_fault():
    scheduler = await rigged(desired_state())
    following = Live(scheduler.fleet, lambda _request: True)
    await following.stop()
    await following.stop()
