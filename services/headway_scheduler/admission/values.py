"""A request on its way to an endpoint, in values made and copied in C (ADR 25)."""

import msgspec

from headway_scheduler.admission.marking import Marks
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.request import BlocksPrompt, Request, TextPrompt, TokensPrompt
from headway_scheduler.fleet.columns import FloatColumn, Slots
from headway_scheduler.fleet.values import Owner
from headway_scheduler.index.kv import KvPrompt
from headway_scheduler.index.values import Chain
from headway_scheduler.learning.values import Flight
from headway_scheduler.strategies.base import Priced

__all__ = ["Charge", "Choice", "Work"]


class Charge(msgspec.Struct, gc=False):
    """What a tenant was charged for a request in an arena, before its weight. `counters`: their number."""

    arena: str
    counters: int
    service: float


class Work(msgspec.Struct, eq=False, gc=False):
    """A request being decided, with what is computed once for it. Times: scheduler clock, seconds.

    `identity` tells a retry from another request under the same id; None: not known. `kv_output` is the answer that
    memory is kept for; `weight` and `uncapped_weight` are the task's, fixed here; `flight` is what the cost model
    learns from; `ttft_ms` is as reported; `kv` is the prompt as engines' KV events know it, where any might;
    `least_prefill_ms` is its prefill on the best candidate, as last priced;
    `urgent`: it has waited so long that it goes before all others of its priority;
    `patient`: it may be held at all; `split`: which of its model's splits it was drawn for last; `retry`: it counts as
    a retry now (`Retries`); `cached`: of its prompt where it would go, as last priced; `charge`: what its tenant was
    charged for it (`fairness`); `first_at`: since when it is the first of its tenant's line; `seen` is the observer's
    (`observing`).
    """

    request: Request
    owner: Owner
    identity: int | None
    chain: Chain
    submitted_at: float
    expected_output: float
    estimated_tokens: float
    kv_output: float
    weight: float
    uncapped_weight: float
    text_bytes: int = 0
    fingerprint: int | None = None
    kv: KvPrompt | None = None
    decision: Decision | None = None
    flight: Flight | None = None
    ttft_ms: float | None = None
    least_prefill_ms: float = 0.0
    urgent: bool = False
    patient: bool = True
    cached: float = 0.0
    charge: Charge | None = None
    first_at: float | None = None
    split: str = ""
    retry: bool = False
    seen: object = None

    @property
    def data(self) -> bytes:
        """The prompt's bytes, while they are kept: until it has its place."""
        prompt = self.request.prompt
        return prompt.data if isinstance(prompt, TextPrompt | TokensPrompt) else b""

    @property
    def held_bytes(self) -> int:
        """The memory its prompt takes while it waits."""
        prompt = self.request.prompt
        return 8 * len(prompt.hashes) if isinstance(prompt, BlocksPrompt) else len(self.data)

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes Route idempotent."""
        return (self.owner.principal, self.request.tenant, self.request.request_id)


class Choice(msgspec.Struct, eq=False, gc=False):
    """A priced set of candidates. `order` holds the positions in `slots` of the best ones, the chosen first.

    `slot`: the chosen one's; `dispatchable`: it may be given now; `binds_late`: if not, it is waited for and no other
    taken. `burst`: they are only borrowed. `transfer_ms`: to bring what each has of the prompt to its GPU; `known`:
    what engines' own events say each has. `marks` are the guards closed on each, `bits` those of them that were heeded.
    """

    slots: Slots
    priced: Priced
    hits: FloatColumn
    transfer_ms: FloatColumn | None
    known: FloatColumn | None
    order: list[int]
    slot: int
    dispatchable: bool
    binds_late: bool
    marks: Marks
    bits: int
    burst: bool = False

    @property
    def position(self) -> int:
        """Where the chosen one stands in `slots`."""
        return self.order[0]

    @property
    def predicted_ttft_ms(self) -> float | None:
        """The strategy's prediction for the chosen one, if it made one."""
        ttft = self.priced.costs.predicted_ttft_ms
        return None if ttft is None else float(ttft[self.position])

    @property
    def hit_tokens(self) -> float:
        """What the chosen one has of the prompt."""
        return float(self.hits[self.position])

    @property
    def hit_transfer_ms(self) -> float:
        """What it takes the chosen one to bring that to its GPU."""
        return 0.0 if self.transfer_ms is None else float(self.transfer_ms[self.position])
