"""Wait for a condition, with a deadline."""

import asyncio
import inspect
import time


async def eventually(condition, timeout_s=15.0, every_s=0.01):
    """The first truthy result of a function or coroutine function. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        assert time.monotonic() < deadline, f"not so within {timeout_s} s: {inspect.getsource(condition).strip()}"
        await asyncio.sleep(every_s)
