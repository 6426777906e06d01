"""Traces of real traffic: loaders, and prompts made from what they tell."""

from headway_sim.traces.formats import TraceFormat
from headway_sim.traces.load import load_trace
from headway_sim.traces.model import (
    HASH_ID_TOKENS,
    ChatPrompt,
    HashedPrompt,
    LengthPrompt,
    Prompt,
    RecordedPrompt,
    TextPrompt,
    TokenPrompt,
    TraceError,
    TraceRequest,
    render_prompt,
)

__all__ = [
    "HASH_ID_TOKENS",
    "ChatPrompt",
    "HashedPrompt",
    "LengthPrompt",
    "Prompt",
    "RecordedPrompt",
    "TextPrompt",
    "TokenPrompt",
    "TraceError",
    "TraceFormat",
    "TraceRequest",
    "load_trace",
    "render_prompt",
]
