"""The hashes of index blocks, as the scheduler computes them from a prompt (docs/kv-events.md).

A chain over blocks of 128 token ids, little-endian u32, starts from 0 and tells contents apart; each of its hashes is
then bound to a root, which tells apart who may share them: adapter, cache salt and scheme.
"""

import struct
from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

__all__ = ["BLOCK_TOKENS", "SCHEME", "bound", "chained", "root_of", "token_bytes"]

SCHEME: Final = "tokens-xxh3-128"
BLOCK_TOKENS: Final = 128


def root_of(adapter: str, salt: str) -> int:
    """What the hashes of this adapter and cache salt are bound to."""
    return xxh3_64_intdigest("\0".join(("kv", adapter, salt, SCHEME)).encode())


def chained(data: bytes, parent: int) -> int:
    """The hash of a block after `parent`, or after nothing (0)."""
    return xxh3_64_intdigest(data, parent)


def bound(content: int, root: int) -> int:
    """The index's key of a block with this chained hash."""
    return xxh3_64_intdigest(content.to_bytes(8, "little"), root)


def token_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as the scheme hashes them. Raises ValueError for what is no u32."""
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError(str(error)) from error
