"""One emulated engine's HTTP API: OpenAI's routes, vLLM's metrics, and a switch for faults."""

import asyncio
import itertools
import random
import struct
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import msgspec
from aiohttp import web

from headway_sim.emulator.faults import Fault, FaultMode, parse_fault
from headway_sim.emulator.kv_events import KvPublisher
from headway_sim.emulator.metrics import RequestCounts, render_metrics
from headway_sim.emulator.realtime import Generation, RealTimeEngine
from headway_sim.emulator.requests import (
    BadRequestError,
    GenerationRequest,
    decode_body,
    parse_chat,
    parse_completion,
    parse_embedding,
)
from headway_sim.engine import BLOCK_TOKENS, RequestTooLongError, WaitingLimitError
from headway_sim.filler import filler_text

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Above this a body is answered 413; prompts beyond the KV cache are refused with 400 long before."""

_CONTROL = "/emulator/"
_DONE = b"data: [DONE]\n\n"


class EngineServer:
    """Routes of one engine. `unix_time_s` gives the wall clock for `created` fields."""

    def __init__(
        self,
        engine: RealTimeEngine,
        models: tuple[str, ...],
        *,
        unix_time_s: Callable[[], float],
        publisher: KvPublisher | None = None,
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._models = models
        self._unix_time_s = unix_time_s
        self._started_unix_s = unix_time_s()
        self._counts = RequestCounts()
        self._fault = Fault()
        self._ids = itertools.count(1)

    def application(self) -> web.Application:
        """The aiohttp application; run it with `handler_cancellation=True` so that disconnects abort."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/v1/embeddings", self._embeddings),
                web.get("/v1/models", self._list_models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/reset_prefix_cache", self._reset),
                web.post("/emulator/fault", self._set_fault),
            ]
        )
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Play the fault, and turn refusals into OpenAI-shaped errors."""
        if not request.path.startswith(_CONTROL):
            if self._fault.mode is FaultMode.HANG:
                await asyncio.Event().wait()
            if self._fault.mode is FaultMode.REFUSE:
                return _drop(request)
        try:
            return await handler(request)
        except BadRequestError as error:
            kind = "NotFoundError" if error.status == 404 else "BadRequestError"
            return _error(error.status, kind, error.message, error.param)
        except RequestTooLongError as error:
            return _error(400, "BadRequestError", f"The request is too long: {error}", "max_tokens")
        except WaitingLimitError as error:
            return _error(503, "ServiceUnavailableError", f"The engine is full: {error}")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat(decode_body(await request.read()), self._models))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_completion(decode_body(await request.read()), self._models))

    async def _answer(self, http: web.Request, request: GenerationRequest) -> web.StreamResponse:
        if self._fault.mode is FaultMode.HTTP_500:
            return _error(500, "InternalServerError", "The emulator was told to fail")
        self._check_fits(request)
        answer_id = f"{'chatcmpl' if request.chat else 'cmpl'}-{next(self._ids)}"
        generation = self._submit(request, answer_id)
        try:
            if request.stream:
                return await self._stream(http, request, generation, answer_id)
            return await self._whole(http, request, generation, answer_id)
        finally:
            self._settle(request, generation)

    def _submit(self, request: GenerationRequest, request_id: str) -> Generation:
        engine_request = request.for_engine(request_id)
        if self._publisher is not None:
            self._publisher.describe(list(engine_request.keys), request.content(), request.cache_salt)
        return self._engine.submit(engine_request, streamed=request.stream)

    def _settle(self, request: GenerationRequest, generation: Generation) -> None:
        if not generation.finished:
            self._engine.abort(generation)
            self._counts.abort += 1
        elif request.stopped:
            self._counts.stop += 1
        else:
            self._counts.length += 1

    def _check_fits(self, request: GenerationRequest) -> None:
        """Refuse what can never fit before hashing it."""
        capacity = self._engine.snapshot().kv_capacity_tokens
        if request.prompt_tokens + request.output_tokens > capacity:
            raise RequestTooLongError(
                f"{request.prompt_tokens} + {request.output_tokens} tokens exceed the KV cache of {capacity}"
            )

    async def _stream(
        self, http: web.Request, request: GenerationRequest, generation: Generation, answer_id: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        created = int(self._unix_time_s())
        frame = _ChunkFrame(request, answer_id, created)
        seed, sent = request.seed, 0
        fault = self._fault
        async for count in generation.batches():
            if fault.mode is FaultMode.DIE_MID_STREAM and sent + count > fault.after_tokens:
                if fault.after_tokens > sent:
                    await response.write(frame.text(filler_text(seed, sent, fault.after_tokens), first=not sent))
                return _drop(http)
            data = frame.text(filler_text(seed, sent, sent + count), first=not sent)
            sent += count
            if sent == request.output_tokens:
                data += frame.end()
                if request.include_usage:
                    data += frame.usage(self._usage(request, generation), generation)
                data += _DONE
            await response.write(data)
        await response.write_eof()
        return response

    async def _whole(
        self, http: web.Request, request: GenerationRequest, generation: Generation, answer_id: str
    ) -> web.StreamResponse:
        async for _ in generation.batches():
            pass
        if self._fault.mode is FaultMode.DIE_MID_STREAM:
            return _drop(http)
        text = filler_text(request.seed, 0, request.output_tokens)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": _finish_reason(request)}
        if request.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return _json(
            {
                "id": answer_id,
                "object": "chat.completion" if request.chat else "text_completion",
                "created": int(self._unix_time_s()),
                "model": request.model,
                "choices": [choice],
                "usage": self._usage(request, generation),
                "headway": asdict(generation.times()),
            }
        )

    def _usage(self, request: GenerationRequest, generation: Generation) -> dict[str, Any]:
        return {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.output_tokens,
            "total_tokens": request.prompt_tokens + request.output_tokens,
            "prompt_tokens_details": {"cached_tokens": generation.sequence.cached_tokens},
        }

    async def _embeddings(self, http: web.Request) -> web.StreamResponse:
        body = decode_body(await http.read())
        requests, dimensions = parse_embedding(body, self._models)
        encoding = body.get("encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise BadRequestError("encoding_format", "encoding_format must be float or base64")
        if self._fault.mode is FaultMode.HTTP_500:
            return _error(500, "InternalServerError", "The emulator was told to fail")
        for request in requests:
            self._check_fits(request)
        await self._prefill(requests)
        vectors = [_vector(request.seed, dimensions) for request in requests]
        tokens = sum(request.prompt_tokens for request in requests)
        data = [
            {"object": "embedding", "index": index, "embedding": _encode(vector, encoding)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return _json(
            {
                "id": f"embd-{next(self._ids)}",
                "object": "list",
                "created": int(self._unix_time_s()),
                "model": requests[0].model,
                "data": data,
                "usage": usage,
            }
        )

    async def _prefill(self, requests: list[GenerationRequest]) -> None:
        """Run each input through the engine; all of them are aborted together."""
        generations: list[tuple[GenerationRequest, Generation]] = []
        try:
            for request in requests:
                generation = self._submit(request, f"embd-{next(self._ids)}")
                generations.append((request, generation))
            for _, generation in generations:
                async for _ in generation.batches():
                    pass
        finally:
            for request, generation in generations:
                self._settle(request, generation)

    async def _list_models(self, _: web.Request) -> web.Response:
        capacity = self._engine.snapshot().kv_capacity_tokens
        data = [
            {
                "id": model,
                "object": "model",
                "created": int(self._started_unix_s),
                "owned_by": "headway",
                "root": model,
                "parent": None,
                "max_model_len": capacity,
            }
            for model in self._models
        ]
        return _json({"object": "list", "data": data})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        snapshot = self._engine.snapshot()
        text = render_metrics(
            snapshot,
            self._counts,
            model=self._models[0],
            started_unix_s=self._started_unix_s,
            kv_blocks=snapshot.kv_capacity_tokens // BLOCK_TOKENS,
        )
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _reset(self, _: web.Request) -> web.Response:
        """As vLLM's development endpoint, but loud: 409 while requests hold blocks."""
        if not self._engine.reset_prefix_cache():
            return _error(409, "ConflictError", "Requests are running: the prefix cache was not reset")
        return web.Response()

    async def _set_fault(self, request: web.Request) -> web.Response:
        self._fault = parse_fault(decode_body(await request.read()))
        return _json(asdict(self._fault))


class _ChunkFrame:
    """The constant bytes around a streamed answer's text, encoded once."""

    def __init__(self, request: GenerationRequest, answer_id: str, created: int) -> None:
        self._request = request
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": "chat.completion.chunk" if request.chat else "text_completion",
            "created": created,
            "model": request.model,
        }
        opened = msgspec.json.encode(self._head)[:-1] + b',"choices":[{"index":0,'
        self._opened = b"data: " + opened
        self._closed = b',"logprobs":null,"finish_reason":null}]}\n\n'
        if request.chat:
            self._open_text = self._opened + b'"delta":{"content":"'
            self._open_first = self._opened + b'"delta":{"role":"assistant","content":"'
            self._close_text = b'"}' + self._closed
        else:
            self._open_text = self._open_first = self._opened + b'"text":"'
            self._close_text = b'"' + self._closed

    def text(self, text: str, *, first: bool) -> bytes:
        """A chunk of the answer, whose text needs no escapes."""
        return (self._open_first if first else self._open_text) + text.encode("ascii") + self._close_text

    def end(self) -> bytes:
        """The chunk with the finish reason."""
        empty = b'"delta":{}' if self._request.chat else b'"text":""'
        reason = _finish_reason(self._request).encode()
        return self._opened + empty + b',"logprobs":null,"finish_reason":"' + reason + b'"}]}\n\n'

    def usage(self, usage: dict[str, Any], generation: Generation) -> bytes:
        """The last chunk, with the usage and the virtual times."""
        body = self._head | {"choices": [], "usage": usage, "headway": asdict(generation.times())}
        return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _finish_reason(request: GenerationRequest) -> str:
    return "stop" if request.stopped else "length"


def _vector(seed: int, dimensions: int) -> list[float]:
    """A unit vector that equal inputs share."""
    source = random.Random(seed)
    values = [source.gauss(0.0, 1.0) for _ in range(dimensions)]
    norm = sum(value * value for value in values) ** 0.5
    return [value / norm for value in values]


def _encode(vector: list[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return vector
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _drop(request: web.Request) -> web.Response:
    """Cut the connection; what is returned goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _error(status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    error = {"message": message, "type": kind, "param": param, "code": status}
    return web.Response(status=status, body=msgspec.json.encode({"error": error}), content_type="application/json")
