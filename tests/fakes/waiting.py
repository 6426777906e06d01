"""Wait for a condition, never for a time."""

import asyncio
import time
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return once the condition holds; fail when it does not within the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not true after {timeout_s} s"
        await asyncio.sleep(0.01)
