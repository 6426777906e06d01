"""Answers on stdout: a table for people, JSON or YAML for programs, CSV for spreadsheets."""

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import yaml
from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from headway_cli.messages import Plain
from headway_cli.session import Output, Session

__all__ = [
    "cell",
    "console",
    "least_width",
    "print_item",
    "print_plain",
    "print_rows",
    "print_text",
    "show",
    "table",
    "to_yaml",
]

_PIPED_WIDTH: Final = 400
_LEAST_WIDTH: Final = 6
_NOTHING: Final = "-"
_Row = Mapping[str, Plain]


def console() -> Console:
    """Where tables go. What goes into a pipe is as wide as it wants to be."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)


def show(renderable: RenderableType) -> None:
    """Print something of Rich's. In a pipe, no line ends with the blanks that fill a table up."""
    screen = console()
    if screen.is_terminal:
        screen.width = max(screen.width, least_width(renderable))
        screen.print(renderable, crop=False)
        return
    with screen.capture() as captured:
        screen.print(renderable)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def least_width(renderable: RenderableType) -> int:
    """How wide a screen must be to show it all. Rich leaves out columns on a narrower one."""
    wide = Console(file=io.StringIO(), width=_PIPED_WIDTH)
    return Measurement.get(wide, wide.options, renderable).minimum


def print_rows(session: Session, rows: Sequence[_Row], columns: Sequence[str], empty: str) -> None:
    """A list: a table of some of its columns, or everything as JSON or YAML. `empty` is said of a list without rows.

    CSV has the columns of the table, also when there are no rows.
    """
    if session.output is Output.CSV:
        _print_csv(rows, columns)
    elif session.output is not Output.TABLE:
        print_plain(session, list(rows))
    elif rows:
        show(table(rows, columns))
    else:
        print_text(empty)


def print_item(session: Session, item: _Row) -> None:
    """One thing: a line for each field that is set, or all of it as JSON or YAML."""
    if session.output is not Output.TABLE:
        print_plain(session, item)
        return
    grid = _bare_table()
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for key, value in item.items():
        if value not in ("", [], {}, None):
            grid.add_row(Text(key), Text(cell(value)))
    show(grid)


def print_plain(session: Session, value: Plain) -> None:
    """JSON, or YAML, or CSV with a line for each thing of a list."""
    if session.output is Output.CSV:
        rows = value if isinstance(value, list) else [value]
        _print_csv(rows, list(dict.fromkeys(key for row in rows for key in row)))
    elif session.output is Output.YAML:
        sys.stdout.write(to_yaml(value))
    else:
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _print_csv(rows: Sequence[_Row], columns: Sequence[str]) -> None:
    """RFC 4180, but with plain newlines. What is no plain value is JSON."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[_csv_cell(row.get(column)) for column in columns] for row in rows])


def _csv_cell(value: Plain) -> Plain:
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list | Mapping) else value


def print_text(line: str) -> None:
    """A line as it is."""
    sys.stdout.write(f"{line}\n")


def to_yaml(value: Plain) -> str:
    """One YAML document, its keys in their order."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)


def table(
    rows: Sequence[_Row], columns: Sequence[str], styles: Mapping[str, Mapping[str, str]] | None = None
) -> RenderableType:
    """The columns of the rows; numbers to the right. `styles` maps a column's texts to colours.

    On a narrow screen cells are folded; what names the row (the first column with a head) stays whole.
    """
    grid = _bare_table(header=True)
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    key = 0 if columns[0] else 1
    for index, column in enumerate(columns):
        values = [row.get(column) for row in rows]
        numbers = [value for value in values if _is_number(value)]
        numeric = bool(numbers) and all(value is None or _is_number(value) for value in values)
        width = max(len(column), *(len(line[index]) for line in cells))
        grid.add_column(
            column,
            justify="right" if numeric else "left",
            overflow="fold",
            min_width=width if index == key else min(width, _LEAST_WIDTH),
        )
    for line in cells:
        named = zip(columns, line, strict=True)
        grid.add_row(*(Text(text, style=(styles or {}).get(column, {}).get(text, "")) for column, text in named))
    return grid


def cell(value: Plain) -> str:
    """One value in few characters."""
    if value is None or value in ("", [], {}):
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={cell(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ",".join(cell(inner) for inner in value)
    return str(value)


def _is_number(value: Plain) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bare_table(*, header: bool = False) -> Table:
    return Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=False, show_edge=False)
