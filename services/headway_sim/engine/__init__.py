"""The engine model: a pure step machine shared by the emulator and the simulator."""

from headway_sim.engine.chain import TOKEN_BYTES, byte_chain, chain_root, count_tokens, token_bytes
from headway_sim.engine.hardware import BLOCK_TOKENS, HARDWARE, Hardware
from headway_sim.engine.model import (
    Engine,
    EngineError,
    EngineRequest,
    EngineSequence,
    RequestTooLongError,
    Snapshot,
    State,
    Step,
    WaitingLimitError,
)

__all__ = [
    "BLOCK_TOKENS",
    "HARDWARE",
    "TOKEN_BYTES",
    "Engine",
    "EngineError",
    "EngineRequest",
    "EngineSequence",
    "Hardware",
    "RequestTooLongError",
    "Snapshot",
    "State",
    "Step",
    "WaitingLimitError",
    "byte_chain",
    "chain_root",
    "count_tokens",
    "token_bytes",
]
