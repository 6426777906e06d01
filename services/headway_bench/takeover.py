"""A leader that is killed, or stopped and continued, over and over under load: how long until the standby answers.

Two schedulers on one Postgres, an agent, an engine and two clients: real processes but for the clients, on loopback.
"""

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
from headway.fleet.v1 import fleet_pb2, fleet_pb2_grpc
from headway.routing.v1 import routing_pb2, routing_pb2_grpc
from headway_cli.local.processes import Process
from headway_client import HeadwayClient, Reservation, RouteRefused
from headway_client.errors import refusal_from_rpc
from headway_scheduler.store.embedded import EmbeddedPostgres

__all__ = ["How", "TakeoverBench", "TakeoverSettings"]

Json = dict[str, Any]

_START_S: Final = 60.0
_TAKEOVER_S: Final = 30.0
_END_S: Final = 30.0
_POLL_S: Final = 0.02
_CLIENTS: Final = 2
_BETWEEN_S: Final = 1.5
"""A client takes a stream that lives for less than a second for a failure, and backs off: leaders live longer."""
_ANSWER_S: Final = 0.02
_REQUEST: Final = routing_pb2.RouteRequest(model="demo", tenant="default", text="Why is the sky blue?", max_tokens=16)


class How(StrEnum):
    """What happens to the leader."""

    KILL = "kill"
    """SIGKILL; a new process stands by afterwards."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT once the other one answers."""


@dataclass(frozen=True, slots=True)
class TakeoverSettings:
    """`callers` route one request after another; `held` reservations stay open all the time."""

    kills: int = 20
    how: How = How.KILL
    lease_s: float = 0.8
    callers: int = 8
    held: int = 20


@dataclass(slots=True)
class _Tally:
    """What the callers saw. `first`: when each scheduler first answered each client since `begin`."""

    routes: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    two_leaders: int = 0
    alone: int = 0
    first: dict[tuple[str, int], float] = field(default_factory=dict)
    old: str = ""

    def begin(self, old: str) -> None:
        """`old` is to lose its lead now."""
        self.first, self.old = {}, old

    def answered(self, by: str, client: int, asked: float) -> None:
        """`by` answered now what was asked then."""
        now = time.monotonic()
        self.routes += 1
        self.slowest_s = max(self.slowest_s, now - asked)
        self.first.setdefault((by, client), now)
        # Asked for and answered by the old one after the new one had answered.
        if by == self.old and any(asked > at for (name, _), at in self.first.items() if name != by):
            self.two_leaders += 1

    def followed(self, to: str, clients: int) -> float | None:
        """When the last client had an answer of `to`; None: not all have."""
        times = [at for (name, _), at in self.first.items() if name == to]
        return max(times) if len(times) == clients else None


class TakeoverBench:
    """Run it once."""

    def __init__(self, settings: TakeoverSettings) -> None:
        self._settings = settings
        self._tally = _Tally()
        self._schedulers: dict[str, Process] = {}
        self._ports: dict[str, int] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._directory = Path()
        self._database_url = ""

    async def run(self) -> Json:
        """Times in milliseconds; `lost`: routes that failed; `routed_alone`: by a client itself.

        `two_leaders`: answers of one that led no more.
        """
        with tempfile.TemporaryDirectory(prefix="hw-takeover-") as directory, ExitStack() as processes:
            self._directory = Path(directory)
            postgres = EmbeddedPostgres(self._directory)
            processes.callback(postgres.stop)
            self._database_url = postgres.start()
            processes.callback(self._kill_schedulers)
            for name in ("a", "b"):
                await self._start_scheduler(name)
            await self._start_fleet(processes)
            async with AsyncExitStack() as stack:
                for name, port in self._ports.items():
                    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
                    self._channels[name] = await stack.enter_async_context(channel)
                return await self._measure(stack)

    # The measurement

    async def _measure(self, stack: AsyncExitStack) -> Json:
        settings, tally = self._settings, self._tally
        targets = [f"127.0.0.1:{port}" for port in self._ports.values()]
        clients = [await stack.enter_async_context(HeadwayClient(targets)) for _ in range(_CLIENTS)]
        for name in self._ports:
            await self._until(partial(self._sees_engine, name), _START_S)
        # They go on alone by the view that they have been sent; a first one is empty.
        await self._until(lambda: all(client.models("default") for client in clients), _START_S)
        held = [await clients[number % _CLIENTS].route(_REQUEST) for number in range(settings.held)]
        for reservation in held:
            reservation.first_token(ttft_ms=1.0)
        stop = asyncio.Event()
        callers = [asyncio.create_task(self._call(clients, n % _CLIENTS, stop)) for n in range(settings.callers)]
        try:
            took_ms = [await self._lose_leader() for _ in range(settings.kills)]
        finally:
            stop.set()
            await asyncio.gather(*callers)
        kept = await self._reservations_become(settings.held)
        _finish(held)
        left = await self._reservations_become(0)
        took_ms = sorted(took_ms)
        return {
            "settings": asdict(settings),
            "takeover": {
                "p50_ms": round(took_ms[len(took_ms) // 2]),
                "p99_ms": round(took_ms[min(len(took_ms) - 1, len(took_ms) * 99 // 100)]),
                "max_ms": round(took_ms[-1]),
                "routes": tally.routes,
                "routed_alone": tally.alone,
                "lost": tally.lost.total(),
                "lost_by_reason": dict(tally.lost),
                "slowest_route_ms": round(tally.slowest_s * 1e3),
                "two_leaders": tally.two_leaders,
                "held_kept": kept,
                "reservations_left": left,
            },
        }

    async def _call(self, clients: list[HeadwayClient], number: int, stop: asyncio.Event) -> None:
        tally = self._tally
        while not stop.is_set():
            asked = time.monotonic()
            try:
                reservation = await clients[number].route(_REQUEST)
            except RouteRefused as refusal:
                tally.lost[refusal.reason] += 1
                await asyncio.sleep(_POLL_S)
                continue
            if reservation.fail_open:
                tally.alone += 1
            else:
                tally.answered(reservation.id.partition(".")[0], number, asked)
            reservation.first_token(ttft_ms=1.0)
            await asyncio.sleep(_ANSWER_S)
            reservation.finished(routing_pb2.OUTCOME_SUCCESS)

    async def _lose_leader(self) -> float:
        """One round; returns how many milliseconds passed until the other scheduler had answered every client."""
        old = await self._leader()
        new = next(name for name in self._ports if name != old)
        self._tally.begin(old)
        began = time.monotonic()
        if self._settings.how is How.KILL:
            self._schedulers[old].kill()
        else:
            self._schedulers[old].signal(signal.SIGSTOP)
        await self._until(lambda: self._tally.followed(new, _CLIENTS), _TAKEOVER_S)
        took_ms = ((self._tally.followed(new, _CLIENTS) or began) - began) * 1e3
        if self._settings.how is How.KILL:
            await self._start_scheduler(old)
        else:
            await self._wake(old)
        await self._until(lambda: self._sees_engine(old), _START_S)
        await asyncio.sleep(_BETWEEN_S)
        return took_ms

    async def _wake(self, old: str) -> None:
        """Go on with the old leader, which finds a Route in its socket."""
        router = routing_pb2_grpc.RouterStub(self._channels[old])
        asked = asyncio.ensure_future(router.Route(_REQUEST, timeout=_TAKEOVER_S))
        await asyncio.sleep(_POLL_S)
        self._schedulers[old].signal(signal.SIGCONT)
        try:
            await asked
            self._tally.two_leaders += 1
        except grpc.aio.AioRpcError as error:
            if refusal_from_rpc(error).reason != "STANDBY":
                raise

    # What the schedulers say

    async def _status(self, name: str) -> fleet_pb2.GetStatusResponse:
        fleet = fleet_pb2_grpc.FleetStub(self._channels[name])
        return await fleet.GetStatus(fleet_pb2.GetStatusRequest(), timeout=5, wait_for_ready=True)

    async def _leader(self) -> str:
        deadline = time.monotonic() + _TAKEOVER_S
        while True:
            for name in self._ports:
                if (await self._status(name)).standing == "leader":
                    return name
            if time.monotonic() > deadline:
                raise TimeoutError("no scheduler leads")
            await asyncio.sleep(_POLL_S)

    async def _sees_engine(self, name: str) -> bool:
        try:
            return (await self._status(name)).endpoints_healthy == 1
        except grpc.aio.AioRpcError:
            return False

    async def _reservations_become(self, wanted: int) -> int:
        """How many the leader counts, as soon as it is as many as wanted, or after a while."""
        deadline = time.monotonic() + _END_S
        while True:
            found = (await self._status(await self._leader())).reservations
            if found == wanted or time.monotonic() > deadline:
                return found
            await asyncio.sleep(_POLL_S)

    async def _until(self, condition: Any, within_s: float) -> None:  # a function or coroutine function
        deadline = time.monotonic() + within_s
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            for name, process in self._schedulers.items():
                if process.status not in (None, -signal.SIGKILL):
                    raise RuntimeError(f"scheduler {name} ended:\n{process.log_tail()}")
            if time.monotonic() > deadline:
                tails = "\n".join(process.log_tail() for process in self._schedulers.values())
                raise TimeoutError(f"not within {within_s:g} s\n{tails}")
            await asyncio.sleep(_POLL_S)

    # Processes

    async def _start_scheduler(self, name: str) -> None:
        ports = self._directory / f"{name}.ports"
        ports.unlink(missing_ok=True)
        environment = {
            "HEADWAY_DATABASE_URL": self._database_url,
            "HEADWAY_SCHEDULER_NAME": name,
            "HEADWAY_SCHEDULER_LISTEN": f"127.0.0.1:{self._ports.get(name, 0)}",
            "HEADWAY_SCHEDULER_LISTEN_HTTP": "127.0.0.1:0",
            "HEADWAY_SCHEDULER_PORT_FILE": str(ports),
            "HEADWAY_SCHEDULER_STANDBY": "true",
            "HEADWAY_SCHEDULER_LEASE_S": str(self._settings.lease_s),
        }
        self._schedulers[name] = self._start(name, ("headway_scheduler.main",), environment)
        await self._until(ports.exists, _START_S)
        self._ports[name] = json.loads(ports.read_text())["grpc"]

    def _kill_schedulers(self) -> None:
        for process in self._schedulers.values():
            process.kill()

    async def _start_fleet(self, processes: ExitStack) -> None:
        port_file = self._directory / "engine.port"
        engine = self._start("engine", ("headway_sim.emulator", "--port-file", str(port_file)), {})
        processes.callback(engine.kill)
        await self._until(port_file.exists, _START_S)
        port = port_file.read_text().split()[0].rpartition(":")[2]
        config = {
            "node": "node",
            "schedulers": [f"127.0.0.1:{port}" for port in self._ports.values()],
            "devices": [{"kind": "simulated"}],
            "engines": [{"address": f"127.0.0.1:{port}", "engine": "emulator", "hardware": "a100-40g-8b"}],
        }
        path = self._directory / "agent.json"
        path.write_text(json.dumps(config))
        agent = self._start("agent", ("headway_agent.main", "--config", str(path)), {})
        processes.callback(agent.kill)

    def _start(self, name: str, module: tuple[str, ...], environment: dict[str, str]) -> Process:
        process = Process(name, [sys.executable, "-m", *module], self._directory / f"{name}.log", environment)
        process.start()
        return process


def _finish(held: list[Reservation]) -> None:
    for reservation in held:
        reservation.finished(routing_pb2.OUTCOME_SUCCESS)
