"""What Envoys should know of the fleet, built when it changed, once for all who may see the same."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from headway_scheduler.app import Scheduler
from headway_scheduler.envoy.clusters import Assignments, Scope, Weights, assignments

__all__ = ["ClusterFeed"]

_LOOK_S: Final = 0.1
"""Changes within this time go out together."""
_RESOLVE_S: Final = 30.0
_WEIGH_S: Final = 10.0


class ClusterFeed:
    """Follows the fleet while `run` runs.

    Until the scheduler has settled after its start, and once it drains, it says nothing: Envoys keep what they know.
    One that does not lead tells its readers to leave.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._weights = Weights(scheduler)
        self._version: tuple[int, ...] = ()
        self._built: dict[Scope, Assignments] = {}
        self._readers: set[asyncio.Event] = set()

    async def run(self) -> None:
        """Look for changes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_fleet())
            tasks.create_task(self._follow_names())

    def assignments(self, scope: Scope) -> Assignments | None:
        """The newest clusters of this scope; None while nothing is said."""
        if not self._version:
            return None
        found = self._built.get(scope)
        if found is None:
            found = self._built[scope] = assignments(self._scheduler, scope, self._weights)
        return found

    @contextmanager
    def reading(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something may have changed."""
        news = asyncio.Event()
        self._readers.add(news)
        try:
            yield news
        finally:
            self._readers.discard(news)

    def _publish(self) -> None:
        scheduler = self._scheduler
        if not scheduler.serves:
            self._version = ()
            self._tell()
        if not scheduler.serves or scheduler.draining or not scheduler.is_settled:
            return
        version = (scheduler.fleet.version, self._scheduler.addresses.version, self._weights.version)
        if version != self._version:
            self._version = version
            self._built.clear()
            self._tell()

    def _tell(self) -> None:
        for news in self._readers:
            news.set()

    async def _follow_fleet(self) -> None:
        weighed = self._scheduler.clock()
        while True:
            if self._scheduler.clock() - weighed >= _WEIGH_S:
                weighed = self._scheduler.clock()
                self._weights.refresh()
            self._publish()
            await asyncio.sleep(_LOOK_S)

    async def _follow_names(self) -> None:
        """Look up new names at once, and all of them now and then."""
        fleet, clock = self._scheduler.fleet, self._scheduler.clock
        version, due = -1, clock()
        while True:
            if version != fleet.version or clock() >= due:
                version = fleet.version
                engines = [each.spec.address for each in fleet.endpoints.values()]
                if clock() >= due:
                    due = clock() + _RESOLVE_S
                    await self._scheduler.addresses.resolve(engines)
                else:
                    await self._scheduler.addresses.resolve(self._scheduler.addresses.new(engines))
            await asyncio.sleep(_LOOK_S)
