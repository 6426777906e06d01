"""Server-sent events: one reading of the fleet for everybody who looks, and none while nobody does."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from aiohttp import web
from headway_scheduler.fleet.fleet import Fleet

from headway_console import heatmap
from headway_console.doorkeeper import Visit
from headway_console.pages import harden

__all__ = ["MOST_STREAMS", "TICK_S", "Live"]

TICK_S: Final = 2.0
MOST_STREAMS: Final = 100


class Live:
    """Tells open pages every two seconds how the devices do, and that it is time to load their tables anew."""

    def __init__(self, fleet: Fleet, still_in: Callable[[web.Request], bool], interval_s: float = TICK_S) -> None:
        self._fleet, self._still_in, self._interval_s = fleet, still_in, interval_s
        self._streams: set[asyncio.Queue[bytes]] = set()
        self._telling: asyncio.Task[None] | None = None
        self._latest: list[heatmap.NodeCells] = []
        self._read_at = float("-inf")
        self.readings = 0

    def __len__(self) -> int:
        """Pages that look."""
        return len(self._streams)

    async def stream(self, visit: Visit) -> web.StreamResponse:
        """One page's stream, until it leaves or its session ends."""
        if len(self._streams) >= MOST_STREAMS:
            return web.Response(status=503, headers={"Retry-After": "10"}, text="too many pages follow the fleet\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        harden(response)
        await response.prepare(visit.request)
        queue: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._streams.add(queue)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())
        try:
            await response.write(b"retry: 2000\n\n")
            while self._still_in(visit.request):
                await response.write(await queue.get())
            await response.write(b"event: ended\ndata: {}\n\n")
        except ConnectionResetError:
            pass  # the page was closed
        finally:
            self._streams.discard(queue)
        return response

    async def reading(self) -> Sequence[heatmap.NodeCells]:
        """All devices, as they were at most half a tick ago; pages that come together share one."""
        now = asyncio.get_running_loop().time()
        if now - self._read_at > self._interval_s / 2:
            self.readings += 1
            self._read_at, self._latest = now, await heatmap.read_all(self._fleet)
        return self._latest

    async def stop(self) -> None:
        """Tell nobody any more."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    async def _tell(self) -> None:
        while self._streams:
            event = await self._read()
            for queue in self._streams:
                if queue.full():
                    queue.get_nowait()  # a slow page gets the newest, not all
                queue.put_nowait(event)
            await asyncio.sleep(self._interval_s)

    async def _read(self) -> bytes:
        return b"event: fleet\ndata: " + msgspec.json.encode(heatmap.told(await self.reading())) + b"\n\n"
