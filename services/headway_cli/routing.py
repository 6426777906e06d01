"""`route` and `explain`: a decision by hand, and the why of one."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from headway.routing.v1 import routing_pb2 as pb

from headway_cli.client import Client
from headway_cli.command import command
from headway_cli.decisions import show_decision
from headway_cli.errors import CliError, UsageProblem, from_status
from headway_cli.guards import guards_with_details
from headway_cli.messages import Plain, to_plain
from headway_cli.output import print_item, print_plain, print_text, show, table
from headway_cli.session import Output, Session
from headway_cli.why import why_in_words

__all__ = ["add_routing_commands"]

_MARGIN_S: Final = 10.0
_DEFAULT_MAX_WAIT_S: Final = 30.0
_MAX_WAIT_S: Final = 86_400.0
_PRIORITIES: Final = {
    "": pb.PRIORITY_UNSPECIFIED,
    "best-effort": pb.PRIORITY_BEST_EFFORT,
    "standard": pb.PRIORITY_STANDARD,
    "critical": pb.PRIORITY_CRITICAL,
}

_Model = Annotated[str, typer.Option("--model", "-m", help="A model of the catalogue, or an alias.")]
_Text = Annotated[str | None, typer.Option(help="The prompt.")]
_PromptFile = Annotated[
    Path | None, typer.Option("--file", exists=True, dir_okay=False, help="A file that holds the prompt.")
]
_Tokens = Annotated[str | None, typer.Option(help="The prompt as token ids: 1,2,3.")]
_Tenant = Annotated[str, typer.Option(help="Whose request it is; empty: the credential's own tenant.")]
_Adapter = Annotated[str, typer.Option(help="LoRA adapter.")]
_MaxTokens = Annotated[
    int | None, typer.Option(min=0, max=2**32 - 1, help="The output limit that the request carries.")
]
_SessionId = Annotated[str, typer.Option("--session", help="Session id.")]
_PriorityName = Annotated[str, typer.Option("--priority", help="best-effort, standard or critical.")]
_MaxWait = Annotated[float | None, typer.Option(min=0, max=_MAX_WAIT_S, help="Seconds it may be held; 0: not at all.")]
_Exclude = Annotated[list[str], typer.Option("--exclude", help="An endpoint not to choose; may be repeated.")]
_Label = Annotated[list[str], typer.Option("--label", help="KEY=VALUE that the endpoint must have; may be repeated.")]


def add_routing_commands(app: typer.Typer) -> None:
    """Add them to the root."""
    command(
        app,
        "route",
        help="Ask for an endpoint and reserve a place on it, as a data plane does.",
        example='headway route --model llama-3-8b --text "Hello" --max-tokens 64 --finish',
    )(_route)
    command(
        app,
        "explain",
        help="Show how every endpoint looks to a request, and why one is chosen; or looked to a past one, by its id.",
        example="headway explain --model llama-3-8b --file prompt.txt --tenant acme",
    )(_explain)


def _route(
    session: Session,
    model: _Model,
    text: _Text = None,
    file: _PromptFile = None,
    tokens: _Tokens = None,
    tenant: _Tenant = "",
    adapter: _Adapter = "",
    max_tokens: _MaxTokens = None,
    session_id: _SessionId = "",
    priority: _PriorityName = "",
    max_wait: _MaxWait = None,
    exclude: _Exclude = [],  # noqa: B006 -- Typer copies it
    label: _Label = [],  # noqa: B006
    request_id: Annotated[str, typer.Option(help="A retry with the same id keeps its place.")] = "",
    finish: Annotated[
        bool, typer.Option("--finish", help="Give the place back at once. Else it waits for reports until its TTL.")
    ] = False,
) -> None:
    request = _request(model, text, file, tokens, tenant, adapter, max_tokens, session_id, priority, exclude, label)
    request.request_id = request_id
    if max_wait is not None:
        request.max_wait.FromNanoseconds(int(max_wait * 1e9))
    patience_s = (_DEFAULT_MAX_WAIT_S if max_wait is None else max_wait) + _MARGIN_S
    with session.client() as client:
        response = client.call(client.router.Route, request, timeout_s=patience_s)
        finished = finish and _finish(client, response.reservation_id)
    if session.output is not Output.TABLE:
        print_plain(session, {**to_plain(response), **({"finished": True} if finished else {})})
        return
    print_item(session, _answer(response))
    if finished:
        print_text("the place is given back")


def _answer(response: pb.RouteResponse) -> dict[str, Plain]:
    """What a person wants to know of an answer."""
    return {
        "endpoint": response.endpoint.name,
        "prefill endpoint": response.prefill_endpoint.name,
        "send to": response.endpoint.address,
        "ask for model": response.model,
        "node": response.endpoint.node,
        "devices": list(response.endpoint.devices),
        "fallbacks": [fallback.address for fallback in response.fallbacks],
        "why": why_in_words(response.decision),
        "reservation": response.reservation_id,
        "expires after": f"{response.reservation_ttl.seconds} s without a report",
    }


def _finish(client: Client, reservation_id: str) -> bool:
    """Report it cancelled: nothing was sent to the endpoint, so nothing is to be learned from it."""
    report = pb.Report(reservation_id=reservation_id, finished=pb.Finished(outcome=pb.OUTCOME_CANCELLED))
    result = client.call(client.router.Report, pb.ReportRequest(reports=[report])).results[0]
    if result.status not in {pb.REPORT_STATUS_APPLIED, pb.REPORT_STATUS_DUPLICATE}:
        status = pb.ReportStatus.Name(result.status).removeprefix("REPORT_STATUS_")
        raise CliError(f"REPORT_{status}", f"{reservation_id} was not given back {result.detail}".strip())
    return True


def _explain(
    session: Session,
    past: Annotated[
        str, typer.Argument(metavar="[ID]", help="A past request's id, or a reservation's, instead of a new request.")
    ] = "",
    model: Annotated[str, typer.Option("--model", "-m", help="A model of the catalogue, or an alias.")] = "",
    text: _Text = None,
    file: _PromptFile = None,
    tokens: _Tokens = None,
    tenant: _Tenant = "",
    adapter: _Adapter = "",
    max_tokens: _MaxTokens = None,
    session_id: _SessionId = "",
    priority: _PriorityName = "",
    exclude: _Exclude = [],  # noqa: B006 -- Typer copies it
    label: _Label = [],  # noqa: B006
    strategy: Annotated[str, typer.Option(help="Price with this strategy instead of the bound one.")] = "",
) -> None:
    if bool(past) == bool(model):
        raise UsageProblem("give --model of a new request, or the id of a past one")
    if past:
        with session.client() as client:
            show_decision(session, client, past)
        return
    request = _request(model, text, file, tokens, tenant, adapter, max_tokens, session_id, priority, exclude, label)
    with session.client() as client:
        response = client.call(client.router.Explain, pb.ExplainRequest(request=request, strategy=strategy))
    refusal = from_status(response.refusal) if response.HasField("refusal") else None
    if session.output is not Output.TABLE:
        plain = to_plain(response)
        plain["refusal"] = refusal.as_plain() if refusal else None
        print_plain(session, plain)
        return
    if response.rows:
        show(table([_row(row) for row in response.rows], tuple(_row(pb.ExplainRow())), {"": {"➜": "bold green"}}))
    if response.HasField("decision"):
        print_text(why_in_words(response.decision))
    if refusal:
        print_text(f"Route would refuse: {refusal.reason}: {refusal.message}")
    elif response.would_hold:
        print_text("Route would hold it until the endpoint is worth giving")


def _row(row: pb.ExplainRow) -> dict[str, Plain]:
    age_s = row.sample_age_ms / 1e3
    return {
        "": "➜" if row.chosen else " ",
        "endpoint": row.endpoint.name.removeprefix("endpoints/"),
        "node": row.endpoint.node.removeprefix("nodes/"),
        "cost": _known(row, "cost"),
        "TTFT ms": _known(row, "predicted_ttft_ms"),
        "matched": row.matched_tokens,
        "in flight": row.inflight,
        "queued ms": round(row.queued_prefill_ms, 1),
        "KV use": _known(row, "kv_use"),
        "pressure": _known(row, "memory_pressure"),
        "GPU use": _known(row, "utilization"),
        "°C": _known(row, "temperature_c"),
        "age s": round(age_s, 1) if row.HasField("sample_age_ms") else None,
        "guards": guards_with_details(row),
    }


def _known(row: pb.ExplainRow, field: Any) -> float | None:  # the names of its optional fields
    return round(getattr(row, field), 3) if row.HasField(field) else None


def _request(
    model: str,
    text: str | None,
    file: Path | None,
    tokens: str | None,
    tenant: str,
    adapter: str,
    max_tokens: int | None,
    session_id: str,
    priority: str,
    exclude: list[str],
    label: list[str],
) -> pb.RouteRequest:
    if sum(given is not None for given in (text, file, tokens)) > 1:
        raise UsageProblem("--text, --file and --tokens exclude each other")
    if priority not in _PRIORITIES:
        raise UsageProblem(f"--priority: {priority!r} is none of {', '.join(filter(None, _PRIORITIES))}")
    request = pb.RouteRequest(
        model=model.removeprefix("models/"),
        tenant=tenant,
        adapter=adapter,
        max_tokens=max_tokens,
        session_id=session_id,
        priority=_PRIORITIES[priority],
        excluded_endpoints=exclude,
    )
    if text is not None:
        request.text = text
    elif file is not None:
        request.text = _prompt(file)
    elif tokens is not None:
        request.tokens.ids.extend(_token_ids(tokens))
    for pair in label:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageProblem(f"--label: {pair!r} must look like KEY=VALUE")
        request.subset.labels[key] = value
    return request


def _prompt(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageProblem(f"--file: {file}: is no text in UTF-8") from None


def _token_ids(text: str) -> list[int]:
    ids = []
    for position, part in enumerate(part.strip() for part in text.split(",")):
        try:
            identifier = int(part)
        except ValueError:
            raise UsageProblem(f"--tokens: {part!r} at position {position} is no whole number") from None
        if not -(2**63) <= identifier < 2**63:
            raise UsageProblem(f"--tokens: {part} at position {position} is too large")
        ids.append(identifier)
    return ids
