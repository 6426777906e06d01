"""Every command explains itself, and its example is one that the parser takes."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from headway_cli.app import build
from typer.testing import CliRunner

APP = build()


def commands(command, path=()):
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(APP)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_an_example_of_itself(path):
    command = COMMANDS[path]
    shown = CliRunner().invoke(APP, [*path, "--help"])
    assert shown.exit_code == 0
    assert command.help.endswith(".")
    example = command.epilog.partition("Example: ")[2]
    assert " ".join(["headway", *path]) in example
    assert "Example:" in shown.output


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_example_parses(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("prompt.txt", "fleet.yaml"):
        (tmp_path / name).write_text("")
    example = COMMANDS[path].epilog.partition("Example: ")[2].partition(" > ")[0].replace("\\", "")
    words = shlex.split(example)
    arguments = words[words.index("headway") + 1 + len(path) :]
    COMMANDS[path].make_context(" ".join(path), arguments)


PAGES = Path(__file__).parents[3] / "docs"
DOCS = (PAGES / "cli.md").read_text()
TENANTS = re.findall(r"^\$ headway (.*)$", (PAGES / "tenants.md").read_text(), re.MULTILINE)
PRINTED = re.findall(r"^\$ headway (.*)$", DOCS, re.MULTILINE)


@pytest.mark.parametrize("line", PRINTED + TENANTS)
def test_every_command_in_the_docs_parses(line):
    words = shlex.split(re.split(r" (?:\||&&|>) ", line)[0])
    if words[0] == "--scheduler":
        words = words[2:]
    path = next(path for path in COMMANDS if tuple(words[: len(path)]) == path)
    COMMANDS[path].make_context(" ".join(path), words[len(path) :])


def test_the_docs_show_every_group():
    alike = {"bindings", "groups", "models"}  # as tenants, which are shown
    elsewhere = {"bench", "demo", "replay", "sim", "up"}  # they have their own pages
    assert {path[0] for path in COMMANDS} - {line.split()[0] for line in PRINTED} <= alike | elsewhere


def test_the_table_of_kinds_gives_each_the_five_verbs():
    for kind in ("models", "groups", "tenants", "bindings", "strategies", "strategy-bindings", "credentials"):
        assert {path[1] for path in COMMANDS if path[0] == kind} >= {"list", "get", "create", "update", "delete"}


def test_an_unknown_command_is_usage_and_suggests_one():
    result = CliRunner().invoke(APP, ["tenant", "list"])
    assert result.exit_code == 2
    assert "tenants" in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered_to_each_shell(shell):
    shown = CliRunner().invoke(APP, ["--show-completion", shell], prog_name="headway")
    result = CliRunner().invoke(APP, [], env={"_HEADWAY_COMPLETE": f"source_{shell}"}, prog_name="headway")
    assert "_HEADWAY_COMPLETE" in shown.output + result.output


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("headway doc", "doctor"),
        ("headway bypass o", "off"),
        ("headway doctor --en", "--envoy"),
        ("headway ten", "tenants"),
    ],
)
def test_commands_and_options_are_completed(typed, offered):
    words = typed.split()
    env = {"_HEADWAY_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    assert offered in CliRunner().invoke(APP, [], env=env, prog_name="headway").output.split()
