"""The strategies as configured: built once per change, found by binding, run with a safety net.

A strategy that is disabled, raises, answers nonsense or exceeds its time budget is stood in for by the classic its
configuration names; one that keeps failing is tripped for a while and says so.
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import structlog
from pydantic import ValidationError

from headway_scheduler.domain.desired import DesiredState, StrategyConfig
from headway_scheduler.domain.request import Request
from headway_scheduler.errors import InvalidField, UnknownResource
from headway_scheduler.fleet.columns import FloatColumn
from headway_scheduler.strategies.base import BindsLate, Costs, Priced, Strategy
from headway_scheduler.strategies.pricing import all_finite, any_nan
from headway_scheduler.strategies.stopwatch import Stopwatch
from headway_scheduler.strategies.view import View

__all__ = ["Bound", "Installed", "StrategyRegistry"]

DEFAULT_BUDGET_US: Final = 20_000
TRIP_AFTER: Final = 5
TRIPPED_S: Final = 30.0
_LONGEST_ERROR: Final = 500

log = structlog.get_logger()

_LAST_RESORT: Final = StrategyConfig("round_robin", "round_robin", fallback_algorithm="round_robin")
_PLAIN: Final = StrategyConfig("bypass", "least_request", fallback_algorithm="round_robin")
"""For whoever asks although it is bypassed: what its data plane would do by itself."""


@dataclass(slots=True, eq=False)
class Installed:
    """A configured strategy, ready to price, and how it has done."""

    config: StrategyConfig
    strategy: Strategy
    fallback: Strategy
    window_ms: float | None = None
    decisions: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    tripped_until: float | None = None
    last_error: str = ""
    shadow_decisions: int = 0
    shadow_agreed: int = 0
    shadow_predicted: int = 0
    """Of these, those for which it predicts TTFT: summed up, where it would have sent them and where they went."""
    shadow_ttft_ms: float = 0.0
    shadow_taken_ttft_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """What applies to a request: the strategy that decides, and those that only watch."""

    active: Installed
    shadows: tuple[Installed, ...] = ()


class StrategyRegistry:
    """All strategies by id.

    `timer` measures CPU seconds of this thread, so that a busy host trips nothing; `wall` what went by meanwhile, at
    less cost (see Stopwatch). Without it, `timer` is both.
    """

    def __init__(
        self,
        algorithms: Mapping[str, type[Strategy]],
        timer: Callable[[], float],
        wall: Callable[[], float] | None = None,
    ) -> None:
        self.algorithms = algorithms
        self.installed: dict[str, Installed] = {}
        self.stopwatch = Stopwatch(timer, wall or timer)
        self._desired = DesiredState()
        self._bound: dict[tuple[str, str], Bound] = {}
        self._last_resort = self._build(_LAST_RESORT)
        self._plain = self._build(_PLAIN) if _PLAIN.algorithm in algorithms else self._last_resort

    # Configuration

    def check(self, config: StrategyConfig) -> None:
        """Raise InvalidField, naming the field, unless `config` can be built."""
        self._build(config)

    def set_desired(self, desired: DesiredState) -> list[tuple[str, str]]:
        """Take over strategies and bindings; returns (id, problem) of those that cannot be built here.

        A strategy whose new configuration cannot be built (an algorithm this scheduler lacks) stays as it was.
        """
        problems = []
        kept: dict[str, Installed] = {}
        for config in desired.strategies.values():
            before = self.installed.get(config.id)
            if before is not None and before.config == config:
                kept[config.id] = before
                continue
            try:
                kept[config.id] = self._build(config)
            except InvalidField as error:
                problems.append((config.id, error.message))
                if before is not None:
                    kept[config.id] = before
        self.installed, self._desired = kept, desired
        self._bound.clear()
        return problems

    def bound(self, tenant: str, model: str) -> Bound:
        """What applies; the most specific binding wins: tenant and model, tenant, GPU group, model, default."""
        key = (tenant, model)
        found = self._bound.get(key)
        if found is None:
            found = self._bound[key] = self._resolve(tenant, model)
        return found

    def get(self, strategy: str, field: str) -> Installed:
        """The strategy of this id. Raises UnknownResource for `field`."""
        found = self.installed.get(strategy)
        if found is None:
            raise UnknownResource(f"strategies/{strategy}", field)
        return found

    # Pricing

    def price(self, installed: Installed, request: Request, view: View, now: float) -> Priced:
        """Price with this strategy, or with what stands in for it."""
        reason = self._unusable(installed, now)
        if not reason:
            budget_us = installed.config.time_budget_us or DEFAULT_BUDGET_US
            started = self.stopwatch.start(budget_us / 1e6)
            try:
                costs = _checked(installed.strategy.cost(request, view, now), len(view))
                spent_s = self.stopwatch.over(started, budget_us / 1e6)
            except Exception as error:  # a strategy may be anyone's code: nothing it raises may lose the request
                reason = f"failed: {type(error).__name__}"
                installed.last_error = _described(error)
            else:
                if spent_s is None:
                    installed.decisions += 1
                    installed.failures_in_a_row = 0
                    installed.tripped_until = None
                    return Priced(costs, installed.config.id, installed.strategy.guards, window_ms=installed.window_ms)
                reason = "over its time budget"
                installed.last_error = f"took {spent_s * 1e6:.0f} of {budget_us} µs"
            self._failed(installed, now)
        stand_in = installed.fallback
        try:
            costs = _checked(stand_in.cost(request, view, now), len(view))
        except Exception as error:  # so may the classic that a third party brought
            installed.last_error = _described(error)
            stand_in = self._last_resort.strategy
            costs = stand_in.cost(request, view, now)
        return Priced(costs, stand_in.name, stand_in.guards, installed.config.id, reason)

    def watch(self, shadow: Installed, request: Request, view: View, now: float, chosen: int) -> None:
        """Let a shadow price what was just decided; remember if it agreed on `chosen`, and what it predicts."""
        priced = self.price(shadow, request, view, now)
        if not priced.fell_back_from:
            shadow.shadow_decisions += 1
            cost, ttft = priced.costs.cost, priced.costs.predicted_ttft_ms
            would = int(cost.argmin())
            shadow.shadow_agreed += bool(cost[chosen] <= cost[would])
            if ttft is not None:
                shadow.shadow_predicted += 1
                shadow.shadow_ttft_ms += ttft.item(would)
                shadow.shadow_taken_ttft_ms += ttft.item(chosen)

    # Inside

    def _build(self, config: StrategyConfig) -> Installed:
        algorithm = self.algorithms.get(config.algorithm)
        if algorithm is None:
            known = ", ".join(sorted(self.algorithms))
            raise InvalidField("strategy.algorithm", f"{config.algorithm!r} is none of {known}")
        fallback = self.algorithms.get(config.fallback_algorithm)
        if fallback is None or not fallback.classic:
            classics = ", ".join(sorted(name for name, each in self.algorithms.items() if each.classic))
            raise InvalidField("strategy.fallback_algorithm", f"{config.fallback_algorithm!r} is none of {classics}")
        try:
            parameters = algorithm.parameters_type.model_validate(dict(config.parameters))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            raise InvalidField(f"strategy.parameters.{path}", first["msg"]) from None
        try:
            strategy = algorithm(parameters)
            window_ms = strategy.window_ms if isinstance(strategy, BindsLate) else None
            return Installed(config, strategy, fallback(fallback.parameters_type()), window_ms)
        except Exception as error:  # anyone's code: it must not keep the others from being built
            problem = f"{config.algorithm!r} or its fallback cannot be built: {_described(error)}"
            raise InvalidField("strategy.algorithm", problem) from None

    def _resolve(self, tenant: str, model: str) -> Bound:
        if self._desired.bypasses(tenant):
            return Bound(self._plain)
        groups = [b.group for b in sorted(self._desired.bindings, key=lambda b: b.order) if b.tenant == tenant]
        best: tuple[tuple[int, int], Installed] | None = None
        shadows = []
        for binding in self._desired.strategy_bindings:
            applies = (
                binding.tenant in ("", tenant)
                and binding.model in ("", model)
                and (not binding.group or binding.group in groups)
            )
            installed = self.installed.get(binding.strategy)
            if not applies or installed is None:
                continue
            if binding.shadow:
                shadows.append(installed)
                continue
            specific = 8 * bool(binding.tenant) + 4 * bool(binding.group) + 2 * bool(binding.model)
            rank = (specific, -groups.index(binding.group) if binding.group else 0)
            if best is None or rank > best[0]:
                best = (rank, installed)
        active = self._last_resort if best is None else best[1]
        return Bound(active, tuple(s for s in shadows if s is not active))

    def _unusable(self, installed: Installed, now: float) -> str:
        if not installed.config.enabled:
            return "disabled"
        if installed.tripped_until is not None and now < installed.tripped_until:
            return "tripped"
        return ""

    def _failed(self, installed: Installed, now: float) -> None:
        installed.failures += 1
        installed.failures_in_a_row += 1
        if installed.failures_in_a_row >= TRIP_AFTER:
            installed.tripped_until = now + TRIPPED_S
            log.error("strategy_tripped", strategy=installed.config.id, problem=installed.last_error, for_s=TRIPPED_S)


def _described(error: Exception) -> str:
    """What went wrong and where, without the error's message: it may quote the request."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"[:_LONGEST_ERROR]


def _checked(costs: Costs, count: int) -> Costs:
    ttft = costs.predicted_ttft_ms
    if costs.cost.shape != (count,):
        raise ValueError(f"{costs.cost.shape} costs for {count} candidates")
    cost = _plain(costs.cost)
    if any_nan(cost):
        raise ValueError("a cost is not a number")
    if ttft is not None and (ttft.shape != (count,) or not all_finite(_plain(ttft))):
        raise ValueError("a predicted TTFT is not a finite number")
    return costs if cost is costs.cost else Costs(cost, ttft, costs.prefill_ms)


def _plain(column: FloatColumn) -> FloatColumn:
    """The same as compiled functions want it; a strategy may make it in any way it likes."""
    return np.ascontiguousarray(column, np.float64)
