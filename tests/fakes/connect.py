"""A caller by the Connect protocol, and a scheduler without a database that answers it."""

import base64
import contextlib
import io
import json

import aiohttp
from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2
from headway.routing.v1 import routing_pb2 as pb
from headway_scheduler.http import HttpServer

PROTO, JSON = "application/proto", "application/json"
ROUTER = "headway.routing.v1.Router"


class ConnectRefusal:
    """An error as the protocol says it: its code, and the details by their types."""

    def __init__(self, status, headers, error):
        self.status, self.headers = status, headers
        self.code, self.message = error["code"], error["message"]
        self.details = {}
        for detail in error.get("details", ()):
            assert "=" not in detail["value"], "the protocol wants it unpadded"
            value = base64.b64decode(detail["value"] + "=" * (-len(detail["value"]) % 4))
            self.details[detail["type"]] = Any(type_url=f"type.googleapis.com/{detail['type']}", value=value)

    def _unpack(self, message):
        detail = self.details.get(message.DESCRIPTOR.full_name)
        assert detail is None or detail.Unpack(message)
        return None if detail is None else message

    @property
    def reason(self):
        info = self._unpack(error_details_pb2.ErrorInfo())
        return None if info is None else info.reason

    @property
    def field(self):
        info = self._unpack(error_details_pb2.ErrorInfo())
        return None if info is None else info.metadata.get("field")

    @property
    def retry_s(self):
        retry = self._unpack(error_details_pb2.RetryInfo())
        return None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9


class ConnectClient:
    """Calls one scheduler."""

    def __init__(self, url, session):
        self.url, self.session = url, session

    def post(self, method, body=b"", *, service=ROUTER, content_type=PROTO, **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"Content-Type": content_type, **named}
        data = io.BytesIO(body) if isinstance(body, bytes) and body else body
        return self.session.post(f"{self.url}/{service}/{method}", data=data, headers=sent)

    async def call(self, method, request, answer, **options):
        """A call that succeeds, with protobuf bodies."""
        async with self.post(method, request.SerializeToString(), **options) as found:
            body = await found.read()
            assert found.status == 200, body
            assert found.headers["Content-Type"] == PROTO
            return answer.FromString(body)

    async def route(self, **fields):
        options = {name: fields.pop(name) for name in list(fields) if name[0].isupper()}
        request = pb.RouteRequest(**{"model": "m", "text": "hello", **fields})
        return await self.call("Route", request, pb.RouteResponse, **options)

    async def report(self, *reports):
        answer = await self.call("Report", pb.ReportRequest(reports=reports), pb.ReportResponse)
        return [pb.ReportStatus.Name(result.status).removeprefix("REPORT_STATUS_") for result in answer.results]

    async def refused(self, method, body=b"", **options):
        async with self.post(method, body, **options) as found:
            assert found.status != 200
            assert found.headers["Content-Type"].startswith(JSON), await found.text()
            return ConnectRefusal(found.status, found.headers, json.loads(await found.read()))


@contextlib.asynccontextmanager
async def connect_to(scheduler):
    """Its HTTP port, and a caller."""
    http = HttpServer(scheduler)
    await http.start("127.0.0.1:0")
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        try:
            yield ConnectClient(f"http://127.0.0.1:{http.port}", session)
        finally:
            await http.stop()
