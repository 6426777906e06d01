"""Prefix identity: chained xxh3-64 hashes over fixed blocks of a prompt (DESIGN.md, Prefix identity).

A chain's root holds what may share a cache: isolation domain, model, adapter and scheme. Equal hashes therefore mean
equal prefixes within one isolation domain, and a tenant can never meet another's.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from xxhash import xxh3_64_intdigest

from headway_scheduler.domain.request import BlocksPrompt, Request, TextPrompt, TokensPrompt
from headway_scheduler.index.values import Chain

__all__ = ["BYTES", "SCHEMES", "TOKENS", "Scheme", "chain_of", "identity_of", "root_of"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a prompt is cut: `block_size` units of `unit_bytes` bytes each."""

    name: str
    block_size: int
    unit_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes a block."""
        return self.block_size * self.unit_bytes


TOKENS: Final = Scheme("tokens-xxh3-128", 128, 4)
BYTES: Final = Scheme("bytes-xxh3-256", 256, 1)
SCHEMES: Final = {scheme.name: scheme for scheme in (TOKENS, BYTES)}


_EMPTY: Final = Chain(0, [], 1.0)


@lru_cache(10_000)
def root_of(domain: str, model: str, adapter: str, scheme: Scheme) -> int:
    """The hash every chain of this isolation domain, model, adapter and scheme starts from."""
    return xxh3_64_intdigest("\0".join((domain, model, adapter, scheme.name)).encode())


def hash_blocks(data: bytes, root: int, block_bytes: int, max_blocks: int) -> list[int]:
    """Chain the full blocks of `data`, at most `max_blocks` of them."""
    hashes: list[int] = []
    parent, digest, append = root, xxh3_64_intdigest, hashes.append
    for start in range(0, min(len(data) // block_bytes, max_blocks) * block_bytes, block_bytes):
        parent = digest(data[start : start + block_bytes], parent)
        append(parent)
    return hashes


def chain_of(request: Request, bytes_per_token: float, max_blocks: int) -> Chain:
    """The chain of a request's prompt. `bytes_per_token` turns byte blocks into tokens."""
    prompt = request.prompt
    if isinstance(prompt, TextPrompt):
        root = root_of(request.domain, request.model, request.adapter, BYTES)
        return _chain(prompt.data, root, BYTES, BYTES.block_bytes / bytes_per_token, max_blocks)
    if isinstance(prompt, TokensPrompt):
        root = root_of(request.domain, request.model, request.adapter, TOKENS)
        return _chain(prompt.data, root, TOKENS, float(TOKENS.block_size), max_blocks)
    if isinstance(prompt, BlocksPrompt):
        scheme = SCHEMES[prompt.scheme]
        root = root_of(request.domain, request.model, request.adapter, scheme)
        # The caller chained from a root of its own choosing: chain again from ours, so that domains stay apart.
        hashes = _rechain(prompt.hashes[:max_blocks], root)
        tokens = float(scheme.block_size) if scheme is TOKENS else scheme.block_bytes / bytes_per_token
        return Chain(root, hashes, tokens)
    return _EMPTY


def _chain(data: bytes, root: int, scheme: Scheme, block_tokens: float, max_blocks: int) -> Chain:
    hashes = hash_blocks(data, root, scheme.block_bytes, max_blocks)
    rest = data[len(hashes) * scheme.block_bytes :]
    if len(rest) >= scheme.block_bytes:  # cut off at max_blocks: what follows is not known to continue it
        return Chain(root, hashes, block_tokens)
    return Chain(root, hashes, block_tokens, scheme.block_bytes, len(rest), xxh3_64_intdigest(rest))


def identity_of(request: Request) -> int:
    """Tells a retry of a request from another request: a hash of its model, its adapter and its whole prompt."""
    prompt = request.prompt
    seed = _seed(request.model, request.adapter, type(prompt).__name__)
    if isinstance(prompt, BlocksPrompt):
        tail = f"{prompt.scheme} {request.prompt_tokens} {prompt.hashes[-1:]}"
        return xxh3_64_intdigest(tail.encode(), seed)
    return seed if prompt is None else xxh3_64_intdigest(prompt.data, seed)


@lru_cache(10_000)
def _seed(model: str, adapter: str, kind: str) -> int:
    return xxh3_64_intdigest("\0".join((model, adapter, kind)).encode())


def _rechain(hashes: tuple[int, ...], root: int) -> list[int]:
    """Bind hashes that already identify their whole prefix to our root, one by one."""
    return [xxh3_64_intdigest(value.to_bytes(8, "little"), root) for value in hashes]
