"""Agents in one process whose engines tell what their KV caches gain and lose.

`python -m headway_bench.kv_agents PORT NODES ENDPOINTS BLOCKS_PER_S SECONDS TOKEN` prints `ready` when all are
connected and have told the whole of their caches, and ends by itself.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc
import uvloop
from headway.telemetry.v1 import telemetry_pb2 as pb
from headway.telemetry.v1 import telemetry_pb2_grpc

__all__ = ["main"]

_ENGINE_BLOCKS: Final = 8
"""Engine blocks of 16 tokens in an index block of 128."""
_MESSAGES_PER_S: Final = 10
_HELD: Final = 1000


class _Agent:
    """A node, and the index blocks that each of its engines holds, the oldest first."""

    def __init__(self, number: int, addresses: Sequence[str]) -> None:
        self._name = f"node-{number}"
        self._dice = random.Random(number)  # the same blocks in every run
        self._held = {address: self._blocks(_HELD) for address in addresses}

    async def connect(self, stub: Any, metadata: Any) -> None:
        """Say who it is, and all that its engines hold."""
        engines = [
            pb.EngineEndpoint(address=address, engine="vllm", models=["m"], ready=True) for address in self._held
        ]
        self._call = stub.Connect(metadata=metadata)
        hello = pb.Hello(node=self._name, instance_id="1", endpoints=engines)
        await self._call.write(pb.ConnectRequest(hello=hello))
        await self._call.read()
        await self._send(_batch(address, blocks, (), whole=True) for address, blocks in self._held.items())

    async def tell(self, blocks_per_s: float, until: float) -> None:
        """Each engine stores and evicts so many index blocks a second; ten messages a second, and a sample a second."""
        share, owed, turn = blocks_per_s / _MESSAGES_PER_S, 0.0, 0
        due = time.monotonic() + self._dice.random() / _MESSAGES_PER_S
        while due < until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due, turn, owed = due + 1 / _MESSAGES_PER_S, turn + 1, owed + share
            count, owed = int(owed), owed - int(owed)
            if count:
                await self._send(self._changes(count))
            if turn % _MESSAGES_PER_S == 0:
                engines = [pb.EngineSample(address=address, ready=True) for address in self._held]
                await self._call.write(pb.ConnectRequest(sample=pb.Sample(sequence=turn, engines=engines)))
        self._call.cancel()

    def _changes(self, count: int) -> Iterable[pb.KvEventBatch]:
        for address, held in self._held.items():
            stored, removed = self._blocks(count), held[:count]
            self._held[address] = held[count:] + stored
            yield _batch(address, stored, removed)

    def _blocks(self, count: int) -> list[int]:
        return [self._dice.getrandbits(64) for _ in range(count)]

    async def _send(self, batches: Iterable[pb.KvEventBatch]) -> None:
        await self._call.write(pb.ConnectRequest(kv_event_batches=pb.KvEventBatches(batches=batches)))


def _batch(address: str, stored: Sequence[int], removed: Sequence[int], *, whole: bool = False) -> pb.KvEventBatch:
    return pb.KvEventBatch(
        address=address, scheme="tokens-xxh3-128", stored=stored, removed=removed, cleared=whole, tier="gpu"
    )


async def _run(port: str, nodes: int, endpoints: int, blocks_per_s: float, seconds: float, token: str) -> None:
    metadata = (("authorization", f"Bearer {token}"),)
    addresses = [f"10.{number >> 8}.{number & 255}.1:8000" for number in range(endpoints)]
    agents = [_Agent(number, addresses[number::nodes]) for number in range(nodes)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = telemetry_pb2_grpc.TelemetryStub(channel)
        for agent in agents:
            await agent.connect(stub, metadata)
        print("ready", flush=True)
        each = blocks_per_s / _ENGINE_BLOCKS / endpoints
        await asyncio.gather(*(agent.tell(each, time.monotonic() + seconds) for agent in agents))


def main() -> None:
    """Run as the arguments say."""
    port, nodes, endpoints, blocks_per_s, seconds, token = sys.argv[1:]
    uvloop.run(_run(port, int(nodes), int(endpoints), float(blocks_per_s), float(seconds), token))


if __name__ == "__main__":
    main()
