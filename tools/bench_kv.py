"""Measure KV events into a scheduler: a real process fed over gRPC, and Routes of token ids beside it.

Usage: python tools/bench_kv.py [--blocks-per-s 30000] [--endpoints 100] [--nodes 10] [--seconds 10]

Engine blocks are of 16 tokens, so eight make an index block. Each endpoint stores and evicts as many blocks as its
share of the rate, in ten messages a second for each node, as agents send them. Prints JSON: the scheduler's CPU and
the Routes' times, idle and under that load.
"""

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
from headway.routing.v1 import routing_pb2, routing_pb2_grpc
from headway.telemetry.v1 import telemetry_pb2, telemetry_pb2_grpc

ENGINE_BLOCKS_PER_INDEX_BLOCK = 8
MESSAGES_PER_S = 10
HELD = 1000
ROUTES_PER_S = 100


def endpoint(number: int) -> str:
    """Its address."""
    return f"10.1.{number // 250}.{number % 250}:8000"


def messages(
    node: int, numbers: list[int], blocks_per_s: float, until: float
) -> Iterator[telemetry_pb2.ConnectRequest]:
    """One agent: Hello, whole sets, then changes at a steady pace."""
    engines = [
        telemetry_pb2.EngineEndpoint(address=endpoint(n), engine="vllm", models=["m"], ready=True) for n in numbers
    ]
    yield telemetry_pb2.ConnectRequest(hello=telemetry_pb2.Hello(node=f"n{node}", instance_id="i", endpoints=engines))
    source = random.Random(node)
    held = {n: [source.getrandbits(64) for _ in range(HELD)] for n in numbers}
    yield message(batch(n, blocks, (), cleared=True) for n, blocks in held.items())
    share = blocks_per_s / ENGINE_BLOCKS_PER_INDEX_BLOCK / MESSAGES_PER_S
    owed, due = 0.0, time.monotonic() + source.random() / MESSAGES_PER_S
    while due < until:
        owed += share
        count, owed = int(owed), owed - int(owed)
        batches = []
        for n in numbers if count else ():
            fresh = [source.getrandbits(64) for _ in range(count)]
            gone, held[n] = held[n][:count], held[n][count:] + fresh
            batches.append(batch(n, fresh, gone))
        if batches:
            yield message(batches)
        due += 1 / MESSAGES_PER_S
        time.sleep(max(0.0, due - time.monotonic()))


def batch(number: int, stored: Any, removed: Any, *, cleared: bool = False) -> telemetry_pb2.KvEventBatch:
    """One endpoint's events."""
    return telemetry_pb2.KvEventBatch(
        address=endpoint(number), scheme="tokens-xxh3-128", stored=stored, removed=removed, cleared=cleared, tier="gpu"
    )


def message(batches: Iterable[telemetry_pb2.KvEventBatch]) -> telemetry_pb2.ConnectRequest:
    """What an agent sends at once."""
    return telemetry_pb2.ConnectRequest(kv_event_batches=telemetry_pb2.KvEventBatches(batches=batches))


def feed(address: str, endpoints: int, nodes: int, blocks_per_s: float, seconds: float) -> None:
    """All agents, in a process of their own."""
    until = time.monotonic() + seconds

    def one(node: int) -> None:
        numbers = list(range(node, endpoints, nodes))
        with grpc.insecure_channel(address) as channel:
            stub = telemetry_pb2_grpc.TelemetryStub(channel)
            for _ in stub.Connect(messages(node, numbers, blocks_per_s / endpoints, until)):
                pass

    threads = [threading.Thread(target=one, args=(node,)) for node in range(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(address: str, process: psutil.Process, seconds: float) -> dict[str, float]:
    """Route at a steady pace; say how long Routes took and what the scheduler spent."""
    source, times = random.Random(1), []
    with grpc.insecure_channel(address) as channel:
        stub = routing_pb2_grpc.RouterStub(channel)
        before, began = process.cpu_times(), time.monotonic()
        for number in range(int(seconds * ROUTES_PER_S)):
            ids = [source.randrange(1000) for _ in range(2048)]
            request = routing_pb2.RouteRequest(model="m", tokens=routing_pb2.TokenIds(ids=ids), max_tokens=1)
            started = time.perf_counter()
            answer = stub.Route(request, timeout=10)
            times.append((time.perf_counter() - started) * 1e3)
            finished = routing_pb2.Finished(outcome=routing_pb2.OUTCOME_SUCCESS)
            report = routing_pb2.Report(reservation_id=answer.reservation_id, finished=finished)
            stub.Report(routing_pb2.ReportRequest(reports=[report]))
            time.sleep(max(0.0, began + (number + 1) / ROUTES_PER_S - time.monotonic()))
        after, took = process.cpu_times(), time.monotonic() - began
    times.sort()
    cpu = after.user + after.system - before.user - before.system
    return {
        "cores": round(cpu / took, 3),
        "route_p50_ms": round(times[len(times) // 2], 2),
        "route_p99_ms": round(times[int(len(times) * 0.99)], 2),
    }


def main() -> None:
    """Start a scheduler, measure it idle and fed, stop it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks-per-s", type=float, default=30_000)
    parser.add_argument("--endpoints", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "ports"
        environment = os.environ | {
            "HEADWAY_DATA_DIR": folder,
            "HEADWAY_SCHEDULER_LISTEN": "127.0.0.1:0",
            "HEADWAY_SCHEDULER_LISTEN_HTTP": "127.0.0.1:0",
            "HEADWAY_SCHEDULER_PORT_FILE": str(port_file),
            "HEADWAY_SCHEDULER_STALE_AFTER_S": "600",
            "HEADWAY_SCHEDULER_LOG_LEVEL": "error",
        }
        scheduler = subprocess.Popen([sys.executable, "-m", "headway_scheduler.main"], env=environment)
        try:
            while not port_file.exists():
                time.sleep(0.05)
            address = f"127.0.0.1:{json.loads(port_file.read_text())['grpc']}"
            print(json.dumps(run(address, psutil.Process(scheduler.pid), given), indent=2))
        finally:
            scheduler.terminate()
            scheduler.wait()


def run(address: str, process: psutil.Process, given: argparse.Namespace) -> dict[str, Any]:
    """Idle first, then fed."""
    found: dict[str, Any] = {"engine_blocks_per_s": given.blocks_per_s, "endpoints": given.endpoints}
    for name, rate in (("idle", 0.0), ("fed", given.blocks_per_s)):
        arguments = (address, given.endpoints, given.nodes, rate, given.seconds + 6)
        feeder = multiprocessing.Process(target=feed, args=arguments)
        feeder.start()
        time.sleep(3)
        found[name] = measure(address, process, given.seconds)
        feeder.terminate()
        feeder.join()
        time.sleep(1)
    found["cores_for_events"] = round(found["fed"]["cores"] - found["idle"]["cores"], 3)
    return found


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
