"""`shmq inspect`: the contents of a file and its damages."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import click

from shmq.cli.output import one_line, painted, patience, print_json, print_rows, say, say_styled
from shmq.cli.parameters import json_option
from shmq.cli.status import DEGRADED, OK
from shmq.diagnostics.findings import Report, Table
from shmq.diagnostics.inspect import find, opened, report_on
from shmq.printing import printable


@click.command()
@json_option
@click.argument("file")
@click.option(
    "-n",
    "count",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="Show at most N messages.",
)
def inspect(file: str, as_json: bool, count: int) -> int:
    """Show the contents of FILE, and its damages with their offsets.

    FILE: a shared segment (path, name as /shmq.default.3, or the instance), a disk queue's file
    (.dat, .bad, .meta.dat), a chunk of deferred messages, nsqd.dat or shmq.dat. The file is only
    read; a broker may be using it. The exit status is 4 if something is damaged.
    """
    path = find(file)
    with patience(f"reading {path.name}") as say, opened(path) as fd:
        report = report_on(path, fd, count, say)
    if as_json:
        print_json(_document(path, report))
    else:
        _print(path, report)
    return DEGRADED if report.damage else OK


# ---- output ----


def _document(path: Path, report: Report) -> dict[str, Any]:
    facts = {name.replace(" ", "_"): value for name, value in report.facts.items()}
    tables = {
        name: [_object(table.titles, row) for row in table.rows]
        for name, table in report.tables.items()
    }
    return {
        "file": str(path),
        "kind": report.kind,
        **facts,
        **{name: rows for name, rows in tables.items() if name not in facts},
        **{f"{name}_list": rows for name, rows in tables.items() if name in facts},
        "damage": [{"offset": item.offset, "text": item.text} for item in report.damage],
        "notes": report.notes,
    }


def _object(titles: list[str], row: list[Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for title, cell in zip(titles, row, strict=True):
        document |= cell if isinstance(cell, dict) else {title.lower(): cell}
    return document


def _print(path: Path, report: Report) -> None:
    say(f"{printable(str(path))}: {report.kind}")
    width = max(map(len, report.facts), default=0)
    for name, value in report.facts.items():
        say(f"  {name:{width}}  {_text(value)}")
    for name, table in report.tables.items():
        say(f"{name}:" if table.rows else f"{name}: none")
        if table.rows:
            _print_table(table)
    for note in report.notes:
        say(f"note: {note}")
    for item in report.damage:
        where = "" if item.offset is None else f" at {item.offset} ({item.offset:#x})"
        say_styled(f"{painted('DAMAGE', fg='red', bold=True)}{where}: {printable(item.text)}")


def _print_table(table: Table) -> None:
    rows = [[_text(cell) for cell in row] for row in table.rows]
    print_rows(table.titles, rows, "  ")


def _text(cell: Any) -> str:
    """A cell or a fact as text."""
    if isinstance(cell, dict):
        if "body" in cell:
            return one_line(cell["body"].encode(), 70)
        if "body_base64" in cell:
            return one_line(base64.b64decode(cell["body_base64"]), 70)
        return ", ".join(f"{name}: {value}" for name, value in cell.items()) or "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return "-" if cell is None else printable(str(cell))
