"""Waiting for what has no event of its own."""

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Return once `condition()` is true; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # what is looked at has no event
            await asyncio.sleep(0.005)
