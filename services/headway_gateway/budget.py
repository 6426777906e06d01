"""How many retries may be in progress at once."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["RetryBudget"]


class RetryBudget:
    """Envoy's retry budget: a share of the active requests, and a few always.

    Retries beyond it are not made, so that a failing fleet is not drowned by its own clients.
    """

    def __init__(self, ratio: float, minimum: int) -> None:
        self._ratio = ratio
        self._minimum = minimum
        self.active = 0
        """Requests being served."""
        self.retrying = 0
        """Those of them that are on a further attempt."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it is served."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def begin_retry(self) -> bool:
        """Take a place for a retry; False where the budget is spent."""
        if self.retrying >= max(self._minimum, int(self._ratio * self.active)):
            return False
        self.retrying += 1
        return True

    def end_retry(self) -> None:
        """Give the place back."""
        self.retrying -= 1
