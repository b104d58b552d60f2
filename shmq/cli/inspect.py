"""`shmq inspect`: what is in a file, and what is wrong with it."""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from shmq import segments
from shmq.cli import DEGRADED, OK, files, json_option, segment
from shmq.cli.output import one_line, patience, print_json, print_rows
from shmq.cli.report import Report, Table
from shmq.errors import ShmqError

_HEAD = 4096


@click.command()
@json_option
@click.argument("file")
@click.option("-n", "count", type=click.IntRange(0), default=10, show_default=True, metavar="N",
              help="Messages to show.")  # fmt: skip
def inspect(file: str, as_json: bool, count: int) -> int:
    """Show what is in FILE, and what in it cannot be right, with its offset.

    FILE: a shared segment (path, name as /shmq.default.3, or the instance), a disk queue's file
    (.dat, .bad, .meta.dat), a chunk of deferred messages, nsqd.dat or shmq.dat. It is only read; a
    broker may be using it. The exit status is 4 if something is damaged.
    """
    path = _find(file)
    with patience(f"reading {path.name}") as say, _opened(path) as fd:
        report = look(path, fd, count, say)
    if as_json:
        print_json(_document(path, report))
    else:
        _print(path, report)
    return DEGRADED if report.damage else OK


def look(path: Path, fd: int, count: int, say: files.Progress = lambda text: None) -> Report:
    """Report on an open file. ShmqError if it is nothing shmq knows."""
    head = os.pread(fd, _HEAD, 0)
    in_shared_memory = path.parent == Path(segments.SHM_DIRECTORY)
    if segment.looks_like(head) or (in_shared_memory and path.name.startswith("shmq.")):
        return segment.read(fd, count)
    reader = files.reader_of(path.name, head)
    if reader is None:
        what = "is empty" if not head else "is nothing that shmq or nsqd writes"
        raise ShmqError(f"inspect {path}: it {what} (by its name and its first bytes)")
    return reader(path, fd, count, say)


def _find(text: str) -> Path:
    """A path, the name of a shared memory object, or an instance. FileNotFoundError."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        return path
    shared = Path(segments.SHM_DIRECTORY)
    for name in (text.removeprefix("/"), f"shmq.{text}"):
        if "/" not in name and (shared / name).is_file():
            return shared / name
    if path.is_dir():
        raise IsADirectoryError(21, "a directory; name one of the files in it", text)
    raise FileNotFoundError(2, "no such file, shared memory object or instance", text)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    # a FIFO must not keep us; in /dev/shm a link may be anybody's
    flags = os.O_NOFOLLOW if path.parent == Path(segments.SHM_DIRECTORY) else 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        raise ShmqError(f"inspect {path}: it is a symbolic link and no regular file") from exc
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ShmqError(f"inspect {path}: it is no regular file")
        yield fd
    finally:
        os.close(fd)


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
    click.echo(f"{path}: {report.kind}")
    width = max(map(len, report.facts), default=0)
    for name, value in report.facts.items():
        click.echo(f"  {name:{width}}  {_text(value)}")
    for name, table in report.tables.items():
        click.echo(f"{name}:" if table.rows else f"{name}: none")
        if table.rows:
            _print_table(table)
    for note in report.notes:
        click.echo(f"note: {note}")
    for item in report.damage:
        where = "" if item.offset is None else f" at {item.offset} ({item.offset:#x})"
        click.echo(f"{click.style('DAMAGE', fg='red', bold=True)}{where}: {item.text}")


def _print_table(table: Table) -> None:
    rows = [[_text(cell) for cell in row] for row in table.rows]
    print_rows(table.titles, rows, "  ")


def _text(cell: Any) -> str:
    """A cell or a fact for people."""
    if isinstance(cell, dict):
        if "body" in cell:
            return one_line(cell["body"].encode(), 70)
        if "body_base64" in cell:
            return one_line(base64.b64decode(cell["body_base64"]), 70)
        return ", ".join(f"{name}: {value}" for name, value in cell.items()) or "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    text = "-" if cell is None else str(cell)
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
