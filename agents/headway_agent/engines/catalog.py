"""THE list of engines. A new one is a file beside this one and a line here."""

from headway_agent.engines.base import EngineFactory
from headway_agent.engines.openai import OpenAiReader
from headway_agent.engines.vllm import VllmReader

ENGINES: dict[str, EngineFactory] = {
    "vllm": VllmReader,
    "openai": OpenAiReader,
    "emulator": VllmReader,
}
