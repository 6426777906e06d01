"""The few HTTP calls that every engine reader makes."""

from dataclasses import dataclass, field

import aiohttp

from headway_agent.config import EngineSettings

_LIMIT_BYTES = 16 << 20
ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
"""What a call to an engine may raise."""


@dataclass(frozen=True, slots=True)
class Model:
    """One entry of `/v1/models`; an adapter has a parent."""

    name: str
    parent: str | None = None


@dataclass(slots=True)
class EngineHttp:
    """An engine's own HTTP interface."""

    session: aiohttp.ClientSession
    settings: EngineSettings
    _headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the engine's API key, if it has one."""
        if self.settings.api_key_file is not None:
            self._headers["Authorization"] = f"Bearer {self.settings.api_key_file.read_text().strip()}"

    async def text(self, path: str) -> str:
        """The body at `path`. Raises one of ERRORS, also for a status other than 2xx."""
        async with self.session.get(self.settings.base_url + path, headers=self._headers) as response:
            response.raise_for_status()
            body = await response.content.read(_LIMIT_BYTES)
            while len(body) < _LIMIT_BYTES and (more := await response.content.read(_LIMIT_BYTES - len(body))):
                body += more
            if len(body) >= _LIMIT_BYTES:
                raise ValueError(f"{path} is larger than {_LIMIT_BYTES} bytes")
            return body.decode(errors="replace")

    async def status(self, path: str) -> int:
        """The status at `path`. Raises one of ERRORS."""
        async with self.session.get(self.settings.base_url + path, headers=self._headers) as response:
            return response.status

    async def json(self, path: str, *, post: bool = False) -> object:
        """The JSON at `path`; `post`: where only a POST is answered. Raises one of ERRORS."""
        method = "POST" if post else "GET"
        async with self.session.request(method, self.settings.base_url + path, headers=self._headers) as response:
            response.raise_for_status()
            return await response.json(content_type=None)

    async def models(self) -> tuple[Model, ...]:
        """What `/v1/models` lists. Raises one of ERRORS."""
        answer = await self.json("/v1/models")
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list):
            raise ValueError("/v1/models holds no list")
        return tuple(Model(str(e["id"]), e.get("parent") or None) for e in entries if isinstance(e, dict) and "id" in e)

    async def version(self) -> str:
        """What `/version` says; empty where there is none."""
        try:
            answer = await self.json("/version")
        except ERRORS:
            return ""
        return str(answer.get("version", "")) if isinstance(answer, dict) else ""
