"""Jittered exponential backoff."""

import random
from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(slots=True)
class Backoff:
    """Delays between attempts: uniform in (0, min(max_s, initial_s · 2^attempts)] ("full jitter")."""

    rng: random.Random
    initial_s: float = 0.1
    max_s: float = 5.0
    attempts: int = 0

    def next_s(self) -> float:
        """Return the next delay in seconds."""
        ceiling = min(self.max_s, self.initial_s * 2.0 ** min(self.attempts, 30))
        self.attempts += 1
        return ceiling * (1.0 - self.rng.random())

    def reset(self) -> None:
        """Start over after a success."""
        self.attempts = 0
