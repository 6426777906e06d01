"""What an endpoint's speed is believed to be before anything was learned there.

Coefficients of one engine step, in milliseconds and tokens (FIELD.md section 2, measured on public engines):
`step = base + tok·max(0, T−128) + pair·Σ n(k+n/2) + ctx·Σ decode context`.
"""

from dataclasses import dataclass
from typing import Final

__all__ = ["DEFAULT", "TRANSFER_MS", "Coefficients", "prior"]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One engine's speed; the names of the columns."""

    tok_ms: float
    base_ms: float
    pair_ms: float
    ctx_ms: float
    budget_tokens: float
    kv_tokens: float


_BY_HARDWARE: Final = {
    "a100-40g-8b": Coefficients(0.0666, 9.8, 2.8e-6, 1.05e-4, 2048, 141_000),
    "h100-8b": Coefficients(0.0215, 5.6, 1.3e-6, 4.9e-5, 8192, 412_000),
    "h100-70b-tp4": Coefficients(0.0560, 15.5, 1.6e-6, 3.1e-5, 8192, 430_000),
    "a100-70b-tp8": Coefficients(0.088, 14.3, 2.5e-6, 3.5e-5, 2048, 427_000),
    "cpu-8b": Coefficients(1.6, 110.0, 6e-5, 2e-3, 512, 60_000),
}
_BY_PRODUCT: Final = (("H100", "h100-8b"), ("H200", "h100-8b"), ("A100", "a100-40g-8b"))
FREE_TOKENS: Final = 128.0
"""New tokens a step computes within its base time (FIELD.md section 2)."""
DEFAULT: Final = _BY_HARDWARE["a100-40g-8b"]
TRANSFER_MS: Final[tuple[float, ...]] = (0.0, 0.005, 0.05, 0.02)
"""To bring one cached token to the GPU from: the GPU, the host, a disk, another machine; in milliseconds.

By sizes and links, not measured: 128 KiB a token (8B, 16 bit) over PCIe at 25 GB/s, NVMe at 2.5, 50 Gbit/s.
"""


def prior(hardware: str, product: str, is_cpu: bool) -> Coefficients:
    """The prior of a hardware key; else of the device's product name; else a host's CPU or an A100."""
    if hardware in _BY_HARDWARE:
        return _BY_HARDWARE[hardware]
    if is_cpu:
        return _BY_HARDWARE["cpu-8b"]
    return next((_BY_HARDWARE[key] for mark, key in _BY_PRODUCT if mark in product), DEFAULT)
