"""NVIDIA GPUs, read in a child process that may hang, die or lose its driver without harming the agent.

Each request to the child has a deadline. A child that misses one is killed, its values become STALE, and
the device it hung on is left alone for a growing while, so that the others are read again. A child is
started only when the one before is gone: a process that hangs in the kernel may outlive its SIGKILL, and a
second one would only join it.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from headway_agent.devices.base import (
    DeviceEvent,
    DeviceInfo,
    DeviceKind,
    DeviceReading,
    DeviceSnapshot,
    MissingReason,
)
from headway_agent.devices.nvml_child import Json, decode_device, decode_event, decode_reading

log = structlog.get_logger(__name__)

_LINE_LIMIT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class NvmlTimes:
    """The patience of an NVML source, in seconds."""

    open_s: float = 30.0
    """`nvmlInit` takes seconds for each GPU where persistence mode is off."""
    request_s: float = 2.0
    max_age_s: float = 3.0
    """A value older than this is STALE."""
    frozen_s: float = 120.0
    """A busy GPU whose values have not moved at all for so long is STALE: the driver repeats itself."""
    rescan_s: float = 60.0
    reopen_lost_s: float = 30.0
    """While a device is lost, NVML is shut down and initialised again this often."""
    retry_s: float = 1.0
    retry_max_s: float = 60.0


class ChildFailedError(Exception):
    """The child says that NVML is broken, or cannot be talked to."""


class ChildHungError(ChildFailedError):
    """The child did not answer: it hung or died over what it was asked."""


@dataclass(slots=True)
class _Device:
    info: DeviceInfo
    reading: DeviceReading
    read_at: float = float("-inf")
    changed_at: float = float("-inf")
    present: bool = True
    hung: int = 0
    not_before: float = float("-inf")

    def take(self, reading: DeviceReading, now: float) -> None:
        if reading != self.reading:
            self.changed_at = now
        self.reading, self.read_at, self.hung = reading, now, 0

    def shown(self, now: float, times: NvmlTimes) -> DeviceReading:
        """What may honestly be said about it now."""
        if not self.present:
            return DeviceReading.absent(self.info.uuid, MissingReason.LOST)
        if now - self.read_at > times.max_age_s or self._frozen(now, times):
            return DeviceReading.absent(self.info.uuid, MissingReason.STALE)
        return self.reading

    def _frozen(self, now: float, times: NvmlTimes) -> bool:
        busy, power = self.reading.utilization, self.reading.power_w
        if isinstance(busy, MissingReason) or isinstance(power, MissingReason) or busy == 0:
            return False  # an idle GPU may well stand still
        return now - self.changed_at > times.frozen_s


@dataclass(slots=True)
class _Child:
    """One child process and the conversation with it."""

    process: asyncio.subprocess.Process
    opened_at: float | None = None
    killed: bool = False

    @classmethod
    async def start(cls, library: str, env: Mapping[str, str]) -> "_Child":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headway_agent.devices.nvml_child",
            library,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            limit=_LINE_LIMIT_BYTES,
            start_new_session=True,  # a Ctrl-C is for the agent, which then ends its child
        )
        return cls(process)

    async def ask(self, request: Json, timeout_s: float) -> Json:
        """One request and its answer. Raises ChildFailedError."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._exchange(json.dumps(request).encode() + b"\n")
            if not line:
                raise ChildHungError("the child died")
            answer: Json = json.loads(line)
        except TimeoutError:
            raise ChildHungError(f"no answer to {request['do']} in {timeout_s} s") from None
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: its pipe is closed
            raise ChildFailedError(f"the child cannot be talked to: {error}") from error
        if "broken" in answer:
            raise ChildFailedError(answer["broken"])
        return answer

    async def _exchange(self, line: bytes) -> bytes:
        assert self.process.stdin is not None and self.process.stdout is not None  # noqa: S101 - both piped
        self.process.stdin.write(line)
        await self.process.stdin.drain()
        return await self.process.stdout.readline()

    def kill(self) -> None:
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    @property
    def gone(self) -> bool:
        return self.process.returncode is not None


@dataclass(slots=True)
class NvmlSource:
    """All NVIDIA GPUs and MIG instances of this host. `library` names the module that the child imports."""

    clock: Callable[[], float]
    library: str = "pynvml"
    times: NvmlTimes = field(default_factory=NvmlTimes)
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    _devices: dict[str, _Device] = field(default_factory=dict)
    _events: list[DeviceEvent] = field(default_factory=list)
    _child: _Child | None = None
    _round: asyncio.Task[None] | None = None
    _failures: int = 0
    _not_before: float = float("-inf")
    _scanned_at: float = float("-inf")

    async def start(self) -> None:
        """Nothing to do: the child starts with the first round."""

    async def read(self, budget_s: float) -> DeviceSnapshot:
        """The newest of every device. A round that outlasts the budget goes on, and is seen next time."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._look())
        await asyncio.wait({self._round}, timeout=budget_s)
        now = self.clock()
        events, self._events = tuple(self._events), []
        devices = self._devices.values()
        return DeviceSnapshot(tuple(d.info for d in devices), tuple(d.shown(now, self.times) for d in devices), events)

    async def close(self) -> None:
        """End the child: kindly, then not. Waits only briefly for one that hangs in the kernel."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)
        child, self._child = self._child, None
        if child is None:
            return
        if child.process.stdin is not None:
            child.process.stdin.close()
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.process.wait(), 1.0)
                return
            child.kill()

    async def _look(self) -> None:
        """One round over all devices."""
        now = self.clock()
        dying = self._child is not None and self._child.killed and not self._child.gone
        if now < self._not_before or dying:
            return
        try:
            child = await self._opened_child(now)
            # Those that hung last time come last, so that they keep nobody from being read.
            for device in sorted(self._devices.values(), key=lambda d: d.hung):
                if device.present and self.clock() >= device.not_before:
                    await self._read_device(child, device)
            answer = await child.ask({"do": "events"}, self.times.request_s)
            self._events.extend(decode_event(e) for e in answer["events"])
            self._judge_round()
            self._failures = 0
        except (ChildFailedError, OSError) as error:
            self._fail(str(error))

    async def _opened_child(self, now: float) -> _Child:
        """A child that has NVML open, and the list of devices as fresh as it needs to be."""
        child = self._child
        if child is None or child.gone:
            child = self._child = await _Child.start(self.library, self.env)
        lost = any(not d.present or d.reading.lost for d in self._devices.values())
        if child.opened_at is None or (lost and now - child.opened_at > self.times.reopen_lost_s):
            answer = await child.ask({"do": "open"}, self.times.open_s)
            child.opened_at = now
        elif now - self._scanned_at > self.times.rescan_s:
            answer = await child.ask({"do": "scan"}, self.times.open_s)
        else:
            return child
        self._scanned_at = now
        self._merge([decode_device(d) for d in answer["devices"]])
        return child

    async def _read_device(self, child: _Child, device: _Device) -> None:
        try:
            answer = await child.ask({"do": "read", "uuid": device.info.uuid}, self.times.request_s)
        except ChildHungError:
            device.hung += 1
            device.not_before = self.clock() + self._backoff(device.hung)
            raise
        device.take(decode_reading(answer["reading"]), self.clock())

    def _merge(self, infos: list[DeviceInfo]) -> None:
        """A GPU no longer listed is lost; a MIG instance was taken down on purpose, so it is forgotten."""
        listed = {info.uuid for info in infos}
        for info in infos:
            known = self._devices.get(info.uuid)
            if known is None:
                unread = DeviceReading.absent(info.uuid, MissingReason.STALE)
                self._devices[info.uuid] = _Device(info, unread)
            else:
                known.info, known.present = self._kept(known.info, info), True
        for uuid, device in list(self._devices.items()):
            if uuid in listed:
                continue
            if device.info.kind is DeviceKind.MIG and device.info.parent_uuid in listed:
                del self._devices[uuid]
            else:
                device.present = False

    @staticmethod
    def _kept(old: DeviceInfo, new: DeviceInfo) -> DeviceInfo:
        """The new description, but a total that cannot be read just now does not become unknown."""
        if isinstance(new.memory_total_bytes, MissingReason):
            return replace(new, memory_total_bytes=old.memory_total_bytes)
        return new

    def _judge_round(self) -> None:
        """NVML in a container can answer UNKNOWN to everything until it is initialised again."""
        read = [d.reading for d in self._devices.values() if d.present and d.hung == 0]
        if read and all(not r.measured and r.utilization is MissingReason.STALE for r in read):
            raise ChildFailedError("NVML answers nothing for any device")

    def _fail(self, why: str) -> None:
        self._failures += 1
        pause_s = self._backoff(self._failures)
        self._not_before = self.clock() + pause_s
        log.warning("nvml_failed", why=why, failures=self._failures, retry_in_s=pause_s)
        if self._child is not None:
            self._child.kill()

    def _backoff(self, failures: int) -> float:
        return min(self.times.retry_max_s, self.times.retry_s * 2.0 ** min(failures - 1, 16))
