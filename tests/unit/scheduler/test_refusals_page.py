"""docs/refusals.md names every error there is."""

import re
from pathlib import Path

import pytest
from headway_scheduler import errors

PAGE = Path(__file__).parents[3] / "docs" / "refusals.md"
HTTP = {
    "RESOURCE_EXHAUSTED": "429",
    "UNAVAILABLE": "503",
    "NOT_FOUND": "404",
    "INVALID_ARGUMENT": "400",
    "ALREADY_EXISTS": "409",
    "ABORTED": "409",
    "FAILED_PRECONDITION": "409",
    "UNAUTHENTICATED": "401",
    "PERMISSION_DENIED": "403",
    "INTERNAL": "500",
}


def rows() -> dict[str, tuple[str, str, str]]:
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")]
             for line in PAGE.read_text().splitlines() if re.match(r"\| `[A-Z_]+` \|", line)]  # fmt: skip
    return {reason: (status, http, meaning) for reason, status, http, meaning in cells}


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in errors.__all__])
def test_every_class_has_its_row(kind: type[errors.HeadwayError]) -> None:
    status, http, meaning = rows()[kind.reason]
    assert (status, http) == (kind.status, HTTP[kind.status])
    assert meaning


def test_no_row_is_of_a_class_that_is_gone() -> None:
    assert set(rows()) == {getattr(errors, name).reason for name in errors.__all__}
