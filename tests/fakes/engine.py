"""A fake engine: the pages of an inference server that an agent reads, for a test to change or break."""

import asyncio
import contextlib

from aiohttp import web


class FakeEngine:
    """Listens on 127.0.0.1. `pages` maps a path to a body (str or JSON-able) or to a status (int)."""

    def __init__(self):
        self.pages = {"/health": "", "/metrics": "", "/version": {"version": "0.11.0"}}
        self.serves("m")
        self.asked = []
        self.hang = set()
        self.keys = []
        self.address = ""

    def serves(self, *models, adapters=()):
        entries = [{"id": m, "object": "model", "parent": None} for m in models]
        entries += [{"id": a, "object": "model", "parent": models[0]} for a in adapters]
        self.pages["/v1/models"] = {"object": "list", "data": entries}

    async def handle(self, request):
        self.asked.append(request.path)
        self.keys.append(request.headers.get("Authorization"))
        if request.path in self.hang:
            await asyncio.sleep(3600)
        page = self.pages.get(request.path, 404)
        if isinstance(page, int):
            return web.Response(status=page)
        return web.Response(text=page) if isinstance(page, str) else web.json_response(page)


@contextlib.asynccontextmanager
async def running_engine(port=0):
    """A fake engine, listening until the block ends."""
    engine = FakeEngine()
    runner = web.ServerRunner(web.Server(engine.handle), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, bound = runner.addresses[0]
    engine.address = f"{host}:{bound}"
    try:
        yield engine
    finally:
        await runner.cleanup()
