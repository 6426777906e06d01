"""Looks for engines on local ports, when asked to."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import aiohttp

from headway_agent.config import EngineSettings, ProbeSettings
from headway_agent.engines.http import ERRORS, EngineHttp

_BY_METRIC: Final = {
    "vllm:": "vllm",
    "sglang:": "sglang",
    "trtllm_": "tensorrt_llm",
    "trtllm:": "tensorrt_llm",
    "tgi_": "tgi",
    "llamacpp:": "llama_cpp",
}
_PAGES: Final = ("/metrics", "/prometheus/metrics")


@dataclass(frozen=True, slots=True)
class Prober:
    """Asks each port for its models; a port that lists some is an engine, and so is a Triton that is ready."""

    settings: ProbeSettings
    session: aiohttp.ClientSession

    async def find(self, known_urls: Collection[str], timeout_s: float) -> tuple[EngineSettings, ...]:
        """The engines on ports that no configured engine uses."""
        urls = {port: f"http://{self.settings.host}:{port}" for port in self.settings.ports}
        asked = [self._ask(port, url, timeout_s) for port, url in urls.items() if url not in known_urls]
        return tuple(found for found in await asyncio.gather(*asked) if found is not None)

    async def _ask(self, port: int, url: str, timeout_s: float) -> EngineSettings | None:
        address = f"{self.settings.advertise_host or self.settings.host}:{port}"
        candidate = EngineSettings(address=address, url=url, engine="openai")
        http = EngineHttp(self.session, candidate)
        try:
            async with asyncio.timeout(timeout_s):
                kind = await _kind(http)
                return None if kind is None else candidate.model_copy(update={"engine": kind})
        except ERRORS:
            return None


async def _kind(http: EngineHttp) -> str | None:
    """What listens there; None: no engine."""
    if await _answers(http, "/v2/health/ready"):
        return "triton"
    try:
        if not await http.models():
            return None
    except ERRORS:
        # An older TGI lists no models, but says what it runs.
        return "tgi" if await _by_metrics(http) == "tgi" else None
    if (kind := await _by_metrics(http)) is not None:
        return kind
    # A llama-server without --metrics still has its properties.
    return "llama_cpp" if await _answers(http, "/props") else "openai"


async def _by_metrics(http: EngineHttp) -> str | None:
    for page in _PAGES:
        try:
            text = await http.text(page)
        except ERRORS:
            continue
        lines = "\n" + text
        for prefix, kind in _BY_METRIC.items():
            if f"\n{prefix}" in lines:
                return kind
    return None


async def _answers(http: EngineHttp, path: str) -> bool:
    try:
        return await http.status(path) == 200
    except ERRORS:
        return False
