"""OpenAI request bodies: checked, and reduced to what the engine needs."""

from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from headway_sim.emulator.text import render_chat
from headway_sim.engine import (
    BLOCK_TOKENS,
    EngineRequest,
    byte_chain,
    chain_root,
    count_tokens,
    token_bytes,
)
from headway_sim.filler import filler_text

DEFAULT_OUTPUT_TOKENS = 128
"""The answer's length when the request sets no limit: the emulator's text never ends by itself."""


class BadRequestError(Exception):
    """A request the API refuses: 400 (or 404 for an unknown model), naming the field at fault."""

    def __init__(self, param: str | None, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.message = message
        self.status = status


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request. `prompt` holds the bytes that are hashed; `stopped` says no limit cut the answer."""

    chat: bool
    model: str
    prompt: bytes
    prompt_tokens: int
    output_tokens: int
    stopped: bool
    stream: bool
    include_usage: bool
    cache_salt: str

    @property
    def seed(self) -> int:
        """What decides the answer's text: equal prompts give equal answers."""
        return xxh3_64_intdigest(self.prompt, chain_root(self.model))

    def content(self) -> bytes:
        """Prompt and answer: both are cached, so the next turn finds them."""
        return self.prompt + filler_text(self.seed, 0, self.output_tokens).encode()

    def for_engine(self, request_id: str) -> EngineRequest:
        """The request as blocks of its content."""
        keys = byte_chain(self.content(), chain_root(self.model, self.cache_salt))
        return EngineRequest(
            request_id,
            self.prompt_tokens,
            self.output_tokens,
            keys=keys,
            keyed_tokens=len(keys) * BLOCK_TOKENS,
        )


def decode_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Values are unchecked JSON, hence Any."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(None, f"The body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError(None, "The body must be a JSON object")
    return body


def parse_chat(body: dict[str, Any], models: tuple[str, ...]) -> GenerationRequest:
    """Check a body of /v1/chat/completions."""
    model = parse_model(body, models)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages", "messages is required and must be a non-empty list")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError(f"messages[{index}].role", f"messages[{index}].role is required")
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise BadRequestError(f"messages[{index}].content", "content must be a string or a list of parts")
    prompt = render_chat(messages, body.get("tools"))
    limit_field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return _generation(body, model, prompt, count_tokens(prompt), chat=True, limit_field=limit_field)


def parse_completion(body: dict[str, Any], models: tuple[str, ...]) -> GenerationRequest:
    """Check a body of /v1/completions: one prompt, as text or as token ids."""
    model = parse_model(body, models)
    prompt, tokens = _prompt(body.get("prompt"), "prompt")
    return _generation(body, model, prompt, tokens, chat=False, limit_field="max_tokens")


def parse_embedding(body: dict[str, Any], models: tuple[str, ...]) -> tuple[list[GenerationRequest], int]:
    """Check a body of /v1/embeddings; returns one prefill per input and the vectors' length."""
    model = parse_model(body, models)
    given = body.get("input")
    if isinstance(given, list) and given and not isinstance(given[0], int):
        prompts = [_prompt(item, "input") for item in given]
    else:
        prompts = [_prompt(given, "input")]
    dimensions = _integer(body, "dimensions", minimum=1) or 16
    if dimensions > 8192:
        raise BadRequestError("dimensions", "dimensions must be at most 8192")
    salt = _salt(body)
    return [
        GenerationRequest(False, model, prompt, tokens, 1, False, False, False, salt) for prompt, tokens in prompts
    ], dimensions


def parse_model(body: dict[str, Any], models: tuple[str, ...]) -> str:
    """The model named by the request, which must be one that is served."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequestError("model", "model is required")
    if model not in models:
        raise BadRequestError("model", f"The model `{model}` does not exist.", status=404)
    return model


def _generation(
    body: dict[str, Any], model: str, prompt: bytes, prompt_tokens: int, *, chat: bool, limit_field: str
) -> GenerationRequest:
    limit = _integer(body, limit_field, minimum=1)
    count = _integer(body, "n", minimum=1)
    if count is not None and count != 1:
        raise BadRequestError("n", "n must be 1")
    stream = _boolean(body, "stream")
    _boolean(body, "ignore_eos")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequestError("stream_options", "stream_options must be an object")
    if options is not None and not stream:
        raise BadRequestError("stream_options", "stream_options needs stream=true")
    return GenerationRequest(
        chat=chat,
        model=model,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        output_tokens=limit or DEFAULT_OUTPUT_TOKENS,
        stopped=limit is None,
        stream=stream,
        include_usage=_boolean(options or {}, "include_usage"),
        cache_salt=_salt(body),
    )


def _prompt(value: object, field: str) -> tuple[bytes, int]:
    """A text or a list of token ids, alone or as the only element of a list: (bytes to hash, tokens)."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        data = value.encode()
        return data, count_tokens(data)
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        if min(value) < 0 or max(value) >= 1 << 32:
            raise BadRequestError(field, f"{field}: token ids must be between 0 and 2^32-1")
        return token_bytes(value), len(value)
    raise BadRequestError(field, f"{field} is required: one non-empty text or list of token ids")


def _integer(body: dict[str, Any], field: str, *, minimum: int) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if type(value) is not int or value < minimum:
        raise BadRequestError(field, f"{field} must be an integer of at least {minimum}")
    return value


def _boolean(body: dict[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadRequestError(field, f"{field} must be a boolean")
    return value


def _salt(body: dict[str, Any]) -> str:
    salt = body.get("cache_salt")
    if salt is None:
        return ""
    if not isinstance(salt, str) or not salt:
        raise BadRequestError("cache_salt", "cache_salt must be a non-empty string")
    return salt
