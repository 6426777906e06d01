"""A leader whose network fails: cut off from Postgres alone, or from everybody. Hosts are network namespaces.

Needs root and iproute2: `make test-system`.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from fakes.network import Cable, Host, Network, network
from fakes.remote_client import RemoteClient, remote_client
from fakes.waiting import eventually
from headway_cli.local.processes import Process, wait_for

LEASE_S = 0.8
PORT = 7070
TESTS = str(Path(__file__).parents[1])
TOKENS = {"agent": "agent-" * 4, "router": "router-" * 4}
BOOTSTRAP = """
[[credentials]]
id = "agent"
role = "agent"
node = "node"
token_file = "agent.token"

[[credentials]]
id = "router"
role = "router"
tenants = ["*"]
token_file = "router.token"
"""


class Site:
    """Schedulers `a` and `b`, each with a cable to Postgres's host and one to that of engine, agent and client."""

    def __init__(self, net: Network, directory: Path, database_url: str, closers: ExitStack) -> None:
        self.directory, self.closers = directory, closers
        for name, token in TOKENS.items():
            (directory / f"{name}.token").write_text(token)
        (directory / "bootstrap.toml").write_text(BOOTSTRAP)
        self.database, self.plane = net.host(), net.host()
        self.schedulers = {name: net.host() for name in ("a", "b")}
        self.to_database: dict[str, Cable] = {}
        self.to_plane: dict[str, Cable] = {}
        for number, (name, host) in enumerate(self.schedulers.items(), start=1):
            self.to_database[name] = net.connect(host, f"10.232.{number}.1/24", self.database, f"10.232.{number}.2/24")
            self.to_plane[name] = net.connect(host, f"10.233.{number}.1/24", self.plane, f"10.233.{number}.2/24")
        sockets, _, database = database_url.partition("?host=")[2], "", database_url.partition("?")[0]
        self._database = database.rpartition("/")[2]
        self._start_database(f"{sockets}/.s.PGSQL.5432")

    @property
    def targets(self) -> dict[str, str]:
        return {name: f"10.233.{number}.1:{PORT}" for number, name in enumerate(self.schedulers, start=1)}

    def start(self, host: Host, name: str, *command: str, **environment: str) -> Process:
        command_line = host.command(sys.executable, "-m", *command)
        process = Process(name, command_line, self.directory / f"{name}.log", environment)
        process.start()
        self.closers.callback(process.kill)
        return process

    def _start_database(self, socket: str) -> None:
        ready = self.directory / "postgres.ready"
        path = os.pathsep.join([TESTS, *filter(None, [os.getenv("PYTHONPATH")])])
        command = ("fakes.postgres_port", "0.0.0.0", "5432", socket, str(ready))
        process = self.start(self.database, "postgres-port", *command, PYTHONPATH=path)
        wait_for("Postgres's port", ready.exists, 60, [process])

    def start_scheduler(self, name: str) -> None:
        number = list(self.schedulers).index(name) + 1
        ports = self.directory / f"{name}.ports"
        process = self.start(
            self.schedulers[name],
            name,
            "headway_scheduler.main",
            HEADWAY_DATABASE_URL=f"postgresql://postgres@10.232.{number}.2/{self._database}",
            HEADWAY_SCHEDULER_NAME=name,
            HEADWAY_SCHEDULER_LISTEN=f"0.0.0.0:{PORT}",
            HEADWAY_SCHEDULER_LISTEN_HTTP="0.0.0.0:7071",
            HEADWAY_SCHEDULER_INSECURE="true",
            HEADWAY_SCHEDULER_BOOTSTRAP=str(self.directory / "bootstrap.toml"),
            HEADWAY_SCHEDULER_PORT_FILE=str(ports),
            HEADWAY_SCHEDULER_STANDBY="true",
            HEADWAY_SCHEDULER_LEASE_S=str(LEASE_S),
        )
        wait_for(f"scheduler {name} listens", ports.exists, 60, [process])

    def start_fleet(self) -> None:
        ports = self.directory / "engine.port"
        engine = self.start(self.plane, "engine", "headway_sim.emulator", "--port", "8000", "--port-file", str(ports))
        wait_for("the engine listens", ports.exists, 60, [engine])
        config = {
            "node": "node",
            "schedulers": list(self.targets.values()),
            "token_file": str(self.directory / "agent.token"),
            "devices": [{"kind": "simulated"}],
            "engines": [{"address": "127.0.0.1:8000", "engine": "emulator", "hardware": "a100-40g-8b"}],
        }
        path = self.directory / "agent.json"
        path.write_text(json.dumps(config))
        self.start(self.plane, "agent", "headway_agent.main", "--config", str(path))


@pytest.fixture
def site(database_url: str) -> Iterator[Site]:
    """A leads, B stands by, an engine is known to both."""
    if os.geteuid() != 0:
        pytest.fail("network namespaces need root")
    with tempfile.TemporaryDirectory(prefix="hw-net-") as directory, network() as net, ExitStack() as closers:
        made = Site(net, Path(directory), database_url, closers)
        for name in made.schedulers:
            made.start_scheduler(name)
        made.start_fleet()
        yield made


@pytest.fixture
async def clients(site: Site) -> AsyncIterator[dict[str, RemoteClient]]:
    """`both` routes as data planes do; `a` and `b` look at one scheduler each, from its own host."""
    async with AsyncExitStack() as stack:
        made = {}
        for name, host in site.schedulers.items():
            client = remote_client(host.command(), f"127.0.0.1:{PORT}", TOKENS["router"])
            made[name] = await stack.enter_async_context(client)
        targets = ",".join(site.targets.values())
        both = remote_client(site.plane.command(), targets, TOKENS["router"])
        made["both"] = await stack.enter_async_context(both)
        yield made


@pytest.mark.parametrize("cut_off_from", ["Postgres", "everybody"])
async def test_a_leader_that_is_cut_off_is_followed(
    site: Site, clients: dict[str, RemoteClient], cut_off_from: str
) -> None:
    both, a, b = clients["both"], clients["a"], clients["b"]
    for each in (a, b):
        await eventually(lambda each=each: _healthy(each), 60)
    assert (await a.standing(), await b.standing()) == ("leader", "standby")
    held = [await both.route() for _ in range(3)]
    assert not any(answer.get("fail_open", True) for answer in held)

    site.to_database["a"].cut()
    if cut_off_from == "everybody":
        site.to_plane["a"].cut()
    await eventually(lambda: _routes_at(both, "b"), 30)
    assert (await a.standing(), await b.standing()) == ("standby", "leader")
    await eventually(lambda: _counts(b, len(held)), 30)
    assert await a.reservations() == 0

    site.to_database["a"].mend()
    site.to_plane["a"].mend()
    await asyncio.gather(*(_routes_at(both, "b") for _ in range(1)))
    assert (await a.standing(), await b.standing()) == ("standby", "leader"), (
        "nobody takes the lead from one that has it"
    )
    for answer in held:
        await both.finish(answer["key"])
    await eventually(lambda: _counts(b, 0), 30)
    state = await both.state()
    assert state["refusals"] == state["resume_failures"] == 0


async def _routes_at(client: RemoteClient, scheduler: str) -> bool:
    """Route once, and finish; was it this scheduler's answer?"""
    answer = await client.route()
    assert "refused" not in answer, answer
    name = (await client.state())["ids"][answer["key"]].partition(".")[0]
    await client.finish(answer["key"])
    return not answer["fail_open"] and name == scheduler


async def _healthy(client: RemoteClient) -> bool:
    return await client.guards() == {"127.0.0.1:8000": []}


async def _counts(client: RemoteClient, reservations: int) -> bool:
    return await client.reservations() == reservations
