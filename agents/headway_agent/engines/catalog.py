"""THE list of engines. A new one is a file beside this one and a line here."""

from headway_agent.engines.base import EngineFactory
from headway_agent.engines.llama_cpp import LLAMA_CPP
from headway_agent.engines.openai import OpenAiReader
from headway_agent.engines.sglang import SGLANG
from headway_agent.engines.tensorrt_llm import TENSORRT_LLM
from headway_agent.engines.tgi import TGI
from headway_agent.engines.triton import TRITON
from headway_agent.engines.vllm import VLLM

ENGINES: dict[str, EngineFactory] = {
    "vllm": VLLM.reader(),
    "sglang": SGLANG.reader(),
    "tensorrt_llm": TENSORRT_LLM.reader(),
    "triton": TRITON.reader(),
    "tgi": TGI.reader(),
    "llama_cpp": LLAMA_CPP.reader(),
    "openai": OpenAiReader,
    "emulator": VLLM.reader(),
}
