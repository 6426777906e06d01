"""The agent as a process of its own: what it loads, what it prints, how it ends."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from fakes.nvml import gpu, scenario
from fakes.telemetry import running_scheduler
from fakes.waiting import eventually

ENV = {
    **{name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_AGENT_")},
    "PYTHONPATH": os.pathsep.join(sys.path),
    "HEADWAY_AGENT_DEVICES": '[{"kind": "cpu"}, {"kind": "simulated"}]',
}
FOREIGN = {"sqlalchemy", "numpy", "psycopg", "typer", "yaml", "headway_scheduler"}


def test_the_agent_extra_alone_is_enough():
    """Nothing that only the other extras bring is loaded."""
    code = "import sys, headway_agent.main; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    ran = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    assert "headway_agent" in loaded
    assert not loaded & FOREIGN


def test_dump_prints_one_sample_as_json():
    command = [sys.executable, "-m", "headway_agent.main", "--dump"]
    ran = subprocess.run(command, env={**ENV, "HEADWAY_AGENT_INTERVAL_S": "0.05"}, capture_output=True, check=True)
    dumped = json.loads(ran.stdout)
    assert [d["kind"] for d in dumped["hello"]["devices"]] == ["DEVICE_KIND_CPU", "DEVICE_KIND_GPU"]
    assert len(dumped["sample"]["devices"]) == 2


def ended(process):
    """Is it gone, or only waiting for somebody to ask how it went?"""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.asynccontextmanager
async def running_process(scheduler, **env):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headway_agent.main",
        env={**ENV, "HEADWAY_AGENT_SCHEDULERS": scheduler.address, **env},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_sigterm_ends_it_kindly():
    async with running_scheduler() as scheduler, running_process(scheduler) as process:
        await eventually(lambda: scheduler.streams and scheduler.stream.of("sample"), timeout_s=30)
        process.send_signal(signal.SIGTERM)
        _, logged = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0
        assert scheduler.stream.half_closed
    events = [json.loads(line)["event"] for line in logged.splitlines()]
    assert (events[0], events[-1]) == ("agent_started", "agent_stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_nvml_process_ends_with_the_agent_however_it_ends(number, tmp_path):
    path = tmp_path / "nvml.json"
    path.write_text(json.dumps(scenario(gpu("GPU-a"))))
    env = {
        "HEADWAY_AGENT_DEVICES": '[{"kind": "nvml", "library": "fakes.nvml"}]',
        "FAKE_NVML": str(path),
    }
    async with running_scheduler() as scheduler, running_process(scheduler, **env) as process:

        def told_of_the_gpu():
            hellos = scheduler.stream.of("hello") if scheduler.streams else []
            return [d.uuid for d in hellos[-1].devices] == ["GPU-a"] if hellos else False

        await eventually(told_of_the_gpu, timeout_s=30)
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(number)
        await asyncio.wait_for(process.wait(), 30)
        await eventually(lambda: ended(child))
