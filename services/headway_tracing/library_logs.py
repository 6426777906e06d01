"""What libraries say, as lines of our own log."""

import logging
from typing import Final

import structlog

__all__ = ["adopt_library_logs"]

log = structlog.get_logger()


class _Adopted(logging.Handler):
    """One line for each: without it Python writes plain text, and stack traces, among the lines of JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one; of an exception its type alone, since its text may quote what somebody sent."""
        facts = {"error_type": record.exc_info[0].__name__} if record.exc_info and record.exc_info[0] else {}
        log.log(record.levelno, "library_said", library=record.name, said=record.getMessage(), **facts)


_ADOPTED: Final = _Adopted(logging.WARNING)


def adopt_library_logs() -> None:
    """Take the warnings and errors of every library that logs by Python's own means."""
    logging.getLogger().addHandler(_ADOPTED)
