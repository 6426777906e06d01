"""Hosts that are network namespaces, and the cables between them: `ip` from iproute2, and root."""

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_numbers = itertools.count(1)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


@dataclass(frozen=True)
class Host:
    """One namespace, with its loopback up."""

    namespace: str

    def command(self, *command: str) -> list[str]:
        """What runs `command` on this host. `ip` becomes it: the process id is the command's own."""
        return ["ip", "netns", "exec", self.namespace, *command]


@dataclass(frozen=True)
class Cable:
    """A veth pair. What is cut is the end at `host`, as if somebody pulled its plug."""

    host: Host
    interface: str

    def cut(self) -> None:
        _ip("-n", self.host.namespace, "link", "set", self.interface, "down")

    def mend(self) -> None:
        _ip("-n", self.host.namespace, "link", "set", self.interface, "up")


class Network:
    """Makes hosts and cables; `network` removes all of them again."""

    def __init__(self, closers: ExitStack) -> None:
        self._closers = closers
        self._hosts: set[Host] = set()

    def host(self) -> Host:
        host = Host(f"headway-{os.getpid()}-{next(_numbers)}")
        _ip("netns", "add", host.namespace)
        self._hosts.add(host)
        self._closers.callback(self.remove, host)
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        return host

    def connect(self, near: Host, near_address: str, far: Host, far_address: str) -> Cable:
        """A cable between two hosts, with an address (`10.0.0.1/24`) at each end."""
        number = next(_numbers)
        ends = ((near, f"hwn{number}", near_address), (far, f"hwf{number}", far_address))
        (_, near_name, _), (_, far_name, _) = ends
        veth = ("link", "add", "name", near_name, "type", "veth", "peer", "name", far_name)
        _ip("-n", near.namespace, *veth, "netns", far.namespace)
        for host, name, address in ends:
            _ip("-n", host.namespace, "addr", "add", address, "dev", name)
            _ip("-n", host.namespace, "link", "set", name, "up")
        return Cable(near, near_name)

    def remove(self, host: Host) -> None:
        """The host is gone, with its ends of cables; sockets that it left say no word of farewell."""
        if host in self._hosts:
            self._hosts.remove(host)
            _ip("netns", "delete", host.namespace)


@contextmanager
def network() -> Iterator[Network]:
    """A network that leaves nothing behind, whatever happens in it. Stop what runs on its hosts first."""
    with ExitStack() as closers:
        yield Network(closers)


def namespaces() -> set[str]:
    """Those that this machine has now."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}
