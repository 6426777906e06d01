"""A small scriptable OpenAI-compatible engine."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

WORDS = ("Grüße", " aus", " der", " GPU")
USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": len(WORDS),
    "total_tokens": 11 + len(WORDS),
    "prompt_tokens_details": {"cached_tokens": 8},
}


@dataclass
class Seen:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    raw: bytes
    body: dict[str, Any]


@dataclass
class Script:
    """What the engine shall do; change it at any time."""

    status: int = 200
    cut: int = 0
    """Send streams in pieces of so many bytes; 0: an event at a time."""
    die_after: int | None = None
    """Break the connection after so many events (or, without a stream, halfway)."""
    pause_after: int | None = None
    """Wait for `resume` after so many events."""
    pause_before: bool = False
    """Wait for `resume` before answering at all."""
    linger: bool = False
    """After [DONE] keep the stream open until `resume`."""
    error_event: bool = False
    resume: asyncio.Event = field(default_factory=asyncio.Event)


class OpenAIEngine:
    """Serve with `start`; the address is what an endpoint has."""

    def __init__(self) -> None:
        self.script = Script()
        self.seen: list[Seen] = []
        self.aborted = 0
        self.paused = asyncio.Event()
        self.address = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> "OpenAIEngine":
        app = web.Application(client_max_size=1 << 26)
        for path in ("chat/completions", "completions", "embeddings"):
            app.router.add_post(f"/v1/{path}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        """Stop listening: connections are refused from now on."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        self.seen.append(Seen(request.path, {k.lower(): v for k, v in request.headers.items()}, raw, body))
        try:
            if self.script.pause_before:
                await self._pause()
            if self.script.status != 200:
                return web.json_response({"error": {"message": "no"}}, status=self.script.status)
            if body.get("stream"):
                return await self._stream(request, body)
            return await self._whole(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise

    async def _whole(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = "".join(WORDS)
        answer = {"model": body["model"], "choices": [{"message": {"content": text}}], "usage": USAGE}
        data = json.dumps(answer).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(data)
        await response.prepare(request)
        if self.script.die_after is not None:
            await response.write(data[: len(data) // 2])
            self._cut_off(request)
            return response
        await response.write(data)
        return response

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for count, event in enumerate(self._events(request.path, body)):
            if count == self.script.die_after:
                self._cut_off(request)
                return response
            if count == self.script.pause_after:
                await self._pause()
            for piece in self._pieces(event):
                await response.write(piece)
        if self.script.linger:
            await self._pause()
        return response

    def _events(self, path: str, body: dict[str, Any]) -> list[bytes]:
        include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        if path.endswith("/chat/completions"):
            choices = [{"delta": {"role": "assistant", "content": ""}}]
            choices += [{"delta": {"content": word}} for word in WORDS]
        else:
            choices = [{"text": word} for word in WORDS]
        chunks: list[dict[str, Any]] = [{"model": body["model"], "choices": [choice]} for choice in choices]
        if self.script.error_event:
            chunks[-1] = {"error": {"message": "inside"}}
        elif include_usage:
            chunks.append({"model": body["model"], "choices": [], "usage": USAGE})
        events = [b"data: " + json.dumps(c, ensure_ascii=False).encode() + b"\n\n" for c in chunks]
        return [*events, b"data: [DONE]\n\n"]

    def _pieces(self, event: bytes) -> list[bytes]:
        cut = self.script.cut or len(event)
        return [event[i : i + cut] for i in range(0, len(event), cut)]

    async def _pause(self) -> None:
        self.paused.set()
        await self.script.resume.wait()

    def _cut_off(self, request: web.Request) -> None:
        transport = request.transport
        if transport is not None:
            transport.abort()
