"""The pages say what the code says: every setting, strategy and parameter, and no link leads nowhere."""

import re
from enum import StrEnum
from pathlib import Path

import pytest
from headway_agent.config import AgentConfig
from headway_gateway.config import GatewaySettings
from headway_scheduler.config import Config
from headway_scheduler.strategies.catalog import BUILT_IN
from pydantic_settings import BaseSettings

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
SETTINGS = Config.model_fields
STRATEGIES = {strategy.name: strategy for strategy in BUILT_IN}
TOLD_IN_WORDS = {
    "name",
    "port_file",
    "database_url",
    "tls_certificate",
    "tls_key",
    "require_credentials",
    "tls_client_ca",
    "admin_token_file",
    "bootstrap",
    "tokenizers_dir",
    "guards_off",
    "export_dir",
    "trace_endpoint",
    "seed",
}


def rows(page: Path, section: str) -> dict[str, list[str]]:
    """A section's table rows by the name in their first cell, and the cells after it."""
    found = {}
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in text.splitlines():
        if match := re.match(r"\| `([a-z_]+)`(?: \(`([A-Z_]+)`\))? \|(.*)\|$", line):
            name, variable, rest = match.groups()
            found[name] = [cell.strip().strip("`") for cell in rest.split("|")] + ([variable] if variable else [])
    return found


def test_the_schedulers_page_has_every_setting_and_no_other() -> None:
    assert set(rows(DOCS / "scheduler.md", "Settings")) == set(SETTINGS)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in TOLD_IN_WORDS])
def test_the_schedulers_page_has_the_default(name: str) -> None:
    told, default = rows(DOCS / "scheduler.md", "Settings")[name][0], SETTINGS[name].default
    if isinstance(default, bool):
        assert told == str(default).lower()
    elif isinstance(default, int | float):
        assert float(told) == default
    else:
        assert told == str(default)


def test_the_schedulers_page_has_the_variables_that_have_names_of_their_own() -> None:
    aliases = {name: field.validation_alias for name, field in SETTINGS.items() if field.validation_alias}
    told = rows(DOCS / "scheduler.md", "Settings")
    assert {name: told[name][-1] for name in aliases} == aliases


@pytest.mark.parametrize(("page", "settings"), [("gateway", GatewaySettings), ("agent", AgentConfig)])
def test_the_other_pages_name_every_setting(page: str, settings: type[BaseSettings]) -> None:
    lines = (DOCS / f"{page}.md").read_text().splitlines()
    named = {name for line in lines if line.startswith("|") for name in re.findall(r"`([a-z_]+)`", line.split("|")[1])}
    assert set(settings.model_fields) <= named


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_a_page_with_its_parameters(name: str) -> None:
    told = rows(DOCS / "strategies" / f"{name}.md", "Parameters")
    parameters = STRATEGIES[name].parameters_type.model_fields
    assert set(told) == set(parameters)
    for parameter, field in parameters.items():
        default, range_told, meaning = told[parameter]
        assert meaning
        if isinstance(field.default, StrEnum):
            assert (default, range_told.split(", ")) == (
                field.default.value,
                [each.value for each in type(field.default)],
            )
            continue
        assert float(default) == field.default
        limits = {type(limit).__name__.lower(): limit for limit in field.metadata}
        low, high = range_told.replace(",", "").split(" to ")
        assert (float(low), float(high)) == (limits["ge"].ge, limits["le"].le)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_page_has_the_same_parts_and_the_index_names_it(name: str) -> None:
    page = (DOCS / "strategies" / f"{name}.md").read_text()
    assert page.startswith(f"# {name}\n")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE)[0] == "Inputs"
    assert {"Inputs", "Parameters", "Trade-offs"} <= set(re.findall(r"^## (.*)$", page, re.MULTILINE))
    assert "**Choose it**" in page
    classic = "yes" if STRATEGIES[name].classic else "no"
    guards = ", ".join(sorted(guard.value.replace("_", " ") for guard in STRATEGIES[name].guards)) or "none"
    index = (DOCS / "strategies" / "README.md").read_text()
    (row,) = [line for line in index.splitlines() if line.startswith(f"| [`{name}`]({name}.md)")]
    assert [cell.strip() for cell in row.split("|")[3:5]] == [classic, guards]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents}
    by_their_own_index = {page for page in pages if page.startswith("strategies/") and page != "strategies/README.md"}
    assert {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+\.md)", index)} >= (
        pages - by_their_own_index - {"README.md"}
    )


def test_the_tests_that_pages_name_exist() -> None:
    pages = "".join((DOCS / page).read_text() for page in ("operations.md", "tenants.md"))
    named = set(re.findall(r"`(test_[a-z_0-9]+|Test[A-Za-z]+)`", pages))
    assert len(named) > 10
    written = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async def |def |class |)(\w+)(?: = |[(:])", file.read_text(), re.MULTILINE)
    }
    assert named <= written


def test_every_promise_of_security_is_shown_by_tests_that_exist() -> None:
    (promised,) = re.findall(
        r"^## What is promised\n(.*?)^## ", (DOCS / "security.md").read_text(), re.MULTILINE | re.DOTALL
    )
    promises = [line.split("|") for line in promised.splitlines() if line.startswith("| ")][1:]
    assert len(promises) > 15
    for _, promise, shown_by, _ in promises:
        named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", shown_by)
        assert named, promise
        for file, test in named:
            assert re.search(rf"^\s*(async )?def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (
                promise,
                test,
            )
