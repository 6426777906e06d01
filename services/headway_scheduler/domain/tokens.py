"""Bearer tokens: how they are made, and what is kept of them."""

import hashlib
import secrets
from typing import Final

__all__ = ["TOKEN_PREFIX", "new_token", "token_sha256"]

TOKEN_PREFIX: Final = "hw_"  # noqa: S105 -- how tokens start
"""What every token starts with, so that scanners for leaked secrets can know one."""


def new_token() -> str:
    """A random token of 256 bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def token_sha256(token: str) -> bytes:
    """What the store keeps of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
