"""The article's sessions as an open loop: they arrive whether or not the fleet keeps up."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from headway_sim.workloads.article import ArticleWorkload, SessionTurns

__all__ = ["ArticleOverload"]


@dataclass(frozen=True, slots=True)
class ArticleOverload:
    """The article's sessions (5 turns, 200 in, 800 out), starting as a Poisson process of `per_s` sessions a second.

    A turn follows the answer to the one before it, or its refusal. There are more sessions than the article's 60, so
    that the fleet reaches a steady state: a session lasts longer than 60 of them take to arrive.
    """

    sessions: int = 800
    per_s: float = 1.0
    seed: int = 0
    _article: ArticleWorkload = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_article", ArticleWorkload(sessions=self.sessions, seed=self.seed))

    @property
    def concurrency(self) -> int | None:
        """Open loop: no limit."""
        return None

    @property
    def requests(self) -> int:
        """Requests in all."""
        return self._article.requests

    def schedule(self) -> Iterator[tuple[float, SessionTurns]]:
        """Every session, by its start in milliseconds."""
        dice = random.Random(f"{self.seed} arrivals")
        now_s = 0.0
        for number in range(self.sessions):
            now_s += dice.expovariate(self.per_s)
            yield now_s * 1e3, self._article.conversation(number)
