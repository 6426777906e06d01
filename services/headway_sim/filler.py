"""Deterministic text of a known size: answers of the emulator, prompts of traces and workloads."""

import random
from functools import cache

from headway_sim.engine import TOKEN_BYTES

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FILLER_TOKENS = 1 << 14


def filler_text(seed: int, start_token: int, end_token: int) -> str:
    """Tokens `start_token` to `end_token` of the text that `seed` gives: four bytes each, plain ASCII.

    Seeds that are equal modulo 16,384 give equal texts.
    """
    filler = _filler()
    offset = seed % _FILLER_TOKENS
    parts = []
    position = start_token
    while position < end_token:
        begin = (offset + position) % _FILLER_TOKENS
        count = min(end_token - position, _FILLER_TOKENS - begin)
        parts.append(filler[begin * TOKEN_BYTES : (begin + count) * TOKEN_BYTES])
        position += count
    return "".join(parts)


def unique_text(serial: int, tokens: int) -> str:
    """`tokens` tokens that no other serial shares from the first bytes on.

    The serial comes first, its fastest digit foremost: texts of neighbouring serials differ at once.
    """
    label = f"{serial:016x}"[::-1]
    size = tokens * TOKEN_BYTES
    if size <= len(label):
        return label[:size]
    return label + filler_text(serial, 0, tokens - len(label) // TOKEN_BYTES)


@cache
def _filler() -> str:
    """A fixed stream of three-letter words; every text is a stretch of it."""
    width = TOKEN_BYTES - 1
    letters = random.Random(0).choices(_LETTERS, k=_FILLER_TOKENS * width)
    return "".join(" " + "".join(letters[start : start + width]) for start in range(0, len(letters), width))
