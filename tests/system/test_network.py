"""A scheduler whose network fails: each host is a network namespace, each cable a veth pair that is cut.

Needs root and iproute2: `make test-system`.
"""

import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fakes.network import Host, Network, namespaces, network
from fakes.remote_client import RemoteClient, remote_client
from fakes.waiting import eventually
from headway_cli.local.processes import Process, wait_for

ROOT = Path(__file__).parents[2]
SCHEDULER_PORT = 7070
STALE_S = 2.0
LONG_S = 90.0
"""For what waits on TCP's or gRPC's own timers, which back off while a cable is cut."""
HERE, THERE, REBORN = "127.0.0.1:8000", "10.231.1.2:8000", "10.231.2.3:8000"
TOKENS = {"agent-here": "here-" * 4, "agent-there": "there-" * 4, "router": "router-" * 4}


@dataclass
class Site:
    """A scheduler on a host of its own, with what `start` puts on this and other hosts. Stops it all in the end."""

    net: Network
    directory: Path
    database_url: str
    closers: ExitStack
    host: Host = field(init=False)

    def __post_init__(self) -> None:
        self.host = self.net.host()
        bootstrap = []
        for name, token in TOKENS.items():
            (self.directory / f"{name}.token").write_text(token)
            whose = 'role = "router"\ntenants = ["*"]' if name == "router" else f'role = "agent"\nnode = "{name[6:]}"'
            bootstrap.append(f'[[credentials]]\nid = "{name}"\n{whose}\ntoken_file = "{name}.token"\n')
        (self.directory / "bootstrap.toml").write_text("\n".join(bootstrap))

    def start(self, host: Host, name: str, *command: str, **environment: str) -> Process:
        log = self.directory / f"{name}.log"
        process = Process(name, host.command(sys.executable, "-m", *command), log, environment)
        process.start()
        self.closers.callback(process.kill)
        return process

    def start_scheduler(self) -> None:
        """Beyond loopback, so with a database by URL and with credentials; the network is private, so without TLS."""
        ports = self.directory / "scheduler.json"
        process = self.start(
            self.host,
            "scheduler",
            "headway_scheduler.main",
            HEADWAY_DATABASE_URL=self.database_url,
            HEADWAY_SCHEDULER_LISTEN=f"0.0.0.0:{SCHEDULER_PORT}",
            HEADWAY_SCHEDULER_LISTEN_HTTP="0.0.0.0:7071",
            HEADWAY_SCHEDULER_INSECURE="true",
            HEADWAY_SCHEDULER_BOOTSTRAP=str(self.directory / "bootstrap.toml"),
            HEADWAY_SCHEDULER_PORT_FILE=str(ports),
            HEADWAY_SCHEDULER_TELEMETRY_INTERVAL_S="0.2",
            HEADWAY_SCHEDULER_STALE_AFTER_S=str(STALE_S),
        )
        wait_for("scheduler listens", ports.exists, 60, [process])

    def start_engine(self, host: Host, name: str, address: str) -> None:
        ports = self.directory / f"{name}.port"
        ports.unlink(missing_ok=True)
        emulator = ("headway_sim.emulator", "--host", address, "--port", "8000", "--port-file", str(ports))
        process = self.start(host, f"engine-{name}", *emulator)
        wait_for(f"engine {name} listens", ports.exists, 60, [process])

    def start_agent(self, host: Host, name: str, address: str, scheduler: str) -> Process:
        config = {
            "node": name,
            "schedulers": [f"{scheduler}:{SCHEDULER_PORT}"],
            "token_file": str(self.directory / f"agent-{name}.token"),
            "devices": [{"kind": "simulated"}],
            "engines": [{"address": f"{address}:8000", "engine": "emulator", "hardware": "a100-40g-8b"}],
        }
        path = self.directory / f"agent-{name}.json"
        path.write_text(json.dumps(config))
        return self.start(host, f"agent-{name}", "headway_agent.main", "--config", str(path))


@pytest.fixture
def site(database_url: str) -> Iterator[Site]:
    """A running scheduler, and the node `here` on its own host."""
    if os.geteuid() != 0:
        pytest.fail("network namespaces need root")
    with tempfile.TemporaryDirectory(prefix="hw-net-") as directory, network() as net, ExitStack() as closers:
        made = Site(net, Path(directory), database_url, closers)
        made.start_scheduler()
        made.start_engine(made.host, "here", "127.0.0.1")
        made.start_agent(made.host, "here", "127.0.0.1", "127.0.0.1")
        yield made


@asynccontextmanager
async def beside(site: Site) -> AsyncIterator[RemoteClient]:
    """A client on the scheduler's own host: no cable that is cut here matters to it."""
    target = f"127.0.0.1:{SCHEDULER_PORT}"
    async with remote_client(site.host.command(), target, TOKENS["router"]) as client:
        yield client


async def nodes_chosen(client: RemoteClient, routes: int) -> set[str]:
    """Where as many requests at a time go; each is finished then."""
    answers = [await client.route() for _ in range(routes)]
    for answer in answers:
        await client.finish(answer["key"])
    return {answer["node"] for answer in answers}


async def test_a_node_behind_a_cut_cable_is_not_chosen_until_it_is_mended(site: Site) -> None:
    far = site.net.host()
    cable = site.net.connect(site.host, "10.231.1.1/24", far, "10.231.1.2/24")
    site.start_engine(far, "there", "10.231.1.2")
    site.start_agent(far, "there", "10.231.1.2", "10.231.1.1")
    async with beside(site) as client:
        await eventually(lambda: _is(client.guards(), {HERE: [], THERE: []}), 60)
        assert await nodes_chosen(client, 6) == {"here", "there"}

        cable.cut()
        await eventually(lambda: _is(client.guards(), {HERE: [], THERE: ["stale"]}), 60)
        assert await nodes_chosen(client, 6) == {"here"}, "the other side serves on"

        cable.mend()
        await eventually(lambda: _is(client.guards(), {HERE: [], THERE: []}), LONG_S)
        assert await nodes_chosen(client, 6) == {"here", "there"}
        await eventually(lambda: _is(client.reservations(), 0), 30)


@pytest.mark.parametrize("already_stale", [True, False], ids=["after it was stale", "before anyone noticed"])
async def test_a_half_open_stream_does_not_lock_the_restarted_agent_out(site: Site, already_stale: bool) -> None:
    """The host dies without a word and comes back with another address: the old stream looks alive for long."""
    far = site.net.host()
    cable = site.net.connect(site.host, "10.231.1.1/24", far, "10.231.1.2/24")
    site.start_engine(far, "there", "10.231.1.2")
    agent = site.start_agent(far, "there", "10.231.1.2", "10.231.1.1")
    async with beside(site) as client:
        await eventually(lambda: _is(client.guards(), {HERE: [], THERE: []}), 60)
        cable.cut()  # first, so that no FIN of what dies gets through
        agent.kill()
        if already_stale:
            await eventually(lambda: _is(client.guards(), {HERE: [], THERE: ["stale"]}), 60)
        site.net.remove(far)

        reborn = site.net.host()
        site.net.connect(site.host, "10.231.2.1/24", reborn, "10.231.2.3/24")
        site.start_engine(reborn, "there", "10.231.2.3")
        site.start_agent(reborn, "there", "10.231.2.3", "10.231.2.1")
        await eventually(lambda: _is(client.guards(), {HERE: [], REBORN: []}), 60)
        assert await nodes_chosen(client, 6) == {"here", "there"}
    log = (site.directory / "scheduler.log").read_text()
    assert "agent_refused" not in log, "it was let in at its first try"
    connected = [json.loads(line) for line in log.splitlines() if "agent_connected" in line]
    assert [event["endpoints"] for event in connected if event["node"] == "there"] == [
        [f"{THERE}@0"],
        [f"{REBORN}@0"],
    ]


async def test_a_client_that_is_cut_off_goes_on_alone_and_resumes(site: Site) -> None:
    far = site.net.host()
    cable = site.net.connect(site.host, "10.231.1.1/24", far, "10.231.1.2/24")
    target = f"10.231.1.1:{SCHEDULER_PORT}"
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(remote_client(far.command(), target, TOKENS["router"]))
        watcher = await stack.enter_async_context(beside(site))
        await eventually(lambda: _is(watcher.guards(), {HERE: []}), 60)
        await eventually(lambda: _has_view(client), 30)
        given = await client.route()
        assert not given["fail_open"]

        cable.cut()
        alone = await client.route()
        assert (alone["fail_open"], alone["node"]) == (True, "here")
        assert await watcher.reservations() == 1, "what the client has is kept for it, what it took is not known"
        assert (await watcher.route())["fail_open"] is False, "those who reach the scheduler notice nothing"
        await watcher.finish("0")

        cable.mend()
        await eventually(lambda: _connected(client), LONG_S)
        await eventually(lambda: _is(watcher.reservations(), 2), 30)
        state = await client.state()
        assert (state["resumed"], state["recreated"], state["resume_failures"]) == (1, 1, 0)
        assert not state["ids"][alone["key"]].startswith("failopen-"), "the scheduler named it"
        assert (await client.route())["fail_open"] is False
        for key in state["ids"]:
            await client.finish(key)
        await client.finish("2")
        await eventually(lambda: _is(watcher.reservations(), 0), 30)


def test_no_namespace_is_left_behind_by_what_fails() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), network() as net:
        near, far, gone = net.host(), net.host(), net.host()
        net.connect(near, "10.231.1.1/24", far, "10.231.1.2/24")
        net.remove(gone)
        made = {near.namespace, far.namespace}
        assert made <= namespaces()
        assert gone.namespace not in namespaces()
        raise RuntimeError("on purpose")
    assert not made & namespaces()


async def _is(found, expected) -> bool:
    return await found == expected


async def _connected(client: RemoteClient) -> bool:
    return bool((await client.state())["connected"])


async def _has_view(client: RemoteClient) -> bool:
    return bool((await client.state())["models"])
