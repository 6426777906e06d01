"""Hardware the engine model can stand for: timing coefficients, KV room and limits.

The figures are FIELD.md §2's (a fit of public vLLM measurements; the last two rows are estimates).
"""

from dataclasses import dataclass

BLOCK_TOKENS = 16
"""Tokens in one engine block: the unit of KV memory and of prefix caching."""

FREE_STEP_TOKENS = 128
"""New tokens a step computes within its base time."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """How fast an engine on some hardware is, and how much it holds.

    A step of T new tokens takes `base_ms + token_ms·max(0, T−128) + pair_ms·Σ n(k+n/2) +
    context_ms·Σ decode contexts`, where n tokens of a prompt are computed after k others.
    """

    name: str
    base_ms: float
    token_ms: float
    pair_ms: float
    context_ms: float
    kv_tokens: int
    step_budget_tokens: int
    max_sequences: int

    def __post_init__(self) -> None:
        if self.max_sequences > self.step_budget_tokens:
            raise ValueError("max_sequences must not exceed step_budget_tokens: every decode gets a token a step")
        if self.kv_tokens < BLOCK_TOKENS:
            raise ValueError(f"kv_tokens must be at least one block of {BLOCK_TOKENS}")

    def step_ms(self, new_tokens: int, pairs: float, decode_context_tokens: int) -> float:
        """Time of one step of `new_tokens` tokens, `pairs` = Σ n(k+n/2) over its prefills."""
        return (
            self.base_ms
            + self.token_ms * max(0, new_tokens - FREE_STEP_TOKENS)
            + self.pair_ms * pairs
            + self.context_ms * decode_context_tokens
        )


HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("a100-40g-8b", 9.8, 0.0666, 2.8e-6, 1.05e-4, 141_000, 2048, 256),
        Hardware("h100-8b", 5.6, 0.0215, 1.3e-6, 4.9e-5, 412_000, 8192, 1024),
        Hardware("h100-70b-tp4", 15.5, 0.0560, 1.6e-6, 3.1e-5, 430_000, 8192, 1024),
        Hardware("a100-70b-tp8", 14.3, 0.088, 2.5e-6, 3.5e-5, 427_000, 2048, 256),
        Hardware("cpu-8b", 110.0, 1.6, 6e-5, 2e-3, 60_000, 512, 256),
    )
}
"""The catalogue, by name."""
