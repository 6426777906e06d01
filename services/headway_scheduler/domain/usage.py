"""What tenants consumed, by the minute."""

from dataclasses import dataclass, replace
from datetime import datetime

__all__ = ["Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Requests and tokens of one tenant and model in the minute that starts at `minute` (UTC)."""

    tenant: str
    model: str
    minute: datetime
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def plus(self, other: "Usage") -> "Usage":
        """Both together; `other` is of the same tenant, model and minute."""
        return replace(
            self,
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )
