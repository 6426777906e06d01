"""What tenants consumed, by the minute."""

from dataclasses import dataclass
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
