"""A scheduler for each test, and the command line against it."""

from collections.abc import Iterator

import pytest
from fakes.headway import Headway, RunningScheduler, connected_agent, running_scheduler


@pytest.fixture
def scheduler(database_url: str) -> Iterator[RunningScheduler]:
    with running_scheduler(database_url, stale_after_s=600) as running:
        yield running


@pytest.fixture
def headway(scheduler: RunningScheduler) -> Headway:
    return Headway(scheduler.address)


@pytest.fixture
def fleet(scheduler: RunningScheduler) -> Iterator[None]:
    """A node `gpu-7` with two endpoints that serve `llama`."""
    with connected_agent(scheduler.address, "gpu-7", ["10.0.0.7:8000", "10.0.0.7:8001"]):
        yield
