"""Where the scheduler is, who calls, and how answers are printed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import grpc

from headway_cli.client import Client
from headway_cli.errors import UsageProblem

__all__ = ["DEFAULT_SCHEDULER", "DEFAULT_TIMEOUT_S", "Output", "Session"]

DEFAULT_SCHEDULER: Final = "127.0.0.1:7070"
DEFAULT_TIMEOUT_S: Final = 30.0
_SYSTEM_ROOTS: Final = "system"
_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024


class Output(StrEnum):
    """How answers are printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class Session:
    """What every command is told."""

    scheduler: str = DEFAULT_SCHEDULER
    token: str = ""
    ca: str = ""
    """PEM file of the certificate authority, or `system`; empty: no TLS."""
    server_name: str = ""
    """The name in the scheduler's certificate, where it is not the address."""
    certificate: str = ""
    """PEM file of a client certificate, shown to schedulers that want one; with `key`."""
    key: str = ""
    output: Output = Output.TABLE
    timeout_s: float = DEFAULT_TIMEOUT_S

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A connection to the scheduler, closed afterwards. Raises UsageProblem if `ca` cannot be read."""
        with self._channel() as channel:
            yield Client(channel, scheduler=self.scheduler, token=self.token, timeout_s=self.timeout_s)

    def _channel(self) -> grpc.Channel:
        options: list[tuple[str, int | str]] = [
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.enable_http_proxy", 0),
        ]
        if not self.ca:
            return grpc.insecure_channel(self.scheduler, options)
        if self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return grpc.secure_channel(self.scheduler, self._credentials(), options)

    def _credentials(self) -> grpc.ChannelCredentials:
        if bool(self.certificate) != bool(self.key):
            raise UsageProblem("--certificate and --key go together")
        roots = None if self.ca == _SYSTEM_ROOTS else _pem("--ca", self.ca)
        if not self.certificate:
            return grpc.ssl_channel_credentials(roots)
        return grpc.ssl_channel_credentials(roots, _pem("--key", self.key), _pem("--certificate", self.certificate))


def _pem(option: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UsageProblem(f"{option}: {file}: {error.strerror}") from None
