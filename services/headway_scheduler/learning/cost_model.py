"""How long work takes on each endpoint (FIELD.md section 1), from priors and from what was reported.

`timing` turns reports into observations, an `Estimator` an endpoint turns those into coefficients, and the coefficients
are written into the fleet's columns, where strategies read them.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from headway_scheduler.domain.report import Usage
from headway_scheduler.fleet.columns import Columns, FloatColumn, Slots
from headway_scheduler.learning.estimator import Estimator
from headway_scheduler.learning.parts import Parts
from headway_scheduler.learning.priors import Coefficients
from headway_scheduler.learning.saved import SPEEDS_FORMAT, SavedSpeeds
from headway_scheduler.learning.timing import Timing
from headway_scheduler.learning.values import Flight, Observation

__all__ = ["CostModel", "prefill_ms", "prefill_work_ms"]

_OVERHEAD_MS: Final = 5.0
"""The unit of the data plane's own time: networks and proxies take a few milliseconds."""


def prefill_ms(columns: Columns, slots: Slots, uncached: FloatColumn, hit: FloatColumn) -> FloatColumn:
    """Time to prefill `uncached` tokens after `hit` cached ones on each slot, alone on the engine; milliseconds.

    `p = tok·n + pair·n·(hit + n/2) + base·max(1, n/budget)`.
    """
    steps = np.maximum(1.0, uncached / columns.budget_tokens[slots])
    result: FloatColumn = prefill_work_ms(columns, slots, uncached, hit) + columns.base_ms[slots] * steps
    return result


def prefill_work_ms(columns: Columns, slots: Slots, uncached: FloatColumn, hit: FloatColumn) -> FloatColumn:
    """The same without the steps' fixed time, which prompts that are prefilled in one step share; milliseconds."""
    result: FloatColumn = columns.tok_ms[slots] * uncached + columns.pair_ms[slots] * uncached * (hit + uncached / 2)
    return result


@dataclass(slots=True)
class _Installed:
    """Who is on a slot: `engine` is the endpoint's id and its engine's name, `key` that and the engine's version."""

    engine: str
    key: str
    prior: Coefficients
    estimator: Estimator | None = None


@dataclass(slots=True)
class CostModel:
    """Writes the learned columns. `time_scale` divides every time: an emulated fleet may run faster than life.

    What is learned is kept by endpoint and engine version and survives restarts through its parts; without `learn`, the
    priors stay. A part holds all versions of its engines, the newest one last. Beyond `most_kept` the oldest goes.
    """

    columns: Columns
    time_scale: float = 1.0
    learn: bool = True
    most_kept: int = 20_000
    _learned: OrderedDict[str, Estimator] = field(default_factory=OrderedDict)
    _newest: dict[str, str] = field(default_factory=dict)
    _parts: Parts = field(default_factory=lambda: Parts(_engine_of))
    _installed: dict[int, _Installed] = field(default_factory=dict)
    _timing: Timing = field(init=False)

    def __post_init__(self) -> None:
        self._timing = Timing(self.columns, self.observe)

    def install(self, slot: int, engine: str, version: str, prior: Coefficients) -> None:
        """An endpoint took `slot`: write its coefficients. A new engine version starts from what the old one taught."""
        found = _Installed(engine, f"{engine} {version.replace(' ', '_')}", prior)
        before = self._installed.get(slot)
        if before is None or before.key != found.key:
            self._timing.forget(slot)
        if self.learn:
            found.estimator = self._known(found)
        self._installed[slot] = found
        if np.isnan(self.columns.kv_capacity[slot]):
            self.columns.kv_capacity[slot] = prior.kv_tokens
        self._write(slot)

    # Requests

    def sent(self, slot: int, uncached: float, hit: float, now: float, *, usable: bool = True) -> Flight:
        """A request was given to `slot`; to be called before it is counted there. `usable`: was it sent just now?"""
        if not self.learn:
            return Flight(slot, now, uncached, hit, alone=False, usable=False)
        return self._timing.sent(slot, uncached, hit, now, usable=usable)

    def first_token(self, flight: Flight, ttft_ms: float | None, now: float) -> None:
        """Its first token came."""
        if ttft_ms is not None and self.learn:
            self._timing.first_token(flight, ttft_ms, now)

    def finished(
        self, flight: Flight, usage: Usage, ttft_ms: float | None, duration_ms: float | None, now: float
    ) -> None:
        """It ended well."""
        if self.learn:
            tokens = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            self._timing.finished(flight, now, ttft_ms, duration_ms, *tokens)

    def lost(self, flight: Flight, now: float) -> None:
        """It ended otherwise, or goes elsewhere."""
        if self.learn:
            self._timing.lost(flight, now)

    def observe(self, slot: int, observation: Observation) -> None:
        """So much work took so long on `slot`."""
        installed = self._installed.get(slot)
        if not self.learn or installed is None:
            return
        estimator = installed.estimator
        if estimator is None:
            estimator = installed.estimator = Estimator(self._prior(installed))
            self._keep(installed)
        self._parts.touched.add(installed.key)
        if estimator.observe(observation.amounts, observation.actual_ms, observation.noise_ms):
            self._write(slot)

    def prefill_ms_at(self, slot: int, uncached: float, hit: float) -> float:
        """`prefill_ms` for one slot, in plain numbers."""
        work_ms, steps_ms = self.prefill_parts_ms_at(slot, uncached, hit)
        return work_ms + steps_ms

    def prefill_parts_ms_at(self, slot: int, uncached: float, hit: float) -> tuple[float, float]:
        """The two parts of it: `prefill_work_ms`, and the steps' fixed time."""
        c = self.columns
        steps = max(1.0, uncached / c.budget_tokens.item(slot))
        work_ms = uncached * (c.tok_ms.item(slot) + c.pair_ms.item(slot) * (hit + uncached / 2))
        return work_ms, c.base_ms.item(slot) * steps

    # State

    def dump(self) -> bytes:
        """All that is learned, as one document."""
        return self._document(self._learned)

    def changed(self) -> list[int]:
        """The parts that are not saved as they are."""
        return self._parts.changed()

    def dump_part(self, part: int) -> bytes:
        """A part's document, for the store; it has not changed any more."""
        return self._document(self._parts.take(part))

    def put_back(self, part: int) -> None:
        """It was dumped, and could not be saved."""
        self._parts.put_back(part)

    def touch_all(self) -> None:
        """Nothing is saved in parts: it came from a version that knew none."""
        self._parts.touch_all()

    def restore(self, state: bytes) -> None:
        """Take over a document. Raises ValueError, and changes nothing, where it cannot be read."""
        self._replace(_read(state))

    def restore_parts(self, states: Mapping[str, bytes]) -> dict[str, ValueError]:
        """Take over these documents; where they say different things, the later one counts.

        Returns what is wrong with those that cannot be read. If that is all of them, nothing changes.
        """
        found: dict[str, Estimator] = {}
        problems: dict[str, ValueError] = {}
        for name, state in states.items():
            try:
                read = _read(state)
            except ValueError as error:
                problems[name] = error
            else:
                for key, estimator in read.items():
                    found.pop(key, None)  # the last of an engine's versions is its newest
                    found[key] = estimator
        if len(problems) < len(states):
            self._replace(found)
        return problems

    # Inside

    def _document(self, keys: Iterable[str]) -> bytes:
        found = ((key, self._learned[key]) for key in keys)
        return msgspec.json.encode(
            SavedSpeeds(SPEEDS_FORMAT, {key: each.save() for key, each in found if each.observations})
        )

    def _replace(self, learned: dict[str, Estimator]) -> None:
        self._learned, self._parts = OrderedDict(learned), Parts(_engine_of)
        for key in learned:
            self._parts.place(key)
        self._parts.settle()
        if not self.learn:
            return
        self._newest = {_engine_of(key): key for key in learned}
        for slot, installed in self._installed.items():
            installed.estimator = self._known(installed)
            self._write(slot)

    def _prior(self, installed: _Installed) -> tuple[float, float, float, float, float]:
        prior, scale = installed.prior, self.time_scale
        return prior.tok_ms / scale, prior.base_ms / scale, prior.pair_ms / scale, prior.ctx_ms / scale, _OVERHEAD_MS

    def _known(self, installed: _Installed) -> Estimator | None:
        """What was learned there: of its version, else of the engine's latest other one. Of other hardware: nothing."""
        found = self._learned.get(installed.key)
        newest = self._learned.get(self._newest.get(installed.engine, ""))
        if found is None and newest is not None:
            found = Estimator.load(newest.save())
            found.doubt()
        if found is None or not np.allclose(found.prior, self._prior(installed), rtol=1e-6, atol=0.0):
            return None
        installed.estimator = found
        self._keep(installed)
        return found

    def _keep(self, installed: _Installed) -> None:
        """The version there now is the engine's newest. Beyond the limit, the one not seen for longest goes."""
        key = installed.key
        if key not in self._learned or self._newest.get(installed.engine) != key:
            self._parts.place(key)
        if installed.estimator is not None:
            self._learned[key] = installed.estimator
        self._learned.move_to_end(key)
        self._newest[installed.engine] = key
        while len(self._learned) > self.most_kept:
            oldest, _ = self._learned.popitem(last=False)
            self._parts.remove(oldest)
            if self._newest.get(_engine_of(oldest)) == oldest:
                del self._newest[_engine_of(oldest)]

    def _write(self, slot: int) -> None:
        c, installed = self.columns, self._installed[slot]
        estimator = installed.estimator
        found = self._prior(installed) if estimator is None else estimator.coefficients
        c.tok_ms[slot], c.base_ms[slot], c.pair_ms[slot], c.ctx_ms[slot], _ = found
        c.budget_tokens[slot] = installed.prior.budget_tokens


def _engine_of(key: str) -> str:
    return key.rpartition(" ")[0]


def _read(state: bytes) -> dict[str, Estimator]:
    saved = msgspec.json.decode(state, type=SavedSpeeds)
    if saved.format != SPEEDS_FORMAT:
        raise ValueError(f"format {saved.format} is not {SPEEDS_FORMAT}")
    return {key: Estimator.load(each) for key, each in saved.endpoints.items()}
