"""The live fleet as columns: one entry an endpoint slot, so that a decision is arithmetic over arrays.

Three kinds of columns, three writers. *Booked*: exact integers, written by the ledger's transitions alone. *Sampled*:
floats from telemetry, NaN where unknown, written by the fleet. *Learned*: the cost model's coefficients.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["BOOKED", "Columns", "FloatColumn", "FloatMatrix", "IntColumn", "Place", "Pool", "Slots"]

IntColumn = npt.NDArray[np.int64]
FloatColumn = npt.NDArray[np.float64]
FloatMatrix = npt.NDArray[np.float64]
BoolColumn = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.int32]
Place = slice | npt.NDArray[np.integer[Any]]
"""What finds some slots' entries in a column: a slice where they lie side by side, which copies nothing."""

BOOKED: Final = (
    "inflight",
    "weight_micro",
    "prefill_us",
    "prefill_tokens",
    "context_tokens",
    "kv_tokens",
    "uncapped_micro",
    "decoding",
    "prefill_work_us",
)
_INITIAL_CAPACITY: Final = 16


def _ints() -> IntColumn:
    return np.zeros(_INITIAL_CAPACITY, np.int64)


def _unknown() -> FloatColumn:
    return np.full(_INITIAL_CAPACITY, np.nan)


def _zeros() -> FloatColumn:
    return np.zeros(_INITIAL_CAPACITY)


def _flags() -> BoolColumn:
    return np.zeros(_INITIAL_CAPACITY, np.bool_)


def _hashes() -> npt.NDArray[np.uint64]:
    return np.zeros(_INITIAL_CAPACITY, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Some endpoints, by slot in ascending order, and where their entries lie in every column."""

    slots: Slots
    place: Place

    @classmethod
    def of(cls, slots: Slots) -> "Pool":
        """The endpoints on these slots."""
        index = slots.astype(np.intp)
        if len(index) and int(index[-1]) - int(index[0]) + 1 == len(index) and bool((np.diff(index) == 1).all()):
            return cls(slots, slice(int(index[0]), int(index[-1]) + 1))
        return cls(slots, index)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class Columns:
    """All columns, of one length, `capacity`; entries of unused slots mean nothing."""

    # Booked: what reservations add up to.
    inflight: IntColumn = field(default_factory=_ints)
    """Reservations not ended."""
    weight_micro: IntColumn = field(default_factory=_ints)
    """Their task weights, 1 to 3 each, in millionths."""
    prefill_us: IntColumn = field(default_factory=_ints)
    """Predicted prefill not yet done, in microseconds."""
    prefill_tokens: IntColumn = field(default_factory=_ints)
    """Uncached prompt tokens not yet prefilled."""
    context_tokens: IntColumn = field(default_factory=_ints)
    """Context of the requests in decode, in tokens."""
    kv_tokens: IntColumn = field(default_factory=_ints)
    """KV tokens the reservations need: prompt, less what others share, and half of the output, its mean over time."""
    uncapped_micro: IntColumn = field(default_factory=_ints)
    """Their task weights as learned, whatever they are, in millionths."""
    decoding: IntColumn = field(default_factory=_ints)
    """Those past their first token."""
    prefill_work_us: IntColumn = field(default_factory=_ints)
    """Predicted prefill not yet done without its steps' fixed time, which prompts in one step share; microseconds."""

    # Sampled: what telemetry says.
    external: FloatColumn = field(default_factory=_zeros)
    """Requests in flight that no reservation of ours accounts for."""
    running: FloatColumn = field(default_factory=_unknown)
    """Requests the engine runs."""
    waiting: FloatColumn = field(default_factory=_unknown)
    """Requests in the engine's own queue."""
    kv_use: FloatColumn = field(default_factory=_unknown)
    """KV cache in use, 0 to 1."""
    kv_capacity: FloatColumn = field(default_factory=_unknown)
    """KV cache in tokens."""
    memory_pressure: FloatColumn = field(default_factory=_unknown)
    """KV use where the engine reports it, else the devices' memory use; 0 to 1."""
    utilization: FloatColumn = field(default_factory=_unknown)
    """Busiest device, 0 to 1."""
    temperature_c: FloatColumn = field(default_factory=_unknown)
    """Hottest device."""
    heat: FloatColumn = field(default_factory=_unknown)
    """Hottest device's temperature over its slowdown temperature; 1 and more: it slows down."""
    power: FloatColumn = field(default_factory=_unknown)
    """Power over the limit, 0 to 1."""
    sampled_at: FloatColumn = field(default_factory=_unknown)
    """Scheduler clock of the newest sample, in seconds."""

    # Kept by the fleet.
    open: BoolColumn = field(default_factory=_flags)
    """No hard guard stands: it may be chosen."""
    handicap: FloatColumn = field(default_factory=_zeros)
    """Requests that it counts in flight beyond those it has: it failed lately, or starts slowly."""
    last_chosen: IntColumn = field(default_factory=_ints)
    """Number of the decision that chose it last; 0: never."""
    ring: npt.NDArray[np.uint64] = field(default_factory=_hashes)
    """Hash of the endpoint's id: its place for consistent hashing."""

    # Learned: coefficients of the cost model (FIELD.md section 1), in milliseconds and tokens.
    tok_ms: FloatColumn = field(default_factory=_unknown)
    """Prefill per token, `a`."""
    base_ms: FloatColumn = field(default_factory=_unknown)
    """One step's fixed time, `base`."""
    pair_ms: FloatColumn = field(default_factory=_unknown)
    """Attention per pair of tokens, `c_att`."""
    ctx_ms: FloatColumn = field(default_factory=_unknown)
    """Decode per token of context and step, `c_ctx`."""
    budget_tokens: FloatColumn = field(default_factory=_unknown)
    """New tokens a step may hold, `budget`."""

    handicapped: set[int] = field(default_factory=set)
    """Slots with a handicap: whoever writes it keeps this."""

    @property
    def capacity(self) -> int:
        """How many slots there is room for."""
        return len(self.inflight)

    def grow(self) -> None:
        """Double the room."""
        fresh = Columns()
        for name in _COLUMNS:
            old, blank = getattr(self, name), getattr(fresh, name)
            setattr(self, name, np.concatenate([old, np.full(len(old), blank[0], old.dtype)]))

    def reset(self, slot: int) -> None:
        """Make `slot` as new. Its booked columns must be zero already: every reservation there has ended."""
        fresh = Columns()
        for name in _COLUMNS:
            getattr(self, name)[slot] = getattr(fresh, name)[0]
        self.handicapped.discard(slot)


_COLUMNS: Final = [each.name for each in fields(Columns) if each.name != "handicapped"]
