"""Router's messages to domain values and back. Proto messages stop here."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2
from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.admission.explaining import Explanation, Row
from headway_scheduler.admission.intake import Intake
from headway_scheduler.domain.decision import Decision, Placement, Why
from headway_scheduler.domain.desired import Principal, Tenant
from headway_scheduler.domain.names import ENDPOINTS, NODES, STRATEGIES
from headway_scheduler.domain.request import (
    BlocksPrompt,
    Prompt,
    Request,
    Subset,
    TaskClass,
    TextPrompt,
    TokensPrompt,
)
from headway_scheduler.errors import InvalidField
from headway_scheduler.fleet.columns import Columns
from headway_scheduler.index.hashing import SCHEMES, TOKENS
from headway_scheduler.learning.history import classify
from headway_scheduler.rpc.convert.numbers import uint32

__all__ = ["MAX_PROMPT_BYTES", "decision_to_proto", "explanation_to_proto", "request_from_proto", "write_decision"]

MAX_PROMPT_BYTES: Final = 4_000_000
"""A longer prompt is routed without affinity: its bytes are not hashed."""
_MAX_PROMPT_TOKENS: Final = 2**24
"""More than any model takes. Where nobody counts, all that tells is a client's Content-Length: it may be anything."""
_MAX_ID: Final = 256
_NONE: Final[frozenset[str]] = frozenset()
_MOST_PLACEMENTS: Final = 20_000
_MAX_TOKEN: Final = 2**31

_HINTS: Final = {
    pb.TASK_HINT_UNSPECIFIED: None,
    pb.TASK_HINT_SHORT: TaskClass.SHORT,
    pb.TASK_HINT_CHAT: TaskClass.CHAT,
    pb.TASK_HINT_LONG: TaskClass.LONG,
}
_PRIORITIES: Final = {
    pb.PRIORITY_UNSPECIFIED: None,
    pb.PRIORITY_BEST_EFFORT: -1,
    pb.PRIORITY_STANDARD: 0,
    pb.PRIORITY_CRITICAL: 1,
}
_CLASSES: Final = {
    TaskClass.SHORT: pb.TASK_CLASS_SHORT,
    TaskClass.CHAT: pb.TASK_CLASS_CHAT,
    TaskClass.LONG: pb.TASK_CLASS_LONG,
}


def request_from_proto(
    message: pb.RouteRequest, principal: Principal, intake: Intake, new_id: str, prompt_tokens: int | None = None
) -> tuple[Request, Tenant]:
    """A validated request and its tenant. Raises the refusals of `Intake` and InvalidField, in that order.

    `new_id` is taken where the caller chose no request id; `prompt_tokens` where the caller knows them already.
    """
    tenant = intake.tenant(principal, message.tenant)
    model = intake.model(tenant, message.model)
    request_id, adapter, session_id = message.request_id, message.adapter, message.session_id
    for field, value in (("request_id", request_id), ("adapter", adapter), ("session_id", session_id)):
        if len(value) > _MAX_ID:
            raise InvalidField(field, f"is longer than {_MAX_ID} characters")
    intake.check_adapter(tenant, adapter)
    prompt, tokens = _prompt(message, intake, model)
    prompt_tokens = min(tokens if prompt_tokens is None else prompt_tokens, _MAX_PROMPT_TOKENS)
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if message.task_hint not in _HINTS:
        raise InvalidField("task_hint", f"{message.task_hint} is no TaskHint")
    if message.priority not in _PRIORITIES:
        raise InvalidField("priority", f"{message.priority} is no Priority")
    priority = _PRIORITIES[message.priority]
    request = Request(
        request_id=request_id or new_id,
        tenant=tenant.id,
        domain=tenant.domain,
        model=model,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        adapter=adapter,
        max_tokens=max_tokens,
        task_class=classify(_HINTS[message.task_hint], max_tokens, prompt_tokens),
        session_id=session_id,
        priority=tenant.priority if priority is None else min(priority, tenant.priority),
        ttft_objective_ms=_milliseconds(message, "ttft_objective"),
        tpot_objective_ms=_milliseconds(message, "tpot_objective"),
        max_wait_s=_seconds(message, "max_wait"),
        excluded=_excluded(message),
        subset=_subset(message.subset) if message.HasField("subset") else None,
        cannot_inject_salt=message.cannot_inject_salt,
    )
    return request, tenant


def _prompt(message: pb.RouteRequest, intake: Intake, model: str) -> tuple[Prompt, int]:
    kind = message.WhichOneof("prompt")
    if kind is None:
        return None, 0
    prompt: Prompt
    if kind == "blocks":
        blocks = message.blocks
        scheme = SCHEMES.get(blocks.scheme)
        if scheme is None:
            raise InvalidField("blocks.scheme", f"{blocks.scheme!r} is none of {', '.join(SCHEMES)}")
        if blocks.block_size != scheme.block_size:
            raise InvalidField("blocks.block_size", f"{blocks.block_size}: {scheme.name} has {scheme.block_size}")
        # Token blocks are full: the prompt has at least their tokens, whatever the caller says or leaves out.
        least = len(blocks.hashes) * scheme.block_size if scheme is TOKENS else 0
        return BlocksPrompt(scheme.name, tuple(blocks.hashes)), max(blocks.prompt_tokens, least)
    if kind == "tokens":
        ids = np.array(message.tokens.ids, np.int64)  # one copy of memory, no object for each
        if len(ids) and (ids.min() < 0 or ids.max() >= _MAX_TOKEN):
            at = int(np.flatnonzero((ids < 0) | (ids >= _MAX_TOKEN))[0])
            raise InvalidField(f"tokens.ids[{at}]", f"{ids[at]} is not in [0, 2^31)")
        if len(ids) * TOKENS.unit_bytes > MAX_PROMPT_BYTES:
            return None, len(ids)
        prompt = TokensPrompt(ids.astype("<u4").tobytes())
    elif kind == "text":
        prompt = TextPrompt(message.text.encode())
    else:
        prompt = TextPrompt(canonical_chat(message.chat), chat=True)
    tokens = intake.prompt_tokens(model, prompt)
    if len(prompt.data) > MAX_PROMPT_BYTES:
        return None, tokens
    return prompt, tokens


def canonical_chat(chat: pb.ChatPrompt) -> bytes:
    """One byte string for a conversation: tools first, then each message; a longer conversation extends it."""
    parts = [chat.tools.encode()] if chat.tools else []
    for message in chat.messages:
        parts.append(f"\x01{message.role}\x02{message.name}\x03".encode())
        parts.append(message.content.encode())
    return b"".join(parts)


def _milliseconds(message: pb.RouteRequest, field: str) -> float | None:
    seconds = _seconds(message, field)
    return None if seconds is None else seconds * 1e3


def _seconds(message: pb.RouteRequest, field: str) -> float | None:
    if not message.HasField(field):  # type: ignore[arg-type]  # the names come from this module
        return None
    duration: Duration = getattr(message, field)
    seconds = duration.seconds + duration.nanos / 1e9
    if seconds < 0:
        raise InvalidField(field, "must not be negative")
    return seconds


def _excluded(message: pb.RouteRequest) -> frozenset[str]:
    names = message.excluded_endpoints
    return frozenset(_bare(name) for name in names) if names else _NONE


def _bare(name: str) -> str:
    return name.removeprefix(f"{ENDPOINTS}/")


def _subset(subset: pb.Subset) -> Subset:
    return Subset(frozenset(_bare(name) for name in subset.endpoints), dict(subset.labels))


def decision_to_proto(decision: Decision) -> pb.RouteResponse:
    """An answer."""
    response = pb.RouteResponse()
    write_decision(decision, response)
    return response


def write_decision(decision: Decision, response: pb.RouteResponse) -> None:
    """An answer, written into a message that is empty."""
    response.request_id = decision.request_id
    response.reservation_id = decision.reservation_id
    response.model = decision.model
    if decision.cache_salt:
        response.cache_salt = decision.cache_salt
    if decision.endpoint.headers:
        response.headers.update(decision.endpoint.headers)
    if decision.rate_limits is not None:
        response.answer_headers.update(decision.rate_limits.headers())
    response.endpoint.MergeFrom(placement_to_proto(decision.endpoint))
    response.fallbacks.extend([placement_to_proto(each) for each in decision.fallbacks])
    response.reservation_ttl.seconds = int(decision.ttl_s)
    _write_why(decision.why, response.decision)
    if decision.prefill_endpoint is not None:
        response.prefill_endpoint.CopyFrom(placement_to_proto(decision.prefill_endpoint))
    if decision.pull_from is not None:
        response.pull_from.endpoint.CopyFrom(placement_to_proto(decision.pull_from.placement))
        response.pull_from.tokens = decision.pull_from.tokens


_placements: dict[int, tuple[Placement, pb.Endpoint]] = {}
"""By `id`: an endpoint's placement is one object for as long as its agent says the same of it."""


def placement_to_proto(placement: Placement) -> pb.Endpoint:
    """An endpoint as answers name it. Not to be changed: it is made once a placement."""
    kept = _placements.get(id(placement))
    if kept is not None and kept[0] is placement:
        return kept[1]
    if len(_placements) >= _MOST_PLACEMENTS:
        _placements.clear()
    found = _endpoint(placement)
    _placements[id(placement)] = (placement, found)
    return found


def _endpoint(placement: Placement) -> pb.Endpoint:
    spec = placement.spec
    return pb.Endpoint(
        name=f"{ENDPOINTS}/{spec.id}",
        address=spec.address,
        dp_rank=spec.dp_rank,
        node=f"{NODES}/{placement.node}",
        devices=spec.device_uuids,
    )


def why_to_proto(why: Why) -> pb.Decision:
    """The reasons."""
    message = pb.Decision()
    _write_why(why, message)
    return message


def _write_why(why: Why, message: pb.Decision) -> None:
    if why.strategy:
        message.strategy = f"{STRATEGIES}/{why.strategy}"
    if why.fell_back_from:
        message.fell_back_from = f"{STRATEGIES}/{why.fell_back_from}"
        message.fallback_reason = why.fallback_reason
    message.prompt_tokens = why.prompt_tokens
    message.matched_tokens = why.matched_tokens
    if why.predicted_ttft_ms is not None:
        message.predicted_ttft_ms = why.predicted_ttft_ms
    message.task_class = _CLASSES[why.task_class]
    message.task_weight = why.task_weight
    message.candidates = why.candidates
    if why.held_ms:
        message.held_ms = why.held_ms


def explanation_to_proto(
    explanation: Explanation, columns: Columns, refusal: status_pb2.Status | None, now: float
) -> pb.ExplainResponse:
    """The table. `refusal` is the error of the explanation as a status."""
    return pb.ExplainResponse(
        decision=None if explanation.why is None else why_to_proto(explanation.why),
        rows=_rows(explanation.rows, columns, now),
        refusal=refusal,
        would_hold=explanation.would_hold,
    )


def _rows(rows: Iterable[Row], columns: Columns, now: float) -> list[pb.ExplainRow]:
    found = []
    for row in rows:
        endpoint = row.endpoint
        slot = endpoint.slot
        found.append(
            pb.ExplainRow(
                endpoint=placement_to_proto(endpoint.placement),
                chosen=row.chosen,
                hard_guards=row.hard_guards,
                soft_guards=row.soft_guards,
                cost=row.cost,
                predicted_ttft_ms=row.predicted_ttft_ms,
                matched_tokens=uint32(row.matched_tokens),
                inflight=uint32(columns.inflight[slot] + columns.external[slot]),
                weighted_inflight=float(columns.weight_micro[slot] / 1e6 + columns.external[slot]),
                queued_prefill_ms=float(columns.prefill_us[slot] / 1e3),
                memory_pressure=known(columns.memory_pressure[slot]),
                utilization=known(columns.utilization[slot]),
                temperature_c=known(columns.temperature_c[slot]),
                kv_use=known(columns.kv_use[slot]),
                sample_age_ms=known((now - columns.sampled_at[slot]) * 1e3),
                guard_details=row.details,
            )
        )
    return found


def known(value: float) -> float | None:
    """A column's entry for an optional field: NaN is unset."""
    return None if np.isnan(value) else float(value)
