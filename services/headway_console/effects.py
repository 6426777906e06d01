"""What a change of strategies did: how requests fared before it, kept when it happens, against how they fare since."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headway_scheduler.domain.desired import DesiredState, StrategyBinding, StrategyConfig

from headway_console.decisions import DecisionLog, Summary, summary_of

__all__ = ["Change", "Effects"]

_KEPT: Final = 50
_LOOKED_AT: Final = 2_000
"""Decisions before a change that are summed up."""


@dataclass(frozen=True, slots=True)
class Change:
    """A strategy or a binding changed; `before`: the decisions just before. `revision` 0: it is a binding's change."""

    time: float
    strategy: str
    what: str
    revision: int
    before: Summary


class Effects:
    """Notices every change of strategies, whoever made it. `wall` is the wall's clock, in seconds."""

    def __init__(self, desired: Callable[[], DesiredState], log: DecisionLog, wall: Callable[[], float]) -> None:
        self._desired, self._log, self._wall = desired, log, wall
        self._seen = desired()
        self._changes: deque[Change] = deque(maxlen=_KEPT)

    def look(self) -> None:
        """Has anything changed since the last look? Costs nothing when not."""
        before, after = self._seen, self._desired()
        if after is before:
            return
        self._seen = after
        told = [*_of_strategies(before, after), *_of_bindings(before, after)]
        if told:
            now, past = self._wall(), summary_of(self._log.newest(_LOOKED_AT))
            self._changes.extend(Change(now, strategy, what, revision, past) for strategy, what, revision in told)

    def of(self, strategy: str) -> list[tuple[Change, Summary]]:
        """A strategy's changes, newest first, each with what came since it and before the next one."""
        self.look()
        rows, until, found = self._log.newest(_LOOKED_AT), float("inf"), []
        for change in reversed(self._changes):
            if change.strategy == strategy:
                since = (row for row in rows if change.time <= row.time < until)
                found.append((change, summary_of(since)))
            until = change.time
        return found


def _of_strategies(before: DesiredState, after: DesiredState) -> list[tuple[str, str, int]]:
    if before.strategies is after.strategies:
        return []
    told = []
    for name, config in after.strategies.items():
        old = before.strategies.get(name)
        if old is not None and old.revision != config.revision:
            told.append((name, _difference(old, config), config.revision))
    return told


def _difference(old: StrategyConfig, new: StrategyConfig) -> str:
    if old.enabled != new.enabled:
        return "enabled" if new.enabled else "disabled"
    keys = sorted({*old.parameters, *new.parameters})
    changed = [key for key in keys if old.parameters.get(key) != new.parameters.get(key)]
    return f"tuned: {', '.join(changed)}" if changed else "changed"


def _of_bindings(before: DesiredState, after: DesiredState) -> list[tuple[str, str, int]]:
    old = {each.id: each for each in before.strategy_bindings}
    return [
        (each.strategy, f"bound by {each.id}" + (" in shadow" if each.shadow else ""), 0)
        for each in after.strategy_bindings
        if _applies(old.get(each.id)) != _applies(each)
    ]


def _applies(binding: StrategyBinding | None) -> tuple[object, ...] | None:
    if binding is None:
        return None
    return (binding.strategy, binding.tenant, binding.model, binding.group, binding.shadow)
