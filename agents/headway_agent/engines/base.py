"""What an engine reader tells the agent, in its own words. A metric that is absent is unknown, never zero."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import aiohttp

from headway_agent.config import EngineSettings
from headway_agent.devices.base import Measurement, MissingReason

_UNSUPPORTED = MissingReason.UNSUPPORTED


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What changes rarely: a change of it is an endpoint change."""

    version: str = ""
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    kv_capacity_tokens: Measurement = _UNSUPPORTED
    block_size_tokens: Measurement = _UNSUPPORTED
    max_num_seqs: Measurement = _UNSUPPORTED
    boot_id: str = ""
    """Changes when the engine restarts; empty where that cannot be told."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What changes all the time. `kv_use` is 0 to 1; the prefix counters are in tokens."""

    ready: bool = False
    running: Measurement = _UNSUPPORTED
    waiting: Measurement = _UNSUPPORTED
    kv_use: Measurement = _UNSUPPORTED
    prefix_queries: Measurement = _UNSUPPORTED
    prefix_hits: Measurement = _UNSUPPORTED

    @classmethod
    def failed(cls) -> "EngineReading":
        """Nobody answered: not ready, and all is stale."""
        stale = MissingReason.STALE
        return cls(False, stale, stale, stale, stale, stale)


@dataclass(frozen=True, slots=True)
class EngineState:
    """One look at an engine."""

    facts: EngineFacts
    reading: EngineReading


@dataclass(slots=True)
class Patience:
    """A busy engine may be late once: it stays as ready as it was until a second look in a row gets no answer in time.

    A real vLLM that prefills on cores it shares misses a look now and then. Whoever refuses a connection is not late.
    """

    _ready: bool = False

    def answered(self, reading: EngineReading) -> EngineReading:
        """There was an answer."""
        self._ready = reading.ready
        return reading

    def late(self) -> EngineReading:
        """There was none in time."""
        reading = replace(EngineReading.failed(), ready=self._ready)
        self._ready = False
        return reading

    def gone(self) -> EngineReading:
        """Nobody is there."""
        self._ready = False
        return EngineReading.failed()


class EngineReader(Protocol):
    """Reads one engine rank."""

    async def read(self, timeout_s: float) -> EngineState:
        """Look at the engine, within `timeout_s`. Never raises: no answer is a reading of its own."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What the agent lends to every engine reader."""

    session: aiohttp.ClientSession
    clock: Callable[[], float]
    """Monotonic seconds."""


EngineFactory = Callable[[EngineSettings, EngineContext], EngineReader]
