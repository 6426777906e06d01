"""Chained block keys: equal keys mean equal content from the prompt's first byte up to there."""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from headway_sim.engine.hardware import BLOCK_TOKENS

TOKEN_BYTES = 4
"""UTF-8 bytes that count as one token where no token ids are given."""


def count_tokens(data: bytes) -> int:
    """Tokens of a text: a quarter of its UTF-8 bytes, rounded up."""
    return -(-len(data) // TOKEN_BYTES)


def chain_root(model: str, cache_salt: str = "") -> int:
    """Where a chain starts: prompts of other models or salts never share a key."""
    return xxh3_64_intdigest(f"{model}\0{cache_salt}".encode())


def byte_chain(data: bytes, root: int, *, block_bytes: int = BLOCK_TOKENS * TOKEN_BYTES) -> list[int]:
    """Keys of the full blocks of `data`; each block is hashed with its parent's key as the seed."""
    keys = []
    key = root
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        key = xxh3_64_intdigest(data[start : start + block_bytes], key)
        keys.append(key)
    return keys


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, so that 16 ids fill one 64-byte block of `byte_chain`."""
    return b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in token_ids)
