"""An OpenTelemetry collector: takes spans by OTLP over HTTP, as JSON, on a real port, and keeps them."""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

from aiohttp import web

KINDS = {"stringValue": str, "intValue": int, "doubleValue": float, "boolValue": bool}


@dataclass
class Span:
    """One, with ids as bytes and times as numbers."""

    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    start_time_unix_nano: int
    end_time_unix_nano: int
    attributes: dict
    events: list


class Collector:
    """`spans` by name, in the order in which they came."""

    def __init__(self):
        self.spans = {}
        self.services = set()
        self.port = 0

    async def export(self, request):
        assert request.content_type == "application/json"
        for resource in (await request.json())["resourceSpans"]:
            self.services.add(_plain(resource["resource"]["attributes"])["service.name"])
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    self.spans.setdefault(span["name"], []).append(_span(span))
        return web.json_response({})

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    def one(self, name):
        (found,) = self.spans[name]
        return found


def _span(span):
    return Span(
        bytes.fromhex(span["traceId"]),
        bytes.fromhex(span["spanId"]),
        bytes.fromhex(span.get("parentSpanId", "")),
        int(span["startTimeUnixNano"]),
        int(span["endTimeUnixNano"]),
        _plain(span["attributes"]),
        [SimpleNamespace(name=event["name"]) for event in span["events"]],
    )


def _plain(attributes):
    found = {}
    for each in attributes:
        ((kind, value),) = each["value"].items()
        found[each["key"]] = KINDS[kind](value)
    return found


def attributes(span):
    """A span's, as plain values."""
    return span.attributes


@contextlib.asynccontextmanager
async def collecting():
    """A collector until the block ends."""
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.export)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.port = runner.addresses[0][1]
    try:
        yield collector
    finally:
        await runner.cleanup()
