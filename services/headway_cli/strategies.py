"""Verbs of strategies beyond the common ones: switch, tune, bind, shadow, look back and roll back."""

import hashlib
import re
from typing import Annotated, Any

import typer
from headway.admin.v1 import admin_pb2 as pb

from headway_cli.client import Client
from headway_cli.command import command
from headway_cli.errors import UsageProblem
from headway_cli.kinds import STRATEGIES, STRATEGY_BINDINGS
from headway_cli.messages import to_plain
from headway_cli.output import print_rows
from headway_cli.resources import Etag, Name, done, edited
from headway_cli.session import Output, Session

__all__ = ["add_strategy_verbs"]

_Tenant = Annotated[str, typer.Option("--tenant", help="Only for this tenant.")]
_Model = Annotated[str, typer.Option("--model", help="Only for this model.")]
_Group = Annotated[str, typer.Option("--group", help="Only for tenants of this GPU group.")]


def add_strategy_verbs(app: typer.Typer) -> None:
    """Add them to `headway strategies`."""
    command(
        app,
        "enable",
        help="Let a strategy decide again where it is bound.",
        example="headway strategies enable adaptive",
    )(_enable)
    command(
        app,
        "disable",
        help="Let a strategy's fallback stand in for it.",
        example="headway strategies disable adaptive",
    )(_disable)
    command(
        app,
        "tune",
        help="Set parameters of a strategy; the next Route uses them. Nothing after the = restores the default.",
        example="headway strategies tune adaptive externality=0.2",
    )(_tune)
    command(
        app,
        "bind",
        help="Bind a strategy: for everything, or for a tenant, a model, both, or a GPU group. The most specific wins.",
        example="headway strategies bind prefix_match --tenant acme",
    )(_bind)
    command(
        app,
        "shadow",
        help="Let a strategy price along without anyone obeying it.",
        example="headway strategies shadow gpu_aware --model llama-3-8b",
    )(_shadow)
    command(
        app,
        "revisions",
        help="List what a strategy has been, newest first.",
        example="headway strategies revisions adaptive",
    )(_revisions)
    command(
        app,
        "rollback",
        help="Restore an earlier revision, as a new one.",
        example="headway strategies rollback adaptive 3",
    )(_rollback)


def _enable(session: Session, name: Name) -> None:
    with session.client() as client:
        request = pb.EnableStrategyRequest(name=STRATEGIES.full_name(name))
        done(session, client.write(client.admin.EnableStrategy, request).strategy, "enabled")


def _disable(session: Session, name: Name) -> None:
    with session.client() as client:
        request = pb.DisableStrategyRequest(name=STRATEGIES.full_name(name))
        strategy = client.write(client.admin.DisableStrategy, request).strategy
    done(session, strategy, f"disabled; {strategy.fallback_algorithm} stands in")


def _tune(
    session: Session,
    name: Name,
    parameters: Annotated[list[str], typer.Argument(metavar="KEY=VALUE…", help="Parameters of its algorithm.")],
    etag: Etag = "",
) -> None:
    assignments = [f"parameters.{parameter}" for parameter in parameters]
    strategy = edited(session, STRATEGIES, name, assignments, etag=etag)
    done(session, strategy, f"tuned, revision {strategy.revision}")


def _bind(session: Session, name: Name, tenant: _Tenant = "", model: _Model = "", group: _Group = "") -> None:
    wanted = _wanted(name, tenant, model, group, shadow=False)
    with session.client() as client:
        same = [
            each for each in client.list_all(STRATEGY_BINDINGS) if _target(each) == _target(wanted) and not each.shadow
        ]
        bound = _put(client, wanted, same)
    done(session, bound, f"binds {bound.strategy} for {_scope(bound)}")


def _shadow(
    session: Session,
    name: Name,
    tenant: _Tenant = "",
    model: _Model = "",
    group: _Group = "",
    off: Annotated[bool, typer.Option("--off", help="Stop it.")] = False,
) -> None:
    wanted = _wanted(name, tenant, model, group, shadow=True)
    with session.client() as client:
        same = [
            each
            for each in client.list_all(STRATEGY_BINDINGS)
            if each.shadow and each.strategy == wanted.strategy and _target(each) == _target(wanted)
        ]
        if off:
            for each in same:
                client.delete(STRATEGY_BINDINGS, each.name, etag=each.etag)
            bound = same[0] if same else wanted
        else:
            bound = _put(client, wanted, same)
    done(session, bound, f"shadows nothing for {_scope(bound)}" if off else f"shadows for {_scope(bound)}")


def _revisions(session: Session, name: Name) -> None:
    with session.client() as client:
        request = pb.ListStrategyRevisionsRequest(parent=STRATEGIES.full_name(name))
        found = list(client.pages(client.admin.ListStrategyRevisions, request, "revisions"))
    rows = [to_plain(revision) for revision in found]
    if session.output is Output.TABLE:
        rows = [{**row["strategy"], **row} for row in rows]
    columns = ("revision", "create_time", "author", "algorithm", "enabled", "parameters")
    print_rows(session, rows, columns, "no revisions")


def _rollback(
    session: Session,
    name: Name,
    revision: Annotated[int, typer.Argument(min=1, help="The revision to restore.")],
    etag: Etag = "",
) -> None:
    request = pb.RollbackStrategyRequest(name=STRATEGIES.full_name(name), revision=revision, etag=etag)
    with session.client() as client:
        strategy = client.write(client.admin.RollbackStrategy, request).strategy
    done(session, strategy, f"is as in revision {revision}, which is now revision {strategy.revision}")


# Bindings


def _wanted(name: str, tenant: str, model: str, group: str, *, shadow: bool) -> pb.StrategyBinding:
    if group and (tenant or model):
        raise UsageProblem("--group cannot be combined with --tenant or --model")
    strategy = name.removeprefix("strategies/")
    binding = pb.StrategyBinding(strategy=name, tenant=tenant, model=model, gpu_group=group, shadow=shadow)
    parts = [part for part in (f"shadow-{strategy}" if shadow else "", tenant, model, group) if part]
    binding.name = _slug("-".join(parts) or "default")
    STRATEGY_BINDINGS.normalize(binding)
    return binding


def _slug(text: str) -> str:
    """A name that the scheduler takes; what had to be changed is told apart by a hash."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if slug == text and len(slug) <= 63 and slug[0].isalpha():
        return slug
    return f"b-{slug[:50].strip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _target(binding: Any) -> tuple[str, str, str]:  # a StrategyBinding
    return (binding.tenant, binding.model, binding.gpu_group)


def _put(client: Client, wanted: pb.StrategyBinding, same: list[Any]) -> Any:
    """Let the binding of the same target name the strategy, or make one."""
    if not same:
        return client.create(STRATEGY_BINDINGS, wanted).strategy_binding

    def change(binding: Any) -> list[str]:
        binding.strategy = wanted.strategy
        return ["strategy"]

    return client.edit(STRATEGY_BINDINGS, same[0].name, change)


def _scope(binding: Any) -> str:
    return " and ".join(part for part in _target(binding) if part) or "everything"
