"""A HeadwayClient in a process of its own, so that it can live on another host; told what to do by lines of JSON.

As a program: `python -m fakes.remote_client HOST:PORT[,HOST:PORT…] TOKEN`.
As a module: `remote_client(command prefix, …)`.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import structlog
from headway.fleet.v1 import fleet_pb2, fleet_pb2_grpc
from headway.routing.v1 import routing_pb2
from headway_client import HeadwayClient, RouteRefused


class RemoteClient:
    """Asks the process on the other side of two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, what: str, argument: str = "", timeout_s: float = 30.0) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([what, argument]).encode() + b"\n")
        await stdin.drain()
        line = await asyncio.wait_for(stdout.readline(), timeout_s)
        assert line, f"the client ended with status {await self._process.wait()}"
        return json.loads(line)

    async def route(self) -> dict[str, Any]:
        """A reservation: `key` to finish it by, `node`, `fail_open`; or why it was `refused`."""
        return await self.ask("route")

    async def finish(self, key: str) -> None:
        await self.ask("finish", key)

    async def state(self) -> dict[str, Any]:
        """The client's counters, `connected`, the `models` of its view, and `ids`: each reservation's now, by key."""
        return await self.ask("state")

    async def guards(self) -> dict[str, list[str]]:
        """The hard guards of each endpoint, by address, as the scheduler says."""
        return await self.ask("guards")

    async def reservations(self) -> int:
        """How many reservations the scheduler counts."""
        return await self.ask("reservations")

    async def standing(self) -> str:
        """What the first scheduler is: leader, standby, …"""
        return await self.ask("standing")


@asynccontextmanager
async def remote_client(prefix: Sequence[str], target: str, token: str) -> AsyncIterator[RemoteClient]:
    """A client on the host that `prefix` runs commands on."""
    pipe = asyncio.subprocess.PIPE
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *filter(None, [os.getenv("PYTHONPATH")])])}
    command = (*prefix, sys.executable, "-m", "fakes.remote_client", target, token)
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdin=pipe, stdout=pipe)
    try:
        yield RemoteClient(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _serve(target: str, token: str) -> None:
    loop = asyncio.get_running_loop()
    metadata = (("authorization", f"Bearer {token}"),)
    held = {}
    targets = target.split(",")
    async with HeadwayClient(targets, token=token) as client, grpc.aio.insecure_channel(targets[0]) as channel:
        fleet = fleet_pb2_grpc.FleetStub(channel)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            what, argument = json.loads(line)
            answer: Any = None
            if what == "route":
                request = routing_pb2.RouteRequest(
                    tenant="default", model="demo", text="Why is the sky blue?", max_tokens=16
                )
                try:
                    reservation = await client.route(request, timeout_s=10)
                except RouteRefused as refusal:
                    answer = {"refused": refusal.reason}
                else:
                    held[key := str(len(held))] = reservation
                    node = reservation.endpoint.node.removeprefix("nodes/")
                    answer = {"key": key, "node": node, "fail_open": reservation.fail_open}
            elif what == "finish":
                held[argument].finished(routing_pb2.OUTCOME_SUCCESS)
            elif what == "state":
                ids = {key: reservation.id for key, reservation in held.items()}
                answer = {
                    **asdict(client.stats),
                    "connected": client.connected,
                    "models": client.models("default"),
                    "ids": ids,
                }
            elif what == "guards":
                listed = await fleet.ListEndpoints(fleet_pb2.ListEndpointsRequest(), metadata=metadata, timeout=10)
                answer = {state.address: list(state.hard_guards) for state in listed.endpoints}
            elif what == "standing":
                status = await fleet.GetStatus(fleet_pb2.GetStatusRequest(), metadata=metadata, timeout=10)
                answer = status.standing
            elif what == "reservations":
                status = await fleet.GetStatus(fleet_pb2.GetStatusRequest(), metadata=metadata, timeout=10)
                answer = status.reservations
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(file=sys.stderr))  # standard output is for answers
    asyncio.run(_serve(*sys.argv[1:3]))
    os._exit(0)  # the thread that reads standard input may wait for more
