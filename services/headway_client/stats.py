"""What the client counts."""

from dataclasses import dataclass

__all__ = ["ClientStats"]


@dataclass(slots=True)
class ClientStats:
    """Counters since the client was made; they only grow."""

    routes: int = 0
    """Reservations the scheduler gave."""
    refusals: int = 0
    """Routes that raised RouteRefused."""
    fail_open_routes: int = 0
    """Reservations made without a scheduler."""
    bypassed_routes: int = 0
    """Reservations made here because a scheduler said so: bypassed, or beyond the routed percentage."""
    connects: int = 0
    """Streams a scheduler welcomed."""
    reconnects: int = 0
    """Those of them that were not the first."""
    connect_failures: int = 0
    """Attempts that met no welcome."""
    unresponsive: int = 0
    """Streams given up because a ping was not answered."""
    resumed: int = 0
    """Reservations the scheduler still had."""
    recreated: int = 0
    """Reservations it had lost and counts again, and fail-open ones it learned of."""
    resume_failures: int = 0
    """Reservations it would not take back: endpoint gone, or invalid."""
    cancels: int = 0
    """Calls given up before they were answered."""
    messages: int = 0
    """Stream messages written; far fewer than routes + reports under load."""
    reports: int = 0
    """Reports written."""
    reports_dropped: int = 0
    """Reservations whose reports were given up because too many waited for a scheduler."""
    pings: int = 0
    """Empty messages written to see whether the scheduler lives."""
