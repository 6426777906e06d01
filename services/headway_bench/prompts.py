"""The prompts that benchmarks send: a few, over and over, that begin alike, as conversations do."""

import random
from typing import Final

__all__ = ["prompts_of"]

_COUNT: Final = 256
_SHARED: Final = 512
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz "


def prompts_of(size: int, count: int = _COUNT) -> list[bytes]:
    """`count` prompts of `size` bytes, the same in every run."""
    dice = random.Random(7)  # the same requests in every run
    shared = ("You are a helpful assistant. " * 20)[:_SHARED].encode()
    count = max(4, min(count, 32_000_000 // max(1, size)))
    return [(shared + "".join(dice.choices(_LETTERS, k=max(0, size - _SHARED))).encode())[:size] for _ in range(count)]
