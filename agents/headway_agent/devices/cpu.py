"""The host's CPUs as one device: for engines that run without an accelerator."""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from headway_agent.devices.base import (
    DeviceContext,
    DeviceInfo,
    DeviceKind,
    DeviceReading,
    DeviceSnapshot,
    Measurement,
    MissingReason,
)

_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


def host_id(node: str, machine_id: Path = Path("/etc/machine-id")) -> str:
    """What tells this host from every other; with the node's name, as containers may share a machine id."""
    machine = machine_id.read_text().strip() if machine_id.is_file() else ""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{machine}/{node}"))


def product_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name and count, `AMD EPYC 9654 x192`."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'CPU')} x{psutil.cpu_count() or 1}"


@dataclass(slots=True)
class CpuSource:
    """One device for the whole host and its memory; what the kernel could free counts as unused."""

    context: DeviceContext

    async def start(self) -> None:
        """Begin to count: utilisation is what happened since the last look."""
        psutil.cpu_percent()

    async def read(self, budget_s: float) -> DeviceSnapshot:
        """The host now. Power needs root and a vendor's register: unsupported."""
        memory = psutil.virtual_memory()
        device = DeviceInfo(
            uuid=f"CPU-{host_id(self.context.node)}",
            kind=DeviceKind.CPU,
            product=product_name(),
            memory_total_bytes=float(memory.total),
        )
        reading = DeviceReading(
            uuid=device.uuid,
            memory_used_bytes=float(memory.total - memory.available),
            utilization=min(1.0, psutil.cpu_percent() / 100),
            temperature_c=_temperature(),
            power_w=MissingReason.UNSUPPORTED,
            ecc_errors=MissingReason.UNSUPPORTED,
        )
        return DeviceSnapshot((device,), (reading,))

    async def close(self) -> None:
        """Nothing is held."""


def _temperature() -> Measurement:
    """The hottest sensor of the processor, where the kernel shows one."""
    read = getattr(psutil, "sensors_temperatures", None)
    chips: dict[str, Iterable[object]] = read() if read else {}
    degrees = [float(getattr(s, "current", 0) or 0) for name in _CHIPS for s in chips.get(name, ())]
    return max(degrees) if degrees and max(degrees) > 0 else MissingReason.UNSUPPORTED
