"""THE list of device sources. A new one is a file beside this one, settings in `config.py`, a line here."""

from headway_agent.config import CpuDevice, DeviceSettings, NvmlDevices, SimulatedDevices
from headway_agent.devices.base import DeviceContext, DeviceSource
from headway_agent.devices.cpu import CpuSource
from headway_agent.devices.nvml import NvmlSource, NvmlTimes
from headway_agent.devices.simulated import SimulatedSource


def device_source(settings: DeviceSettings, context: DeviceContext) -> DeviceSource:
    """The source that reads the devices of one entry of the configuration."""
    match settings:
        case NvmlDevices():
            times = NvmlTimes(request_s=settings.request_timeout_s, open_s=settings.open_timeout_s)
            return NvmlSource(context.clock, settings.library, times)
        case CpuDevice():
            return CpuSource(context)
        case SimulatedDevices():
            return SimulatedSource(settings, context)
