"""A call that is held: whoever waits for it can leave at any moment, and leaves no trace."""

import asyncio

from headway_scheduler.admission.holds import Waiter
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.decision import Decision
from headway_scheduler.errors import HeadwayError

__all__ = ["HeldCall"]


class HeldCall:
    """One waiter of a hold. Made in the turn of the event loop that made the waiter."""

    def __init__(self, scheduler: Scheduler, waiter: Waiter) -> None:
        self.settled: asyncio.Future[Decision | HeadwayError] = asyncio.get_running_loop().create_future()
        """Done when the hold is over, whatever came of it. Wait for it; do not cancel it."""
        self._scheduler, self._waiter = scheduler, waiter
        waiter.answer = self.settled.set_result

    def decision(self) -> Decision:
        """What it was answered. Raises the refusal if it was one."""
        outcome = self.settled.result()
        if isinstance(outcome, HeadwayError):
            raise outcome
        return outcome

    def leave(self) -> None:
        """The caller is gone: stop waiting, or give back what it was answered in the same moment."""
        dispatcher = self._scheduler.dispatcher
        dispatcher.give_up(self._waiter)
        if self.settled.done() and isinstance(outcome := self.settled.result(), Decision):
            dispatcher.give_back(outcome.reservation_id, self._waiter.owner, self._scheduler.clock())
