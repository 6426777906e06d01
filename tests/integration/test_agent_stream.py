"""The agent's streams to fake schedulers over real gRPC."""

import asyncio
import contextlib
from pathlib import Path

import aiohttp
import grpc
import pytest
import structlog
from fakes.agent import change, collected
from fakes.engine import running_engine
from fakes.telemetry import running_scheduler
from fakes.waiting import eventually
from google.protobuf.duration_pb2 import Duration
from headway.telemetry.v1 import telemetry_pb2 as pb
from headway_agent.app import Agent
from headway_agent.config import AgentConfig
from headway_agent.devices.base import DeviceEvent, DeviceEventKind
from headway_agent.stream import Backoff, Dialer, Pace

GOLDEN = Path(__file__).parents[1] / "golden"
QUICK = Backoff(base_s=0.01, max_s=0.05, refused_s=30.0, steady_s=10.0)


@contextlib.asynccontextmanager
async def running_agent(*schedulers, backoff=QUICK, **settings):
    addresses = [s if isinstance(s, str) else s.address for s in schedulers]
    defaults = {"node": "n1", "devices": [{"kind": "simulated", "count": 2}], "interval_s": 0.05}
    agent = Agent(AgentConfig(**{**defaults, **settings}, schedulers=addresses), backoff=backoff)
    task = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        agent.stop()
        await asyncio.wait_for(task, 10)


@pytest.fixture
async def scheduler():
    async with running_scheduler() as scheduler:
        yield scheduler


async def samples(scheduler, count):
    await eventually(lambda: scheduler.streams and len(scheduler.stream.of("sample")) >= count)
    return scheduler.stream.of("sample")


async def test_hello_then_numbered_samples(scheduler):
    async with running_agent(scheduler, labels={"zone": "a"}, token="t0ken"):
        got = await samples(scheduler, 3)
    stream = scheduler.stream
    (hello,) = stream.of("hello")
    assert stream.kinds[0] == "hello"
    assert (hello.node, dict(hello.labels), len(hello.devices)) == ("n1", {"zone": "a"}, 2)
    assert hello.boot_id
    assert hello.instance_id
    assert stream.metadata["authorization"] == "Bearer t0ken"
    numbers = [s.sequence for s in got]
    assert numbers == sorted(set(numbers))
    assert {d.uuid for d in got[0].devices} == {d.uuid for d in hello.devices}


async def test_the_health_file_is_touched_while_a_scheduler_is_connected(scheduler, tmp_path):
    file = tmp_path / "healthy"
    async with running_agent(scheduler, health_file=file):
        touched = (await eventually(lambda: file.exists() and file.stat())).st_mtime_ns
        await eventually(lambda: file.stat().st_mtime_ns > touched)


async def test_without_a_scheduler_the_health_file_is_not_touched(tmp_path):
    file = tmp_path / "healthy"
    async with running_agent("127.0.0.1:1", health_file=file) as agent:
        (stream,) = agent.streams
        await eventually(lambda: stream.outbox.waiting)
    assert not file.exists()


async def test_a_health_file_that_cannot_be_written_stops_nothing(scheduler, tmp_path):
    with structlog.testing.capture_logs() as logs:
        async with running_agent(scheduler, health_file=tmp_path / "absent" / "healthy"):
            await eventually(lambda: [line for line in logs if line["event"] == "health_file_not_touched"])
            await samples(scheduler, 3)


async def test_a_stop_closes_the_stream_kindly(scheduler):
    async with running_agent(scheduler):
        await samples(scheduler, 1)
    assert scheduler.stream.half_closed


async def test_the_full_state_again_after_a_reconnect(scheduler):
    async with running_agent(scheduler):
        first = (await samples(scheduler, 2))[-1]
        scheduler.stream.close()
        await eventually(lambda: len(scheduler.streams) == 2)
        second = (await samples(scheduler, 1))[0]
    assert scheduler.stream.kinds[0] == "hello"
    assert second.sequence > first.sequence
    hellos = [s.of("hello")[0].instance_id for s in scheduler.streams]
    assert len(set(hellos)) == 1


async def test_a_scheduler_that_restarts_is_found_again():
    async with contextlib.AsyncExitStack() as first_life:
        before = await first_life.enter_async_context(running_scheduler())
        async with running_agent(before) as agent:
            last = (await samples(before, 1))[-1].sequence
            await first_life.aclose()
            await eventually(lambda: not agent.streams[0].connected)
            async with running_scheduler(int(before.address.rpartition(":")[2])) as after:
                got = await samples(after, 2)
    assert after.stream.kinds[0] == "hello"
    assert got[0].sequence > last


async def test_an_absent_scheduler_is_tried_until_it_comes(unused_tcp_port):
    async with running_agent(f"127.0.0.1:{unused_tcp_port}") as agent:
        await eventually(lambda: agent.streams[0].outbox.dropped_samples > 2)
        async with running_scheduler(unused_tcp_port) as scheduler:
            await samples(scheduler, 2)


async def test_resync_brings_the_full_state(scheduler):
    async with running_agent(scheduler):
        await samples(scheduler, 1)
        scheduler.stream.send(resync=pb.Resync())
        await eventually(lambda: len(scheduler.stream.of("hello")) == 2)
    assert len(scheduler.streams) == 1


async def test_the_schedulers_interval_counts_and_can_change(scheduler):
    scheduler.interval_s = 0.2
    async with running_agent(scheduler, interval_s=60) as agent:
        await eventually(lambda: agent.pace.interval_s == pytest.approx(0.2))
        scheduler.stream.send(interval=Duration(nanos=70_000_000))
        await eventually(lambda: agent.pace.interval_s == pytest.approx(0.07))
        scheduler.stream.close()
        scheduler.mute = True
        await eventually(lambda: agent.pace.interval_s == 60)


async def test_drain_is_heard(scheduler):
    async with running_agent(scheduler) as agent:
        await samples(scheduler, 1)
        scheduler.stream.send(drain=pb.Drain(draining=True))
        await eventually(lambda: agent.streams[0].draining)
        await samples(scheduler, len(scheduler.stream.of("sample")) + 2)
        scheduler.stream.send(drain=pb.Drain(draining=False))
        await eventually(lambda: not agent.streams[0].draining)


async def test_every_scheduler_gets_the_same_and_a_dead_one_delays_nobody():
    async with running_scheduler() as first, running_scheduler() as second:
        async with running_agent(first, "127.0.0.1:1", second):
            await samples(first, 3)
            await samples(second, 3)
        assert first.stream.of("hello")[0].instance_id == second.stream.of("hello")[0].instance_id
        ours = {s.sequence: s for s in first.stream.of("sample")}
        shared = [s for s in second.stream.of("sample") if s.sequence in ours]
        assert shared
        assert all(ours[s.sequence] == s for s in shared)


async def test_a_scheduler_that_never_reads_costs_bounded_memory_and_then_gets_the_newest(scheduler):
    scheduler.deaf = True
    async with running_agent(scheduler, interval_s=60) as agent:
        (stream,) = agent.streams
        await eventually(lambda: stream.connected)
        # Enough to fill every buffer on the way, so that the agent's own queue must hold.
        sequence = 1000
        while stream.outbox.dropped_samples < 200:
            for _ in range(50):
                sequence += 1
                event = DeviceEvent("GPU-a", DeviceEventKind.XID, 1.0, sequence, "x" * 2000)
                stream.outbox.offer(collected(sequence, [event], [change(f"h:{sequence}")]))
            assert stream.outbox.waiting <= stream.outbox.max_events + 1
            await asyncio.sleep(0)
        scheduler.stream.reading.set()
        await eventually(lambda: sequence in [s.sequence for s in scheduler.stream.of("sample")])
        numbers = [s.sequence for s in scheduler.stream.of("sample") if s.sequence > 1000]
        assert numbers == sorted(numbers)
        assert len(numbers) < sequence - 1000


async def test_unconfirmed_events_are_told_again_and_confirmed_ones_are_not(scheduler):
    scheduler.acks = True
    faults = [{"kind": "xid", "at_s": 0, "xid": 48}]
    async with running_agent(scheduler, devices=[{"kind": "simulated", "faults": faults}]) as agent:
        await eventually(lambda: scheduler.streams and scheduler.stream.of("device_event"))
        await eventually(lambda: not agent.streams[0].outbox._sent)
        scheduler.acks = False
        event = DeviceEvent("GPU-a", DeviceEventKind.XID, 1.0, 49)
        agent.streams[0].outbox.offer(collected(10**6, [event]))
        await eventually(lambda: [e.xid for e in scheduler.stream.of("device_event")] == [48, 49])
        scheduler.stream.close()
        await eventually(lambda: len(scheduler.streams) == 2 and scheduler.stream.of("device_event"))
    assert [e.xid for e in scheduler.stream.of("device_event")] == [49]


@pytest.mark.parametrize("code", [grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.PERMISSION_DENIED])
async def test_a_refusal_is_said_clearly_and_retried_slowly(scheduler, code):
    scheduler.refuse = (code, "node n1 is taken")
    with structlog.testing.capture_logs() as logs:
        async with running_agent(scheduler):
            said = await eventually(lambda: [e for e in logs if e["event"] == "scheduler_refused"])
    assert (said[0]["log_level"], said[0]["code"], said[0]["why"]) == ("error", code.name, "node n1 is taken")
    assert said[0]["hint"]
    assert said[0]["retry_in_s"] >= 15
    assert len(scheduler.streams) == 1


async def test_a_scheduler_without_a_welcome_is_left(scheduler):
    scheduler.mute = True
    async with running_agent(scheduler) as agent:
        agent.streams[0].welcome_timeout_s = 0.05
        await eventually(lambda: len(scheduler.streams) >= 3)
        assert not agent.streams[0].connected


async def test_an_engines_life_is_told(scheduler):
    async with running_engine() as engine:
        engine.pages["/metrics"] = "process_start_time_seconds 1\nvllm:num_requests_running 2\n"
        settings = [
            {
                "address": engine.address,
                "engine": "emulator",
                "hardware": "a100-40g-8b",
                "device_indexes": [0],
            }
        ]
        async with running_agent(scheduler, engines=settings):
            await samples(scheduler, 1)

            def told():
                """The endpoint as last told, by a Hello or a change."""
                changes = [c.endpoint for c in scheduler.stream.of("endpoint_change")]
                return [*scheduler.stream.of("hello")[0].endpoints, *changes][-1]

            await eventually(lambda: told().ready)
            assert (told().hardware, told().engine, list(told().models)) == ("a100-40g-8b", "emulator", ["m"])
            assert len(told().device_uuids) == 1
            engine.pages["/health"] = 503
            await eventually(lambda: not told().ready)
            engine.pages |= {"/health": "", "/metrics": "process_start_time_seconds 2\n"}
            await eventually(lambda: told().ready and told().engine_boot_id == "2.000")

            def running():
                return scheduler.stream.of("sample")[-1].engines[0].running

            await eventually(lambda: running().missing == pb.MISSING_REASON_UNSUPPORTED)


async def test_the_token_file_is_read_at_each_connect(scheduler, tmp_path):
    path = tmp_path / "token"
    path.write_text("old\n")
    async with running_agent(scheduler, token_file=path):
        await samples(scheduler, 1)
        path.write_text("new\n")
        scheduler.stream.close()
        await eventually(lambda: len(scheduler.streams) == 2)
    assert [s.metadata["authorization"] for s in scheduler.streams] == ["Bearer old", "Bearer new"]


async def test_tls_with_a_private_authority(tmp_path):
    key, certificate = ((GOLDEN / "tls" / name).read_bytes() for name in ("key.pem", "certificate.pem"))
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    async with running_scheduler(credentials=credentials) as scheduler:
        tls = {"ca_file": GOLDEN / "tls" / "certificate.pem", "server_name": "headway.test"}
        async with running_agent(scheduler, tls=tls, token="t0ken"):
            await samples(scheduler, 1)
        assert scheduler.stream.metadata["authorization"] == "Bearer t0ken"


async def test_tls_to_the_wrong_name_is_no_stream():
    key, certificate = ((GOLDEN / "tls" / name).read_bytes() for name in ("key.pem", "certificate.pem"))
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    async with running_scheduler(credentials=credentials) as scheduler:
        with structlog.testing.capture_logs() as logs:
            async with running_agent(scheduler, tls={"ca_file": GOLDEN / "tls" / "certificate.pem"}):
                await eventually(lambda: [e for e in logs if e["event"] == "scheduler_stream_ended"])
        assert scheduler.streams == []


async def test_a_token_file_that_is_gone_is_no_crash(scheduler, tmp_path):
    with structlog.testing.capture_logs() as logs:
        async with running_agent(scheduler, token_file=tmp_path / "none"):
            await eventually(lambda: [e for e in logs if "cannot read a credential" in e.get("why", "")])
    assert scheduler.streams == []


@pytest.mark.parametrize(
    ("scheduler_at", "settings", "warned"),
    [
        ("192.0.2.1:7070", {"token": "t"}, True),
        ("192.0.2.1:7070", {}, False),
        ("127.0.0.1:1", {"token": "t"}, False),
    ],
)
async def test_a_token_in_plain_text_over_a_network_is_warned_of(scheduler_at, settings, warned):
    with structlog.testing.capture_logs() as logs:
        async with running_agent(scheduler_at, **settings):
            await eventually(lambda: [e for e in logs if e["event"] == "agent_started"])
    assert bool([e for e in logs if e["event"] == "token_sent_in_plain_text"]) == warned


def test_the_fastest_interval_wins_within_bounds():
    pace = Pace(1.0)
    pace.ask("a", 5.0)
    pace.ask("b", 0.001)
    pace.ask("c", 0.0)
    assert pace.interval_s == 0.05
    pace.forget("b")
    assert pace.interval_s == 5.0
    pace.forget("a")
    assert pace.interval_s == 1.0


def test_pauses_grow_are_jittered_and_bounded():
    backoff = Backoff(base_s=1.0, max_s=8.0, refused_s=60.0)
    assert [backoff.pause_s(n, False, lambda: 1.0) for n in (1, 2, 3, 4, 5, 999)] == [1, 2, 4, 8, 8, 8]
    assert backoff.pause_s(2, False, lambda: 0.0) == 1.0
    assert backoff.pause_s(1, True, lambda: 0.0) == 30.0


def test_without_a_token_there_is_no_header():
    assert Dialer.of(AgentConfig()).metadata() == ()


async def test_prometheus_finds_its_metrics_where_they_were_asked_for(scheduler):
    async with running_agent(scheduler, metrics_listen="127.0.0.1:0") as agent:
        await samples(scheduler, 2)
        url = f"http://127.0.0.1:{agent.metrics_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            text = await answer.text()
    assert f'headway_agent_connected{{scheduler="{agent.config.schedulers[0]}"}} 1.0' in text
    assert "headway_agent_devices_lost 0.0" in text
    count = next(line for line in text.splitlines() if line.startswith("headway_agent_round_seconds_count"))
    assert float(count.split()[1]) >= 2
