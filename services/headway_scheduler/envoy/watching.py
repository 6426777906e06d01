"""A request that somebody else places: what we would have done with it, and what came of it."""

from headway_scheduler.admission.watching import Verdict
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.values import Owner

__all__ = ["Watched", "common_salt", "watch"]


class Watched:
    """One such request, from when it is seen to its first token."""

    def __init__(self, scheduler: Scheduler, verdict: Verdict) -> None:
        self._scheduler, self._verdict = scheduler, verdict
        self._counted = False

    def went_to(self, address: str, owner: Owner) -> str:
        """It was served there (`ip:port`; empty: nobody tells). Returns the reservation it counts as; empty: none."""
        if self._counted:
            return ""
        self._counted = True
        scheduler, verdict = self._scheduler, self._verdict
        endpoint = scheduler.fleet.find(scheduler.addresses.named(address)) if address else None
        scheduler.observations.count(verdict, None if endpoint is None else endpoint.slot)
        if endpoint is None or verdict.served is None:
            return ""
        request, matched = verdict.request, verdict.matched_tokens
        return scheduler.dispatcher.place(request, owner, endpoint, matched, scheduler.clock()).id

    def first_token(self) -> float:
        """Its first token goes by now; returns its TTFT in milliseconds."""
        ttft_ms = (self._scheduler.clock() - self._verdict.at) * 1e3
        self._scheduler.observations.first_token(self._verdict, ttft_ms)
        return ttft_ms


def watch(scheduler: Scheduler, request: Request, owner: Owner) -> Watched:
    """Price what would be done with it now."""
    return Watched(scheduler, scheduler.dispatcher.appraise(request, owner, scheduler.clock()))


def common_salt(scheduler: Scheduler, request: Request) -> str:
    """The cache salt that fits wherever the request may go; empty: there is none that fits everywhere."""
    own, burst = scheduler.fleet.candidates(request.tenant, request.model, request.adapter)
    slots = {*own.tolist(), *burst.tolist()}
    engines = {scheduler.fleet.by_slot[slot].spec.engine for slot in slots}
    salts = {scheduler.salts.salt(request.domain, engine) for engine in engines}
    return salts.pop() if len(salts) == 1 else ""
