"""An engine that costs next to nothing: the same JSON answer to every request, on every loopback address.

`python -m headway_bench.engine` prints its port.
"""

import asyncio
import json
from typing import Final, cast

import uvloop

__all__ = ["main"]

_USAGE: Final = {"prompt_tokens": 512, "completion_tokens": 16, "total_tokens": 528}
_CHOICE: Final = {"index": 0, "message": {"role": "assistant", "content": "word " * 16}, "finish_reason": "stop"}
_BODY: Final = json.dumps({"id": "x", "model": "m", "choices": [_CHOICE], "usage": _USAGE}).encode()
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY)
) + _BODY


class _Server(asyncio.Protocol):
    def __init__(self) -> None:
        self._left = 0
        self._head = b""
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # also uvloop's, which does not say so

    def data_received(self, data: bytes) -> None:
        if self._chunked:
            self._end_chunked(data)
        elif self._left:
            self._end_measured(len(data))
        else:
            self._head += data
            head, found, body = self._head.partition(b"\r\n\r\n")
            if found:
                self._head = b""
                self._begin(head.lower(), body)

    def _begin(self, head: bytes, body: bytes) -> None:
        _, measured, rest = head.partition(b"content-length: ")
        if measured:
            self._left = int(rest.partition(b"\r\n")[0])
            self._end_measured(len(body))
        else:
            self._chunked = True
            self._end_chunked(body)

    def _end_measured(self, size: int) -> None:
        self._left -= size
        if self._left <= 0:
            self._left = 0
            self._transport.write(_ANSWER)

    def _end_chunked(self, data: bytes) -> None:
        if data.endswith(b"0\r\n\r\n"):
            self._chunked = False
            self._transport.write(_ANSWER)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Server, "0.0.0.0", 0)  # noqa: S104  all of 127.0.0.0/8
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    uvloop.run(_serve())


if __name__ == "__main__":
    main()
