"""How the client behaves when schedulers do not."""

from dataclasses import dataclass

__all__ = ["ClientOptions"]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Times in seconds; the defaults suit a data plane beside its scheduler."""

    fail_open: bool = True
    """Whether to route alone while no scheduler answers; otherwise such calls raise UNAVAILABLE."""
    fail_open_after_s: float = 1.0
    """How long no scheduler may answer before that."""
    connect_timeout_s: float = 2.0
    """How long a scheduler may take to welcome a stream."""
    idle_ping_s: float = 10.0
    """How often an idle stream is asked for a sign of life."""
    backoff_initial_s: float = 0.1
    """Ceiling of the first delay after every target failed; it doubles …"""
    backoff_max_s: float = 2.0
    """… up to this."""
    close_timeout_s: float = 2.0
    """How long `close` waits for the last reports to be taken."""
