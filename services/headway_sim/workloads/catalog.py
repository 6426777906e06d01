"""THE list of workloads. Rates are for eight A100-40G with an 8B model; `--rate` scales them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from headway_sim.workloads.article import ArticleWorkload
from headway_sim.workloads.base import Workload
from headway_sim.workloads.overload import ArticleOverload
from headway_sim.workloads.sessions import Lengths, OpenWorkload, SessionKind

__all__ = ["EQUALS", "FLOOD", "MIXED", "OVERLOAD", "QUIET", "WORKLOADS", "NamedWorkload"]

OVERLOAD: Final = "article-overload"
MIXED: Final = "mixed-tenants"
QUIET: Final = "quiet-tenant"
FLOOD: Final = "noisy-neighbour"
EQUALS: Final = "equal-tenants"


@dataclass(frozen=True, slots=True)
class NamedWorkload:
    """How to make it from a seed, and what it asks of the fleet.

    `waiting_limit` is each engine's. `open_loop` makes the same sessions arriving by themselves, where the workload
    itself is a closed loop.
    """

    make: Callable[[int], Workload]
    summary: str
    tenants: tuple[str, ...] = ("default",)
    waiting_limit: int | None = None
    open_loop: Callable[[int], Workload] | None = None


def _shared_system_prompt(seed: int) -> OpenWorkload:
    chat = SessionKind(
        system_tokens=2048,
        turns=(1, 5),
        first_tokens=Lengths(120),
        new_tokens=Lengths(80),
        output_tokens=Lengths(180, most=1500),
        think_s=8.0,
    )
    return OpenWorkload((chat,), sessions=2000, peak_per_s=15.0, seed=seed)


def _agentic(seed: int) -> OpenWorkload:
    agent = SessionKind(
        system_tokens=3072,
        system_prompts=4,
        turns=(6, 20),
        first_tokens=Lengths(400),
        new_tokens=Lengths(600, sigma=1.0, most=6000),
        output_tokens=Lengths(90, most=800),
        think_s=2.0,
        role="tool",
    )
    return OpenWorkload((agent,), sessions=250, peak_per_s=0.8, seed=seed)


def _bursty(seed: int) -> OpenWorkload:
    chat = SessionKind(
        system_tokens=512,
        system_prompts=8,
        turns=(1, 3),
        first_tokens=Lengths(900, most=8000),
        new_tokens=Lengths(200),
        output_tokens=Lengths(150, most=1500),
        think_s=5.0,
    )
    return OpenWorkload((chat,), sessions=2500, peak_per_s=60.0, rate_at=_bursts, seed=seed)


def _bursts(at_s: float) -> float:
    """6 sessions a second, and 60 during 5 seconds of every 30."""
    return 60.0 if at_s % 30.0 < 5.0 else 6.0


def _mixed_tenants(seed: int) -> OpenWorkload:
    kinds = (
        SessionKind(
            "chat",
            share=0.4,
            system_tokens=512,
            turns=(1, 6),
            first_tokens=Lengths(150),
            output_tokens=Lengths(220, most=1500),
            think_s=8.0,
        ),
        SessionKind(
            "search",
            share=0.2,
            system_tokens=1024,
            first_tokens=Lengths(5000, sigma=0.4, most=16_000),
            output_tokens=Lengths(120),
        ),
        SessionKind(
            "summaries",
            share=0.1,
            first_tokens=Lengths(9000, sigma=0.5, most=30_000),
            output_tokens=Lengths(450, sigma=0.4),
        ),
        SessionKind(
            "labels",
            share=0.3,
            system_tokens=1024,
            first_tokens=Lengths(250),
            output_tokens=Lengths(6, sigma=0.4, most=32),
            max_tokens=32,
        ),
    )
    return OpenWorkload(kinds, sessions=3000, peak_per_s=16.0, seed=seed)


_TENANT_CHAT: Final = SessionKind(
    system_tokens=512,
    turns=(1, 4),
    first_tokens=Lengths(600, most=4000),
    output_tokens=Lengths(40, most=300),
    think_s=4.0,
)
_QUIET_PER_S: Final = 4.0
_TENANTS_S: Final = 30.0


def _chats_of(seed: int, **rates_per_s: float) -> OpenWorkload:
    """The same chats for each tenant, at its own rate in sessions a second; for four A100-40G."""
    total = sum(rates_per_s.values())
    kinds = tuple(replace(_TENANT_CHAT, tenant=name, share=rate / total) for name, rate in rates_per_s.items())
    return OpenWorkload(kinds, sessions=round(total * _TENANTS_S), peak_per_s=total, seed=seed)


WORKLOADS: Final[Mapping[str, NamedWorkload]] = {
    "article": NamedWorkload(
        lambda seed: ArticleWorkload(seed=seed),
        "60 sessions of 5 turns, 20 at a time, 200 tokens in and 800 out",
        open_loop=lambda seed: ArticleOverload(seed=seed),
    ),
    OVERLOAD: NamedWorkload(
        lambda seed: ArticleOverload(seed=seed),
        "the article's sessions arriving by themselves, at the rate where round robin refuses 12 %",
        waiting_limit=8,
    ),
    "shared-system-prompt": NamedWorkload(
        _shared_system_prompt, "short chats that all begin with the same 2,048 tokens; 15 sessions a second"
    ),
    "agentic": NamedWorkload(
        _agentic, "tool-calling sessions: 6 to 20 calls, a long growing context, short answers, seconds between them"
    ),
    "bursty": NamedWorkload(_bursty, "6 sessions a second, and ten times as many during 5 seconds of every 30"),
    QUIET: NamedWorkload(
        lambda seed: _chats_of(seed, quiet=_QUIET_PER_S),
        "one tenant's chats, 4 sessions a second; for four engines, as the two below",
        tenants=("quiet",),
    ),
    FLOOD: NamedWorkload(
        lambda seed: _chats_of(seed, quiet=_QUIET_PER_S, noisy=10 * _QUIET_PER_S),
        "the same chats, beside a tenant that starts ten times as many: more than the fleet can serve",
        tenants=("quiet", "noisy"),
    ),
    EQUALS: NamedWorkload(
        lambda seed: _chats_of(seed, a=8.0, b=11.0, c=15.0, d=22.0),
        "four tenants of one weight, each of which alone asks for more than its quarter of the fleet",
        tenants=("a", "b", "c", "d"),
    ),
    MIXED: NamedWorkload(
        _mixed_tenants,
        "chats, search answers, long summaries and short labels, each of its own tenant",
        tenants=("chat", "labels", "search", "summaries"),
    ),
}
"""By name."""
