"""How many retries may be in progress at once, per pool: Envoy's retry budget, for all data planes together.

A failing engine's requests come again. Each data plane limits its own retries; here all of them meet, so that a fleet
that fails is not drowned by those who try it again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headway_scheduler.admission.values import Work
from headway_scheduler.errors import RetryBudgetSpent

__all__ = ["Retries", "RetryConfig"]


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """Retries in progress: `percent` of the pool's requests in flight, and `minimum` always. 100 %: no limit."""

    percent: float = 20.0
    minimum: int = 3


class Retries:
    """Counts the retries in progress by model, and refuses those beyond the budget.

    `active` tells a model's requests in flight: it is asked only where there are retries. `refused` counts by model.
    """

    def __init__(self, config: RetryConfig, active: Callable[[str], int]) -> None:
        self._config = config
        self._active = active
        self.now: dict[str, int] = {}
        self.refused: dict[str, int] = {}

    def admit(self, work: Work, retry_after_s: float) -> None:
        """Count this work as a retry, until `over`. Raises RetryBudgetSpent."""
        model = work.request.model
        if work.retry:
            return
        if self.spent(model):
            self.refused[model] = self.refused.get(model, 0) + 1
            message = f"{self.now.get(model, 0)} retries for {model!r} are in progress already"
            raise RetryBudgetSpent(message, retry_after_s=retry_after_s, model=model)
        self.count(work)

    def count(self, work: Work) -> None:
        """Count one that cannot be refused any more: a data plane has failed over by itself."""
        if not work.retry:
            work.retry = True
            self.now[work.request.model] = self.now.get(work.request.model, 0) + 1

    def over(self, work: Work) -> None:
        """It is over, or was never begun."""
        if work.retry:
            work.retry = False
            model = work.request.model
            self.now[model] -= 1
            if not self.now[model]:
                del self.now[model]

    def spent(self, model: str) -> bool:
        """Are as many retries in progress as may be?"""
        now, config = self.now.get(model, 0), self._config
        if now < config.minimum or config.percent >= 100.0:
            return False
        return now * 100.0 >= config.percent * self._active(model)
