"""One request to be routed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

__all__ = ["BlocksPrompt", "Prompt", "Request", "Subset", "TaskClass", "TextPrompt", "TokensPrompt"]


class TaskClass(StrEnum):
    """How much work a request is likely to be (ARTICLE.md's complexity classes)."""

    __hash__ = str.__hash__  # an enumeration's own is Python code, and this one is looked up at every decision

    SHORT = "short"
    CHAT = "chat"
    LONG = "long"


class TextPrompt(msgspec.Struct, frozen=True, gc=False):
    """The canonical prompt's UTF-8 bytes; `chat`: of a conversation."""

    data: bytes
    chat: bool = False


class TokensPrompt(msgspec.Struct, frozen=True, gc=False):
    """Token ids as little-endian u32, four bytes each."""

    data: bytes


class BlocksPrompt(msgspec.Struct, frozen=True):
    """Only the chained hashes of the full blocks are known."""

    scheme: str
    hashes: tuple[int, ...]


Prompt = TextPrompt | TokensPrompt | BlocksPrompt | None


@dataclass(frozen=True, slots=True)
class Subset:
    """Limits candidates; every non-empty part must match. `endpoints` holds ids, `ip:port` or `ip`."""

    endpoints: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)


class Request(msgspec.Struct, frozen=True, gc=False):
    """A validated request: names resolved to ids, prompt in canonical form.

    `prompt_tokens` is exact where ids were given, else estimated by the model's bytes a token. `max_wait_s` is None
    where the caller left it to the scheduler. `cannot_inject_salt`: only endpoints that serve no other isolation domain
    may be chosen. `priority`: -1 best effort, 0 standard, 1 critical.
    """

    request_id: str
    tenant: str
    domain: str
    model: str
    prompt: Prompt = None
    prompt_tokens: int = 0
    adapter: str = ""
    max_tokens: int | None = None
    task_class: TaskClass = TaskClass.CHAT
    session_id: str = ""
    priority: int = 0
    ttft_objective_ms: float | None = None
    tpot_objective_ms: float | None = None
    max_wait_s: float | None = None
    excluded: frozenset[str] = frozenset()
    subset: Subset | None = None
    cannot_inject_salt: bool = False
