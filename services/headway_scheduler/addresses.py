"""Where engines are, as planes must be told: by IP address. Host names are resolved here, beside the calls."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import structlog

__all__ = ["EngineAddresses"]

log = structlog.get_logger()


_CACHED: Final = 65_536


class EngineAddresses:
    """Engines' `host:port` as `ip:port`. `version` grows when a name leads elsewhere.

    A name that does not resolve keeps what it led to last.
    """

    def __init__(self) -> None:
        self.version = 0
        self._known: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._failing: set[str] = set()

    def of(self, address: str) -> str | None:
        """`ip:port`, IPv6 in brackets; None while the name has not been resolved."""
        return _literal(address) or self._known.get(address)

    def shown(self, address: str) -> str:
        """As a plane is told: `ip:port`, or the name while it has not been resolved."""
        return self.of(address) or address

    def named(self, address: str) -> str:
        """The engine's own `host:port` behind this `ip:port`."""
        return self._names.get(address, address)

    def new(self, addresses: Iterable[str]) -> list[str]:
        """Those of them that have never been looked up."""
        return [each for each in addresses if self.of(each) is None and each not in self._failing]

    async def resolve(self, addresses: Iterable[str]) -> None:
        """Look these up (literal ones need none), all at once."""
        names = [address for address in set(addresses) if _literal(address) is None]
        await asyncio.gather(*(self._resolve(name) for name in names))

    async def _resolve(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            if address not in self._failing:
                self._failing.add(address)
                log.warning("engine_address_unresolved", address=address, problem=str(error))
            return
        self._failing.discard(address)
        ips = sorted(str(sockaddr[0]) for *_, sockaddr in found)
        before = self._known.get(address)
        if before is None or before.rpartition(":")[0].strip("[]") not in ips:
            self._known[address] = _joined(ips[0], int(port))
            self._names[self._known[address]] = address
            self.version += 1


@lru_cache(_CACHED)
def _literal(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        return _joined(str(ipaddress.ip_address(host.strip("[]"))), int(port))
    except ValueError:
        return None


def _joined(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
