"""Looks for engines on local ports, when asked to."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

import aiohttp

from headway_agent.config import EngineSettings, ProbeSettings
from headway_agent.engines.http import ERRORS, EngineHttp


@dataclass(frozen=True, slots=True)
class Prober:
    """Asks each port for its models; a port that lists some is an engine."""

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
                if not await http.models():
                    return None
                return candidate.model_copy(update={"engine": await _kind(http)})
        except ERRORS:
            return None


async def _kind(http: EngineHttp) -> str:
    try:
        return "vllm" if "vllm:" in await http.text("/metrics") else "openai"
    except ERRORS:
        return "openai"
