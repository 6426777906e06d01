"""What a browser says of where a request comes from: no page of another site shall call what asks nobody who he is."""

import ipaddress
from typing import Final

from aiohttp import web

from headway_scheduler.errors import ForeignOrigin

__all__ = ["check_host", "check_origin"]

_HERE: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SAME: Final = frozenset({"same-origin", "none"})


def check_host(request: web.Request) -> None:
    """Raises ForeignOrigin where it was asked for under another name than this host's own to itself.

    For where nobody need show a credential, and only this host can call: anyone can have a name of theirs resolve to
    127.0.0.1, and then their page is of the same origin as what answers (DNS rebinding). Every browser sends a Host.
    """
    host = request.headers.get("Host")
    if host is None or _is_here(host):
        return
    raise ForeignOrigin("without a credential, this port answers only under localhost, 127.0.0.1 and [::1]")


def check_origin(request: web.Request) -> None:
    """Raises ForeignOrigin where the browser says that another site's page sent it. Other callers say nothing of it."""
    headers = request.headers
    if headers.get("Sec-Fetch-Site", "same-origin") not in _SAME:
        raise ForeignOrigin("this was sent from a page of another site")
    origin = headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != headers.get("Host"):
        raise ForeignOrigin("this was sent from a page of another site")


def _is_here(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdecimal():
        name = host  # no port, or the end of an IPv6 address
    name = name.lower()
    if name in _HERE:
        return True
    try:
        return ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False
