"""Who is signed in: a random cookie stands for a credential, as long as the credential counts."""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

__all__ = ["MOST_SESSIONS", "Session", "Sessions"]

MOST_SESSIONS: Final = 1_000
"""Sessions at once; the one used longest ago ends first."""
_IDLE_S: Final = 12 * 3600.0


@dataclass(slots=True)
class Session:
    """One browser. `authorization` is shown to the authenticator at every request; None: nobody needs to sign in."""

    id: str
    authorization: str | None = field(repr=False)
    csrf: str = field(repr=False)
    used_at: float
    notice: str = ""
    """Said once, on the next page: what a write did."""

    def proves(self, token: str) -> bool:
        """Does a form carry this session's own token?"""
        return hmac.compare_digest(self.csrf.encode(), token.encode("utf-8", "replace"))


class Sessions:
    """Sessions by their cookie, in memory: a restart ends them. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], idle_s: float = _IDLE_S, most: int = MOST_SESSIONS) -> None:
        self._clock, self._idle_s, self._most = clock, idle_s, most
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        """How many there are, expired ones not yet met among them."""
        return len(self._sessions)

    def open(self, authorization: str | None) -> Session:
        """A new one, whose id nobody knew before."""
        while len(self._sessions) >= self._most:
            self._sessions.popitem(last=False)
        session = Session(secrets.token_urlsafe(32), authorization, secrets.token_urlsafe(32), self._clock())
        self._sessions[session.id] = session
        return session

    def find(self, session_id: str) -> Session | None:
        """The session of this cookie, if it was used lately."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        now = self._clock()
        if now - session.used_at > self._idle_s:
            del self._sessions[session_id]
            return None
        session.used_at = now
        self._sessions.move_to_end(session_id)
        return session

    def close(self, session_id: str) -> None:
        """End it."""
        self._sessions.pop(session_id, None)
