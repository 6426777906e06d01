"""`headway doctor`: what is wrong with a deployment, and what to do."""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from headway_cli.command import command
from headway_cli.doctor.checks import examine
from headway_cli.doctor.envoy_file import examine_envoy
from headway_cli.doctor.facts import gather
from headway_cli.doctor.findings import Finding, Severity, plain, worst
from headway_cli.errors import Unreachable, UsageProblem
from headway_cli.output import print_rows, print_text
from headway_cli.session import Output, Session

__all__ = ["add_doctor"]

_DEFAULT_HOLD_S = 30.0


def add_doctor(app: typer.Typer) -> None:
    """Add `headway doctor`."""

    @command(
        app,
        "doctor",
        help="Find what is wrong with a deployment, and what to do. Ends with 0: well, 1: warnings, 2: errors.",
        example="headway doctor --envoy envoy.yaml",
    )
    def doctor(
        session: Session,
        envoy: Annotated[
            list[str] | None, typer.Option(metavar="FILE", help="Also read this Envoy configuration.")
        ] = None,
        connect: Annotated[
            bool, typer.Option("--connect", help="Also connect to every engine, from this host.")
        ] = False,
    ) -> None:
        configs = [(file, _read(file)) for file in envoy or ()]
        findings, hold_s = _look(session, connect=connect)
        for file, config in configs:
            findings += examine_envoy(config, file, hold_s)
        _print(session, findings)
        raise typer.Exit(worst(findings))


def _look(session: Session, *, connect: bool) -> tuple[list[Finding], float]:
    """What the scheduler tells, and its longest hold. That nobody answers is a finding, too."""
    try:
        with session.client() as client:
            facts = gather(client, connect=connect)
    except Unreachable as error:
        fix = (
            "name it: --scheduler HOST:PORT, with --ca FILE if it speaks TLS; systemctl status headway-scheduler there"
        )
        return [
            Finding(Severity.ERROR, "scheduler_unreachable", session.scheduler, error.message, fix)
        ], _DEFAULT_HOLD_S
    told = facts.status.max_wait.ToNanoseconds() / 1e9
    return examine(facts), told if facts.status.HasField("max_wait") else _DEFAULT_HOLD_S


def _read(file: str) -> object:
    try:
        return yaml.safe_load(Path(file).read_text())
    except OSError as error:
        raise UsageProblem(f"--envoy: {file}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UsageProblem(f"--envoy: {file}: is no YAML: {str(error).partition(chr(10))[0]}") from None


def _print(session: Session, findings: list[Finding]) -> None:
    if session.output is not Output.TABLE:
        print_rows(session, [plain(each) for each in findings], ("severity", "check", "where", "what", "fix"), "")
        return
    for finding in findings:
        print_text(f"{finding.severity.name.lower():8}{finding.where}: {finding.what}")
        print_text(f"{'':8}→ {finding.fix}  [{finding.check}]")
    print_text(_counts(findings) if findings else "nothing found: it is well")


def _counts(findings: list[Finding]) -> str:
    numbers = {severity: sum(each.severity is severity for each in findings) for severity in reversed(Severity)}
    nouns = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "worth knowing"}
    told = []
    for severity, number in numbers.items():
        plural = "s" if number != 1 and severity is not Severity.INFO else ""
        told.append(f"{number} {nouns[severity]}{plural}")
    return ", ".join(told)
