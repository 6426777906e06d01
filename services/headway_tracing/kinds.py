"""What part of a piece of work a span is."""

from enum import Enum

__all__ = ["Kind"]


class Kind(Enum):
    """A span's part: it answers a call, makes one, or neither."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"
