"""Faults of our own: what is logged of them, and what a caller is told."""

import traceback

import structlog

from headway_scheduler.errors import HeadwayError

__all__ = ["unexpected"]

log = structlog.get_logger()


def unexpected(error: Exception, **where: str) -> HeadwayError:
    """What a caller is told. The fault is logged by its type and frames: its message may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("request_failed", error_type=type(error).__name__, traceback=frames, **where)
    return HeadwayError("internal error; the scheduler's log has the details")
