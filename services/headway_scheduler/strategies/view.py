"""What a strategy sees: the candidates' columns."""

from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from headway_scheduler.fleet.columns import Columns, FloatColumn, Place, Slots
from headway_scheduler.index.demand import Asked

__all__ = ["Tentative", "View"]

BoolColumn = npt.NDArray[np.bool_]
_NOBODY: Final[Asked] = (np.zeros(0), np.zeros(0))
Number = TypeVar("Number", bound=np.generic)


class Tentative:
    """What requests ahead in the line will add to endpoints that they wait for: prefill and one in flight each."""

    __slots__ = ("inflight", "prefill_ms")

    def __init__(self, capacity: int) -> None:
        self.prefill_ms: FloatColumn = np.zeros(capacity)
        self.inflight: FloatColumn = np.zeros(capacity)

    def add(self, slot: int, prefill_ms: float) -> None:
        """One more waits for `slot`."""
        self.prefill_ms[slot] += prefill_ms
        self.inflight[slot] += 1.0

    def holds(self, slot: int) -> bool:
        """Does anyone wait for `slot`?"""
        return bool(self.inflight[slot])


class View:
    """The candidates' columns, gathered when asked for. Every array has one entry a candidate, in `slots`' order.

    `hit_tokens` and `similar` are found when first used: not every strategy wants the index.
    """

    __slots__ = (
        "_columns",
        "_find_demand",
        "_find_hits",
        "_find_similar",
        "_find_transfer",
        "_hits",
        "_inflight",
        "_place",
        "_random",
        "_tentative",
        "slots",
    )

    def __init__(
        self,
        columns: Columns,
        slots: Slots,
        find_hits: Callable[[Slots], FloatColumn],
        find_similar: Callable[[Slots], BoolColumn],
        random: np.random.Generator,
        tentative: Tentative | None = None,
        find_transfer: Callable[[Slots], FloatColumn | None] | None = None,
        find_demand: Callable[[], Asked] | None = None,
        place: Place | None = None,
    ) -> None:
        self.slots = slots
        self._place: Place | Slots = slots if place is None else place
        self._columns = columns
        self._find_hits = find_hits
        self._find_similar = find_similar
        self._random = random
        self._tentative = tentative
        self._find_transfer = find_transfer
        self._find_demand = find_demand
        self._hits: FloatColumn | None = None
        self._inflight: FloatColumn | None = None

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def columns(self) -> Columns:
        """The whole fleet's columns, for formulas that read them themselves."""
        return self._columns

    def read(self, column: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """A column's entries, one a candidate. They may be the fleet's own memory: use them at once, never write."""
        place = self._place
        return column[place] if isinstance(place, slice) else column.take(place)

    @property
    def tentative(self) -> Tentative | None:
        """What requests ahead in the line will add; None: there are none."""
        return self._tentative

    @property
    def inflight(self) -> FloatColumn:
        """Requests in flight: our reservations, what the engine has beyond them, handicaps, and tentative ones."""
        found = self._inflight
        if found is None:
            found = self.read(self._columns.inflight) + self._beyond()
            if self._tentative is not None:
                found = found + self.read(self._tentative.inflight)
            self._inflight = found
        return found

    @property
    def weighted_inflight(self) -> FloatColumn:
        """In flight, each counted by its task weight, 1 to 3; those of others count 1."""
        weights = self.read(self._columns.weight_micro) / 1e6
        return weights + self._beyond(weights)

    @property
    def uncapped_inflight(self) -> FloatColumn:
        """In flight, each counted by its task weight as learned, however much; those of others count 1."""
        weights = self.read(self._columns.uncapped_micro) / 1e6
        return weights + self._beyond(weights)

    @property
    def queued_prefill_ms(self) -> FloatColumn:
        """Predicted prefill still to be done there, that of requests tentatively placed included."""
        found: FloatColumn = self.read(self._columns.prefill_us) / 1e3
        return found if self._tentative is None else found + self.read(self._tentative.prefill_ms)

    @property
    def queued_work_ms(self) -> FloatColumn:
        """The same without the steps' fixed time, which prompts in one step share."""
        found: FloatColumn = self.read(self._columns.prefill_work_us) / 1e3
        return found if self._tentative is None else found + self.read(self._tentative.prefill_ms)

    @property
    def decoding(self) -> FloatColumn:
        """Requests past their first token there; those of others count as such."""
        found: FloatColumn = self.read(self._columns.decoding) + self.read(self._columns.external)
        return found

    @property
    def queued_prefill_tokens(self) -> FloatColumn:
        """Uncached prompt tokens still to be prefilled there."""
        return self.read(self._columns.prefill_tokens).astype(np.float64)

    @property
    def context_tokens(self) -> FloatColumn:
        """Context of the requests decoding there."""
        return self.read(self._columns.context_tokens).astype(np.float64)

    @property
    def running(self) -> FloatColumn:
        """Requests the engine said it runs, as of its newest sample; NaN where unknown."""
        return self._columns.running.take(self.slots)

    @property
    def waiting(self) -> FloatColumn:
        """Requests in the engine's own queue, as of its newest sample; NaN where unknown."""
        return self._columns.waiting.take(self.slots)

    @property
    def kv_use(self) -> FloatColumn:
        """KV cache in use, 0 to 1, as of the newest sample; NaN where unknown."""
        return self._columns.kv_use.take(self.slots)

    @property
    def kv_room_tokens(self) -> FloatColumn:
        """KV tokens free: capacity less what is used or reserved, whichever is more; NaN where unknown."""
        c, read = self._columns, self.read
        capacity = read(c.kv_capacity)
        used = np.fmax(read(c.kv_use) * capacity, read(c.kv_tokens))
        found: FloatColumn = capacity - used
        return found

    @property
    def memory_pressure(self) -> FloatColumn:
        """0 to 1, NaN where unknown."""
        return self._columns.memory_pressure.take(self.slots)

    @property
    def utilization(self) -> FloatColumn:
        """0 to 1, NaN where unknown."""
        return self._columns.utilization.take(self.slots)

    @property
    def heat(self) -> FloatColumn:
        """Temperature over the slowdown temperature, NaN where unknown."""
        return self._columns.heat.take(self.slots)

    @property
    def power(self) -> FloatColumn:
        """Power over its limit, NaN where unknown."""
        return self._columns.power.take(self.slots)

    @property
    def last_chosen(self) -> npt.NDArray[np.int64]:
        """Number of the decision that chose it last; 0: never."""
        return self._columns.last_chosen.take(self.slots)

    @property
    def ring(self) -> npt.NDArray[np.uint64]:
        """Hash of the endpoint's id."""
        return self._columns.ring.take(self.slots)

    @property
    def hit_tokens(self) -> FloatColumn:
        """Tokens of the prompt cached there, in any tier, as the index believes."""
        if self._hits is None:
            self._hits = self._find_hits(self.slots)
        return self._hits

    @property
    def transfer_ms(self) -> FloatColumn | None:
        """What it takes to bring hit tokens from a farther tier to the GPU, in milliseconds; None: nothing anywhere."""
        return None if self._find_transfer is None else self._find_transfer(self.slots)

    @property
    def demand(self) -> Asked:
        """How many requests in flight begin as this prompt does (see Asked)."""
        return _NOBODY if self._find_demand is None else self._find_demand()

    @property
    def similar(self) -> BoolColumn:
        """Does it hold the nearest similar fingerprint?"""
        return self._find_similar(self.slots)

    def _beyond(self, weights: FloatColumn | None = None) -> FloatColumn:
        """What counts as in flight beyond our reservations; a handicap's requests weigh what the others do."""
        columns, found = self._columns, self.read(self._columns.external)
        if not columns.handicapped:
            return found
        handicap, here = self.read(columns.handicap), float(self.read(columns.inflight).sum())
        return found + (handicap if weights is None or not here else handicap * (float(weights.sum()) / here))

    def random(self) -> FloatColumn:
        """A fresh random number in [0, 1) a candidate."""
        return self._random.random(len(self.slots))
