"""The server's certificate, read again when its files change: no renewal needs a restart."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import structlog

__all__ = ["CertificateFiles", "http_context", "names_in", "server_credentials"]

log = structlog.get_logger(__name__)

_Stamp: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Pem:
    certificate: bytes
    key: bytes
    client_ca: bytes | None


class CertificateFiles:
    """PEM files: a certificate, its key, and whom clients' certificates must be from (None: they show none).

    `changed` is asked at each handshake; what is half written, or does not fit together, is left until it does.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self.certificate, self.key, self.client_ca = certificate, key, client_ca
        self._stamp: _Stamp | None = None
        self._problem = ""

    def read(self) -> _Pem:
        """What they hold now. Raises OSError if they cannot be read or do not fit together."""
        stamp = self._stamps()
        client_ca = None if self.client_ca is None else self.client_ca.read_bytes()
        pem = _Pem(self.certificate.read_bytes(), self.key.read_bytes(), client_ca)
        self.context()  # raises what is wrong with them
        if stamp != self._stamps():
            raise OSError("the files are being written")
        self._stamp = stamp
        return pem

    def changed(self) -> _Pem | None:
        """What they hold now, if that is other than last time."""
        try:
            stamp = self._stamps()
            if stamp == self._stamp:
                return None
            pem = self.read()
        except OSError as error:
            self._say_once(str(error))
            return None
        self._problem = ""
        log.info("certificate_reloaded", certificate=str(self.certificate))
        return pem

    def context(self) -> ssl.SSLContext:
        """A server's context for Python's own TLS. Client certificates are asked for, not demanded. Raises OSError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.client_ca)
        context.load_cert_chain(self.certificate, self.key, password="")
        context.verify_mode = ssl.CERT_NONE if self.client_ca is None else ssl.CERT_OPTIONAL
        return context

    def _say_once(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.error("certificate_not_reloaded", certificate=str(self.certificate), problem=problem)

    def _stamps(self) -> _Stamp:
        files = (self.certificate, self.key, self.client_ca)
        stats = [path.stat() for path in files if path is not None]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """gRPC's. With a `client_ca` every client must show a certificate of it: gRPC for Python cannot merely ask for one.

    Raises OSError.
    """

    def configuration(pem: _Pem) -> Any:  # gRPC's own, without a public type
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.client_ca)

    def newest() -> Any:
        pem = files.changed()
        return None if pem is None else configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        configuration(files.read()), newest, require_client_authentication=files.client_ca is not None
    )


def http_context(files: CertificateFiles) -> ssl.SSLContext:
    """Python's, which hands each handshake on to one of the files' newest contents. Raises OSError."""
    files.read()
    first = files.context()
    newest = [first]

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        if files.changed() is not None:
            newest[0] = files.context()
        connection.context = newest[0]

    first.sni_callback = choose
    return first


def names_in(certificate: Any) -> tuple[str, ...]:  # `getpeercert()`'s dictionary, or None
    """The URIs and DNS names that a client's certificate is for."""
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(name for kind, name in names if kind in ("URI", "DNS"))
