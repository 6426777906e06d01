"""Many agents in one process: each a stream of samples, at a moment of its own within the interval.

Samples are made and serialised before, and answers not parsed: what this process takes of the machine's cores, the
scheduler that is measured does not have.

`python -m headway_bench.agents PORT NODES DEVICES ENGINES HZ SECONDS TOKEN` prints `ready` when all are connected, and
at the end one JSON object.
"""

import asyncio
import json
import random
import signal
import sys
import time
from typing import Any, Final

import grpc
import uvloop
from headway.telemetry.v1 import telemetry_pb2 as pb

from headway_bench.figures import Json, percentile
from headway_bench.processes import calm_collector
from headway_bench.wire import number_field, submessage

__all__ = ["main"]

_CHANNELS: Final = 8
_CONNECTING: Final = 32
_MEMORY: Final = 80e9
_VARIANTS: Final = 4
"""Samples of each agent, which it sends in turns."""
_CONNECT: Final = "/headway.telemetry.v1.Telemetry/Connect"
_SAMPLE: Final = pb.ConnectRequest.SAMPLE_FIELD_NUMBER
_SEQUENCE: Final = pb.Sample.SEQUENCE_FIELD_NUMBER


def _value(value: float) -> pb.Measurement:
    return pb.Measurement(value=value)


class _Agent:
    """One node: devices, and engines that share them evenly."""

    def __init__(self, number: int, devices: int, engines: int) -> None:
        self.node = f"node-{number}"
        self.lags: list[float] = []
        self.late: list[float] = []
        self._dice = random.Random(number)  # the same samples in every run
        self._uuids = [f"GPU-{number}-{each}" for each in range(devices)]
        self._addresses = [f"10.{number >> 8}.{number & 255}.1:{8000 + each}" for each in range(engines)]
        self._sequence = 0
        self._began = 0.0
        self._samples = [self._sample().SerializeToString() for _ in range(_VARIANTS)]

    async def connect(self, channel: Any, metadata: Any) -> None:
        """Say who it is, and be welcomed."""
        devices = [
            pb.Device(
                uuid=uuid,
                kind=pb.DEVICE_KIND_GPU,
                product="NVIDIA H100 80GB",
                memory_total_bytes=_value(_MEMORY),
                power_limit_w=_value(700.0),
                temperature_slowdown_c=_value(87.0),
            )
            for uuid in self._uuids
        ]
        engines = [
            pb.EngineEndpoint(
                address=address,
                models=["m"],
                device_uuids=self._uuids[place :: len(self._addresses)],
                engine="vllm",
                ready=True,
                hardware="h100-8b",
            )
            for place, address in enumerate(self._addresses)
        ]
        self._call = channel.stream_stream(_CONNECT)(metadata=metadata)
        hello = pb.Hello(node=self.node, instance_id="1", devices=devices, endpoints=engines)
        await self._call.write(pb.ConnectRequest(hello=hello).SerializeToString())
        await self._call.read()

    async def tell(self, interval_s: float, until: float) -> None:
        """Send a sample every interval, and see how late that was."""
        due = time.perf_counter() + self._dice.random() * interval_s
        hearing = asyncio.create_task(self._hear())
        while due < until and not hearing.done():
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._sequence += 1
            self._began = time.perf_counter()
            await self._call.write(self._message(self._sequence))
            self.late.append(self._began - due)
            due += interval_s
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)

    async def _hear(self) -> None:
        """See how long samples take to be acknowledged: those that are, a scheduler does not answer each."""
        while (answer := await self._call.read()) is not grpc.aio.EOF:
            if pb.ConnectResponse.FromString(answer).ack.sequence == self._sequence:
                self.lags.append(time.perf_counter() - self._began)

    def _message(self, sequence: int) -> bytes:
        return submessage(_SAMPLE, number_field(_SEQUENCE, sequence) + self._samples[sequence % _VARIANTS])

    def _sample(self) -> pb.Sample:
        dice = self._dice.random
        devices = [
            pb.DeviceSample(
                uuid=uuid,
                memory_used_bytes=_value(_MEMORY * 0.9),
                utilization=_value(dice()),
                temperature_c=_value(50.0 + 20.0 * dice()),
                power_w=_value(400.0 + 200.0 * dice()),
                ecc_errors=_value(0.0),
            )
            for uuid in self._uuids
        ]
        engines = [
            pb.EngineSample(
                address=address,
                running=_value(float(int(8 * dice()))),
                waiting=_value(0.0),
                kv_use=_value(dice() * 0.8),
                prefix_queries=_value(1000.0),
                prefix_hits=_value(500.0),
                ready=True,
            )
            for address in self._addresses
        ]
        return pb.Sample(devices=devices, engines=engines)


async def _run(port: str, nodes: int, devices: int, engines: int, hz: float, seconds: float, token: str) -> Json:
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(_CHANNELS)]
    agents = [_Agent(number, devices, engines) for number in range(nodes)]
    for start in range(0, nodes, _CONNECTING):
        some = enumerate(agents[start : start + _CONNECTING])
        await asyncio.gather(*(agent.connect(channels[number % _CHANNELS], metadata) for number, agent in some))
    calm_collector()
    print("ready", flush=True)
    began, before = time.perf_counter(), time.process_time()
    telling = [asyncio.create_task(agent.tell(1 / hz, began + seconds)) for agent in agents]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: [task.cancel() for task in telling])
    for ended in await asyncio.gather(*telling, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    took = time.perf_counter() - began
    cores = (time.process_time() - before) / took
    lags = [lag for agent in agents for lag in agent.lags]
    late = [each for agent in agents for each in agent.late]
    for channel in channels:
        await channel.close()
    return {
        "samples": len(late),
        "seconds": took,
        "cpu_cores": cores,
        "lag_p99_ms": percentile(lags, 0.99) * 1e3,
        "late_p99_ms": percentile(late, 0.99) * 1e3,
    }


def main() -> None:
    """Run as the arguments say."""
    port, nodes, devices, engines, hz, seconds, token = sys.argv[1:]
    print(json.dumps(uvloop.run(_run(port, int(nodes), int(devices), int(engines), float(hz), float(seconds), token))))


if __name__ == "__main__":
    main()
