"""When a certificate ends: the one fact of X.509 that we read ourselves (RFC 5280, 4.1)."""

import ssl
from datetime import UTC, datetime
from typing import Final

__all__ = ["expires_at"]

_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"
_CONTEXT_0: Final = 0xA0
_UTC_TIME: Final = 0x17


def expires_at(pem: bytes) -> float | None:
    """The end of the first certificate in `pem`, in seconds since 1970; None: there is none that can be read."""
    text = pem.decode("ascii", "replace")
    try:
        begin = text.index(_BEGIN)
        der = ssl.PEM_cert_to_DER_cert(text[begin : text.index(_END, begin) + len(_END)])
        body = _parts(_parts(der)[0][1])
        # tbsCertificate: [0] version, if it is told; serial number, signature, issuer, validity.
        fields = _parts(body[0][1])
        validity = fields[4 if fields[0][0] == _CONTEXT_0 else 3][1]
        tag, value = _parts(validity)[1]
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return datetime.strptime(value.decode("ascii"), form).replace(tzinfo=UTC).timestamp()
    except (ValueError, IndexError):
        return None


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """What stands one after the other in DER: tag and contents of each. Raises ValueError, IndexError."""
    found, at = [], 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(der[at : at + size]), at + size
        if at + length > len(der):
            raise ValueError("the certificate is cut off")
        found.append((tag, der[at : at + length]))
        at += length
    return found
