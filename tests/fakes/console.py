"""A console over a rigged scheduler, served on a real port, and a browser's manners to ask it with."""

import contextlib
import hashlib
import re
from dataclasses import replace
from datetime import UTC, datetime

import aiohttp
from aiohttp import web
from fakes.rig import Clock, MemoryStore, desired_state, device_sample, gpu
from fakes.scheduler import serving
from headway_console.app import Console
from headway_console.decisions import Candidate, DecisionRow
from headway_scheduler.app import Scheduler
from headway_scheduler.config import Config
from headway_scheduler.domain.desired import Credential, Role, StrategyRevision
from headway_scheduler.domain.device import DeviceKind
from headway_scheduler.domain.endpoint import EndpointSpec, EngineSample
from headway_scheduler.domain.measurement import Measurement
from headway_scheduler.domain.telemetry import Hello, Sample
from headway_scheduler.http import HttpServer


class Store(MemoryStore):
    """Also answers what pages read of a database."""

    def __init__(self, desired):
        super().__init__(desired)
        self.entries, self.used = [], []
        self.usage = self.read_usage

    async def audit(self, *, before_id, limit, **_filters):
        return self.entries[:limit]

    async def strategy_revisions(self, strategy):
        return [StrategyRevision(self.desired.strategies[strategy], datetime(2026, 11, 30, tzinfo=UTC), "ada")]

    async def read_usage(self, **_filters):
        return self.used


class Log:
    """A decision record that holds what a test puts there."""

    def __init__(self, rows=()):
        self.rows = list(rows)

    def newest(self, limit):
        return self.rows[:limit]

    def get(self, request_id):
        return next((row for row in self.rows if row.request_id == request_id), None)


class Browser:
    """Keeps cookies, and sends forms with the token of the page that it saw last."""

    def __init__(self, url):
        self.url, self.csrf, self.headers = url, "", {}
        self.session = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))

    async def get(self, path, **options):
        async with self.session.get(self.url + path, headers=self.headers, **options) as answer:
            answer.page = await answer.text()
        found = re.search(r'name="csrf" value="([^"]+)"', answer.page)
        self.csrf = found[1] if found else self.csrf
        return answer

    async def post(self, path, *, csrf=None, headers=None, **form):
        data = {"csrf": self.csrf if csrf is None else csrf, **form}
        sent = {**self.headers, **(headers or {})}
        async with self.session.post(self.url + path, data=data, headers=sent) as answer:
            answer.page = await answer.text()
        return answer

    async def sign_in(self, token):
        return await self.post("/console/sign-in", csrf="", token=token)


@contextlib.asynccontextmanager
async def console_of(scheduler, log=None):
    """Its console on a port of 127.0.0.1, and a browser at it."""
    console = Console(scheduler, log or Log())
    app = web.Application()
    console.add_to(app.router)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    browser = Browser(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield console, browser
    finally:
        await browser.session.close()
        await console.stop()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def operated(database_url, log=None, **settings):
    """A scheduler as `serve` puts it together, and a browser at its HTTP port."""
    async with serving(database_url, **settings) as served:
        console = Console(served.scheduler, log)
        http = HttpServer(served.scheduler, console.add_to)
        await http.start("127.0.0.1:0")
        console.start()
        browser = Browser(f"http://127.0.0.1:{http.port}")
        try:
            served.console = console
            yield served, browser
        finally:
            await browser.session.close()
            await console.stop()
            await http.stop()


def words_of(page):
    """What a person reads."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


async def rigged(desired, **config):
    """A scheduler without a database."""
    scheduler = Scheduler(Config(name="s1", seed=7, **config), Store(desired), Clock(), "e1")
    await scheduler.refresh()
    return scheduler


def fill(fleet, nodes, now, devices=8, model="llama-3.1-70b"):
    """Nodes of eight GPUs with an engine on each, all of them at work; some have troubles."""
    for number in range(nodes):
        name = f"gpu-{number:03}"
        gpus = [
            gpu(
                f"GPU-{number}-{each}",
                memory=80 * 2.0**30,
                index=each,
                product="H100 80GB",
                power_limit_w=Measurement(700.0),
                temperature_slowdown_c=Measurement(87.0),
            )
            for each in range(devices)
        ]
        if number == 3:
            gpus.append(gpu("MIG-3-0", 2.0**30 * 20, DeviceKind.MIG, index=8, parent_uuid="GPU-3-0", product="1g.20gb"))
        specs = [
            EndpointSpec(
                f"10.0.{number}.{each}:8000",
                models=(model,),
                engine="vllm",
                engine_version="0.11",
                device_uuids=(f"GPU-{number}-{each}",),
                kv_capacity_tokens=Measurement(400_000.0),
            )
            for each in range(devices)
        ]
        hello = Hello(name, "i1", "b1", labels={"zone": f"z{number % 3}"}, devices=tuple(gpus), endpoints=tuple(specs))
        node = fleet.connect(hello, now)
        sample(fleet, node, number, now, sequence=1)


def sample(fleet, node, number, now, sequence):
    """What its agent measures, a bit different each time."""
    specs = node.hello.endpoints
    shares = [((number * 37 + each * 53 + sequence * 11) % 100) / 100 for each in range(len(specs))]
    devices = []
    for each, share in enumerate(shares):
        reasons = ("hw_thermal",) if number == 5 and each == 2 else ()
        used, hot = 80 * 2.0**30 * (0.5 + share / 2), 38 + 45 * share
        uuid = f"GPU-{number}-{each}"
        devices.append(
            device_sample(
                uuid, used, utilization=share, temperature_c=hot, power_w=200 + 480 * share, throttle_reasons=reasons
            )
        )
    engines = [
        EngineSample(
            each.address,
            each.dp_rank,
            Measurement(float(int(share * 24))),
            Measurement(0.0),
            Measurement(share),
            Measurement(1000.0 * sequence * 100),
            Measurement(1000.0 * sequence * (60 + 10 * share)),
        )
        for each, share in zip(specs, shares, strict=True)
    ]
    fleet.apply_sample(node, Sample(sequence, tuple(devices), tuple(engines)), now)


def decision(number, time, **changes):
    """A decision that went well."""
    candidates = tuple(
        Candidate(
            f"10.0.0.{each}:8000@0",
            cost=40.0 + 25 * each,
            predicted_ttft_ms=38.0 + 20 * each,
            matched_tokens=3072 if each == 0 else 0,
            guards=("kv_room",) if each == 3 else (),
            chosen=each == 0,
        )
        for each in range(5)
    )
    parts = {
        "tenant": "default",
        "model": "llama-3.1-70b",
        "strategy": "adaptive",
        "endpoint": "10.0.0.0:8000@0",
        "prompt_tokens": 4096,
        "matched_tokens": 3072,
        "predicted_ttft_ms": 40.0 + number % 17,
        "actual_ttft_ms": 42.0 + number % 23,
        "outcome": "success",
        "candidates": candidates,
        "candidates_seen": 5,
    }
    return DecisionRow(f"req-{number}", time, **(parts | changes))


TOKENS = {role: f"hw_{role.value}-token-of-this-test" for role in Role}


def credentials():
    scope = {Role.AGENT: {"node": "n"}, Role.ROUTER: {"tenants": ("*",)}}
    return {
        role.value: Credential(role.value, role, hashlib.sha256(token.encode()).digest(), **scope.get(role, {}))
        for role, token in TOKENS.items()
    }


async def required(**config):
    return await rigged(desired_state(credentials=credentials()), require_credentials=True, **config)


async def change(scheduler, credential):
    """An admin changes it."""
    desired = scheduler.store.desired
    held = {**desired.credentials, credential.id: credential}
    scheduler.store.desired = replace(desired, version=desired.version + 1, credentials=held)
    await scheduler.refresh()
