"""Adaptive's price of each candidate, compiled. adaptive.py explains the formula; here it is computed.

Plain loops over the fleet's own columns. At 100 endpoints that takes 2 µs where the same in numpy took 30, nearly all
of it to call numpy some 40 times; at 10,000 each endpoint is read once, where numpy passes over its columns 30 times.
"""

from typing import Final

import numpy as np

from headway_scheduler.compiling import compiled
from headway_scheduler.fleet.columns import FloatColumn, FloatMatrix, IntColumn, Slots

__all__ = [
    "COST",
    "NONE",
    "PREFILL",
    "STEPS_SEEN",
    "TTFT",
    "all_finite",
    "any_nan",
    "at_depth",
    "invested_by_depth",
    "price",
]

COST: Final = 0
TTFT: Final = 1
PREFILL: Final = 2
"""Rows of what `price` finds."""
NONE: Final = np.zeros(0)
"""Nothing of the kind anywhere."""
STEPS_SEEN: Final = 1.5
"""Steps that a request meets before its first token: its own, and half of the one it arrives in."""

_INTS: Final = ", ".join(["int64[::1]"] * 5)
_FLOATS: Final = ", ".join(["float64[::1]"] * 6)


@compiled("float64(float64, float64[::1], float64[::1])")
def at_depth(held: float, depths: FloatColumn, invested: FloatColumn) -> float:
    """`invested` at a depth of `held` tokens, linear between the levels."""
    for level in range(len(depths)):
        if held < depths[level]:
            below = depths[level - 1] if level else 0.0
            slope = (invested[level + 1] - invested[level]) / (depths[level] - below)
            return float(slope * (held - below) + invested[level])
    return float(invested[len(depths)])


@compiled("float64[::1](float64[::1], float64[::1], float64[::1], float64)")
def invested_by_depth(held: FloatColumn, depths: FloatColumn, asking: FloatColumn, uses: float) -> FloatColumn:
    """Of a prompt's first tokens, up to each depth, those whose prefill serves others too; one more than levels.

    Each request in flight with a prefix stands for `uses` to come, shared among its holders and a new one: that share
    of its prefill, less one's own, is an investment.
    """
    found = np.zeros(len(depths) + 1)
    for level in range(len(depths)):
        holders = 0
        for tokens in held:
            holders += tokens >= depths[level]
        users = uses * asking[level] / (holders + 1)
        below = depths[level - 1] if level else 0.0
        found[level + 1] = found[level] + (1.0 - 1.0 / max(1.0, users)) * (depths[level] - below)
    return found


@compiled(
    f"void({_INTS}, {_FLOATS}, int32[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1],"
    " float64[::1], int64, float64, float64, float64, float64[:,::1])"
)
def price(
    inflight: IntColumn,
    decoding: IntColumn,
    prefill_tokens: IntColumn,
    prefill_work_us: IntColumn,
    context_tokens: IntColumn,
    external: FloatColumn,
    tok_ms: FloatColumn,
    base_ms: FloatColumn,
    pair_ms: FloatColumn,
    ctx_ms: FloatColumn,
    budget_tokens: FloatColumn,
    slots: Slots,
    held: FloatColumn,
    transfer_ms: FloatColumn,
    ahead: FloatColumn,
    ahead_ms: FloatColumn,
    depths: FloatColumn,
    asking: FloatColumn,
    prompt_tokens: int,
    free_tokens: float,
    externality: float,
    replication: float,
    found: FloatMatrix,
) -> None:
    """Write cost, TTFT and prefill of each candidate, in milliseconds, to a column of `found`.

    The first eleven are the fleet's, by slot. `slots`, `held` (cached tokens) and `transfer_ms` (what it takes to bring
    these to the GPU) have an entry a candidate. `ahead` and `ahead_ms` are by slot: requests tentatively placed there,
    and their prefill. `asking[k]` requests in flight begin with the prompt's first `depths[k]` tokens, the shortest
    first. `transfer_ms`, `ahead` with `ahead_ms`, and `depths` with `asking` may be NONE.
    """
    invested = invested_by_depth(held, depths, asking, replication)
    most, everything = float(max(0, prompt_tokens - 1)), invested[len(depths)]
    for number in range(len(slots)):
        slot = slots[number]
        here, decodes = inflight[slot] + external[slot], decoding[slot] + external[slot]
        queued, queued_ms = float(prefill_tokens[slot]), prefill_work_us[slot] / 1e3
        tok, base, ctx, budget = tok_ms[slot], base_ms[slot], ctx_ms[slot], budget_tokens[slot]
        step = base + ctx * context_tokens[slot]
        busy = 1.0 if decodes > 0.0 or queued > 0.0 else 0.0
        if len(ahead):
            here, queued_ms = here + ahead[slot], queued_ms + ahead_ms[slot]
        hit = min(held[number], most)
        uncached = prompt_tokens - hit
        work = tok * uncached + pair_ms[slot] * uncached * (hit + uncached / 2)
        prefill = work + base * max(1.0, uncached / budget)
        # When the first token will be there.
        steps = max(1.0, (queued + uncached) / budget)
        free = (free_tokens - decodes) * tok * steps
        ttft = max(0.0, queued_ms + work - free) + step * (steps + 0.5 * busy)
        if len(transfer_ms):
            ttft, prefill = ttft + transfer_ms[number], prefill + transfer_ms[number]
        delays = externality * prefill + STEPS_SEEN * (ctx * prompt_tokens + tok)
        cost = ttft + delays * here
        if everything > 0.0:
            cost -= tok * min(everything - at_depth(held[number], depths, invested), uncached)
        found[COST, number], found[TTFT, number], found[PREFILL, number] = cost, ttft, prefill


@compiled("boolean(float64[::1])")
def any_nan(column: FloatColumn) -> bool:
    """Is one of them not a number?"""
    for each in column:  # noqa: SIM110 - numba compiles no generators
        if np.isnan(each):
            return True
    return False


@compiled("boolean(float64[::1])")
def all_finite(column: FloatColumn) -> bool:
    """Is each of them neither infinite nor not a number?"""
    for each in column:  # noqa: SIM110
        if not np.isfinite(each):
            return False
    return True
