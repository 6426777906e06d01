"""A real-time engine emulator: OpenAI's API, vLLM's metrics, the engine model's timing."""

from headway_sim.emulator.app import Emulator, serve
from headway_sim.emulator.config import EmulatorConfig
from headway_sim.emulator.faults import Fault, FaultMode

__all__ = ["Emulator", "EmulatorConfig", "Fault", "FaultMode", "serve"]
