"""The live fleet as columns: one entry an endpoint slot, so that a decision is arithmetic over arrays.

Three kinds of columns, three writers. *Booked*: exact integers, written by the ledger's transitions alone. *Sampled*:
floats from telemetry, NaN where unknown, written by the fleet. *Learned*: the cost model's coefficients.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BOOKED", "Columns", "FloatColumn", "IntColumn", "Load", "Place", "Pool", "Slots"]

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

    # Derived: kept by `load`.
    touched: set[int] = field(default_factory=set)
    """Slots of which something changed that `load` follows from: whoever writes it adds the slot."""
    handicapped: set[int] = field(default_factory=set)
    """Slots with a handicap: whoever writes it keeps this."""
    _load: FloatMatrix | None = None

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
        self._load = None

    def reset(self, slot: int) -> None:
        """Make `slot` as new. Its booked columns must be zero already: every reservation there has ended."""
        fresh = Columns()
        for name in _COLUMNS:
            getattr(self, name)[slot] = getattr(fresh, name)[0]
        self.touched.add(slot)
        self.handicapped.discard(slot)

    def load(self) -> FloatMatrix:
        """What every price is made of, for all slots: a row for each of Load's fields. Not to be written or kept.

        Between two decisions two or three slots change, so only theirs are computed anew.
        """
        found = self._load
        if found is None or len(self.touched) > self.capacity >> 4:
            found = self._load = self._whole_load()
        else:
            for slot in self.touched:
                self._update(found, slot)
        self.touched.clear()
        return found

    def _whole_load(self) -> FloatMatrix:
        decoding, queued = self.decoding + self.external, self.prefill_tokens.astype(np.float64)
        return np.stack(
            (
                self.inflight + self.external + self.handicap,
                decoding,
                queued,
                self.prefill_work_us / 1e3,
                self.base_ms + self.ctx_ms * self.context_tokens,
                (decoding > 0.0) | (queued > 0.0),
                self.tok_ms,
                self.base_ms,
                self.pair_ms,
                self.ctx_ms,
                self.budget_tokens,
            )
        )

    def _update(self, load: FloatMatrix, slot: int) -> None:
        """The same for one slot, in plain numbers."""
        external, base_ms, ctx_ms = self.external.item(slot), self.base_ms.item(slot), self.ctx_ms.item(slot)
        decoding, queued = self.decoding.item(slot) + external, self.prefill_tokens.item(slot)
        load[:, slot] = (
            self.inflight.item(slot) + external + self.handicap.item(slot),
            decoding,
            queued,
            self.prefill_work_us.item(slot) / 1e3,
            base_ms + ctx_ms * self.context_tokens.item(slot),
            decoding > 0.0 or queued > 0,
            self.tok_ms.item(slot),
            base_ms,
            self.pair_ms.item(slot),
            ctx_ms,
            self.budget_tokens.item(slot),
        )


class Load(NamedTuple):
    """What every price is made of, in the order of `Columns.load`'s rows; in milliseconds and tokens.

    `inflight` and `decoding` count those of others too, and `inflight` handicaps; `step_ms`: a step without new tokens;
    `busy`: 1 where anything is queued or decodes, else 0.
    """

    inflight: FloatColumn
    decoding: FloatColumn
    queued_tokens: FloatColumn
    queued_work_ms: FloatColumn
    step_ms: FloatColumn
    busy: FloatColumn
    tok_ms: FloatColumn
    base_ms: FloatColumn
    pair_ms: FloatColumn
    ctx_ms: FloatColumn
    budget_tokens: FloatColumn


_COLUMNS: Final = [each.name for each in fields(Columns) if each.name not in ("touched", "handicapped", "_load")]
