"""What a tenant may still use this minute, and how HTTP answers say it."""

import msgspec

__all__ = ["RateLimit", "RateLimits"]


class RateLimit(msgspec.Struct, frozen=True, gc=False):
    """One limit a minute: what is left of it, and in how many seconds all of it will be there again."""

    limit: int
    remaining: int
    reset_s: float


class RateLimits(msgspec.Struct, frozen=True, gc=False):
    """A tenant's; None where it has no such quota."""

    requests: RateLimit | None = None
    tokens: RateLimit | None = None

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-limit-requests` and so on, by OpenAI's names and in its form: `120ms`, `8.64s`, `6m0s`."""
        found: dict[str, str] = {}
        for what, limit in (("requests", self.requests), ("tokens", self.tokens)):
            if limit is not None:
                found[f"x-ratelimit-limit-{what}"] = str(limit.limit)
                found[f"x-ratelimit-remaining-{what}"] = str(limit.remaining)
                found[f"x-ratelimit-reset-{what}"] = _duration(limit.reset_s)
        return found


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{round(seconds * 1e3)}ms"
    if seconds < 60:
        return f"{seconds:.2f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
