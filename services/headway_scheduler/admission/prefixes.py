"""What is known of a request's prefix on each endpoint: the approximate image, and what engines' KV events say.

A request is matched only where its isolation domain's blocks can be told from others': under its own salt where the
engine mixes salts into its hashes, and unsalted only on endpoints that serve no other domain.
"""

from collections.abc import Callable
from typing import Final

from headway_scheduler.admission.salts import Salts
from headway_scheduler.admission.values import Work
from headway_scheduler.domain.request import BlocksPrompt, Request, TextPrompt, TokensPrompt
from headway_scheduler.fleet.fleet import Fleet
from headway_scheduler.fleet.members import Endpoint
from headway_scheduler.index.chain import ChainIndex
from headway_scheduler.index.demand import Demand
from headway_scheduler.index.hashing import TOKENS
from headway_scheduler.index.kv import Exact, Ids, Kind, KvIndex, KvPrompt, kv_root
from headway_scheduler.index.values import Match

__all__ = ["Prefixes", "Tokenize"]

_SOON_S: Final = 5.0
"""How long beyond its predicted first token a request's blocks are believed to be on their way."""

Tokenize = Callable[[str, TextPrompt], Ids | None]
"""A model's id and a prompt, to token ids; None: they cannot be known here."""


def no_tokenizer(_model: str, _prompt: TextPrompt) -> None:
    """Text stays text."""
    return


class Prefixes:
    """Matches prompts, and remembers what was given to endpoints."""

    def __init__(
        self,
        fleet: Fleet,
        index: ChainIndex,
        kv: KvIndex,
        salts: Salts,
        *,
        max_blocks: int,
        time_scale: float,
        tokenize: Tokenize = no_tokenizer,
    ) -> None:
        self.index, self.kv = index, kv
        self.demand = Demand(max_blocks)
        self.tokenize = tokenize
        self._fleet, self._salts = fleet, salts
        self._max_blocks, self._time_scale = max_blocks, time_scale
        self._salting = 0
        fleet.on_announced.append(self._announced)
        fleet.on_removed.append(self._removed)

    def prompt(self, request: Request) -> KvPrompt | None:
        """A prompt as feeds know it; None: no feed could know it."""
        if not self.kv.feeds:
            return None
        prompt = request.prompt
        if isinstance(prompt, TokensPrompt):
            return KvPrompt.of_ids(prompt.data, self._max_blocks)
        if isinstance(prompt, BlocksPrompt) and prompt.scheme == TOKENS.name:
            return KvPrompt(list(prompt.hashes[: self._max_blocks]), Kind.IDS)
        if isinstance(prompt, TextPrompt):
            ids = self.tokenize(request.model, prompt)
            return None if ids is None else KvPrompt.of_text(ids, self._max_blocks)
        return None

    def match(self, work: Work, now: float) -> Match | Exact:
        """How much of its prompt each endpoint holds."""
        approximate = self.index.match(work.chain, work.data)
        if work.kv is None or not self.kv.feeds:
            return approximate
        return self.kv.match(work.kv, self._roots(work.request), approximate, now)

    def expect(self, work: Work, slot: int, predicted_ttft_ms: float, now: float) -> None:
        """`slot` is about to hold this prompt's prefix."""
        if work.chain.hashes:
            self.index.touch(slot, work.chain)
        if work.kv is not None:
            until = now + _SOON_S / self._time_scale + predicted_ttft_ms / 1e3
            for root, mask in self._roots(work.request):
                if mask >> slot & 1:
                    self.kv.expect(slot, work.kv, root, until)

    def _roots(self, request: Request) -> tuple[tuple[int, int], ...]:
        """Where which root is this request's: pairs of a root and a mask of slots, disjoint."""
        adapter, domain = request.adapter, request.domain
        if request.cannot_inject_salt:
            return ((kv_root(adapter, ""), self._fleet.serving_only(domain)),)
        salted = (kv_root(adapter, self._salts.of(domain)), self._salting)
        if not self.kv.feeds & ~self._salting:
            return (salted,)
        return (salted, (kv_root(adapter, ""), self._fleet.serving_only(domain) & ~self._salting))

    def _announced(self, endpoint: Endpoint) -> None:
        bit = 1 << endpoint.slot
        if self._salts.honoured_by(endpoint.spec.engine):
            self._salting |= bit
        else:
            self._salting &= ~bit

    def _removed(self, endpoint: Endpoint) -> None:
        self._salting &= ~(1 << endpoint.slot)
