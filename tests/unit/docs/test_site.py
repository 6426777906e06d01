"""The documentation's site: every page is in it, it is built strictly, and its reference is what the protos make."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from headway_cli.doctor import checks, envoy_file

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]


def named(nav):
    """Every page in the navigation."""
    for each in nav:
        if isinstance(each, str):
            yield each
        else:
            for value in each.values():
                yield from named(value) if isinstance(value, list) else [value]


def built(tmp_path, docs):
    """Build a site of these pages; what it says, and its exit status."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    file = tmp_path / "mkdocs.yml"
    file.write_text(yaml.safe_dump(config | {"docs_dir": str(docs), "site_dir": "site"}))
    command = [Path(sys.executable).parent / "zensical", "build", "--strict", "-f", file]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)


def test_the_navigation_names_every_page_but_decisions_once():
    pages = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "adr")
    assert sorted(named(NAV)) == pages


def test_it_is_built_without_a_warning(tmp_path):
    shutil.copytree(DOCS, tmp_path / "docs")
    done = built(tmp_path, "docs")
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    assert "Headway" in (site / "index.html").read_text()
    assert (site / "safe-way-in" / "index.html").is_file()


@pytest.mark.parametrize("link", ["nowhere.md", "index.md#no-such-heading"])
def test_a_link_that_leads_nowhere_fails_it(tmp_path, link):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Start\n\nSee [this]({link}).\n")
    file = tmp_path / "mkdocs.yml"
    file.write_text("site_name: x\ndocs_dir: docs\nsite_dir: site\n")
    command = [Path(sys.executable).parent / "zensical", "build", "--strict", "-f", file]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60).returncode != 0


def test_the_reference_is_what_the_protos_make():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "api_reference.py", "check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_method_and_message_is_in_the_reference():
    from headway.admin.v1 import admin_pb2
    from headway.routing.v1 import routing_pb2

    for name, module in (("admin", admin_pb2), ("routing", routing_pb2)):
        text = (DOCS / "reference" / f"{name}.md").read_text()
        for service in module.DESCRIPTOR.services_by_name.values():
            assert all(f"| `{method.name}` |" in text for method in service.methods)
        assert all(f"## {message}\n" in text for message in module.DESCRIPTOR.message_types_by_name)


def test_the_doctors_page_names_every_check():
    page = (DOCS / "doctor.md").read_text()
    for module in (checks, envoy_file):
        found = set(re.findall(r'(?:ERROR|WARNING|INFO), "(\w+)"', Path(module.__file__).read_text()))
        assert len(found) > 8
        assert {name for name in found if f"`{name}`" not in page} == set()
