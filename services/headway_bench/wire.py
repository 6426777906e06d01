"""Pieces of protobuf messages, to be joined: a load that serialises each of its messages anew measures itself."""

__all__ = ["number_field", "submessage"]

_NUMBER, _BYTES = 0, 2


def number_field(field: int, value: int) -> bytes:
    """A field that is a number, not negative."""
    return _varint(field << 3 | _NUMBER) + _varint(value)


def submessage(field: int, message: bytes) -> bytes:
    """A field that is a message, or text, serialised already."""
    return _varint(field << 3 | _BYTES) + _varint(len(message)) + message


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
