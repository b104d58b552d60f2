"""Output of the commands: tables, JSON objects, names and bodies in a width, progress lines.

Messages, clients and other servers put their bytes into what is printed. So nothing is printed but
by the functions here, which let a terminal see printable text alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from shmq.printing import printable, printable_lines

_PATIENCE = 1.0  # seconds until a progress line appears
#: Columns that are aligned to the left.
_TEXT_COLUMNS = {
    "KEY",
    "TOPIC/CHANNEL",
    "TOPIC",
    "CHANNEL",
    "ID",
    "BODY",
    "NAME",
    "FILE",
    "DUE",
    "STATE",
    "LINE",
    "KIND",
    "PROGRAM",
    "END",
    "HELD",
    "LOCKS",
    "RING",
    "OWNER",
    "DATA PATH",
    "COMMAND",
    "LAST MINUTE",
    "HOST",
}
#: The sequences with which `painted` changes how text looks.
_STYLE = re.compile("(\x1b\\[[0-9;]*m)")


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text; of characters that are not printable, line ends and tabs alone stay. err: to
    stderr."""
    click.echo(printable_lines(text), err=err, nl=nl)


def painted(text: str, **look: Any) -> str:
    """The text, as printable text, in a color or bold, for `say_styled`. The arguments are those of
    `click.style`."""
    return click.style(printable(text), **look)


def styled(line: str) -> str:
    """A line that has parts made by `painted`, as it may be printed. Its other parts must be
    printable already: a color in them would stay."""
    parts = _STYLE.split(line)
    return "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))


def say_styled(line: str) -> None:
    """Print a line of `styled`."""
    click.echo(styled(line))


def progress(text: str = "") -> None:
    """Write a line to stderr over the one before. Without text: only remove that."""
    click.echo(f"\r{printable(text)}\x1b[K", nl=False, err=True)


def print_json(document: dict[str, Any]) -> None:
    """Print one object on one line and flush it."""
    click.echo(json.dumps({"v": 1, **document}, separators=(",", ":")))
    sys.stdout.flush()


def format_rows(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    indent: str = "",
    style: Callable[[str, int | None, str], str] | None = None,
) -> list[str]:
    """The lines of a table. Columns are as wide as their cells; text is aligned to the left,
    numbers to the right. style: changes how a cell looks, from its title, the number of its row
    (None: the titles) and its text in full width."""
    lines = []
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for number, row in enumerate([titles, *rows]):
        cells = [
            cell.ljust(width) if title in _TEXT_COLUMNS else cell.rjust(width)
            for cell, width, title in zip(row, widths, titles, strict=True)
        ]
        if style is not None:
            cells[-1] = cells[-1].rstrip()
            place = number - 1 if number else None
            cells = [style(*item) for item in zip(titles, [place] * len(cells), cells, strict=True)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def print_rows(titles: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> None:
    """Print the lines of `format_rows`."""
    for line in format_rows(titles, rows, indent):
        say(line)


def is_read() -> bool:
    """Whether somebody still reads, or may read, the output and the errors of this process."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as in `shmq ls >&-`
            poll.register(stream.fileno(), 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def forget_output() -> None:
    """Discard buffered output after the reader has closed the pipe, so that the exit is silent."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def shorten(text: str, room: int) -> str:
    """A name cut to `room` columns. The middle is cut, because names differ at their ends."""
    if len(text) <= room:
        return text
    left = room // 2
    return f"{text[:left]}…{text[len(text) - (room - 1 - left) :]}"


def command_name(pid: int, room: int) -> str:
    """The name of a process's command, cut to `room` columns; for Python the name of the script or
    module. "" if the process is gone or this user may not see it."""
    import psutil  # slow to import

    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return ""
    name = os.path.basename(words[0]) if words else ""
    if name.startswith("python"):
        rest = [word for word in words[1:] if word == "-m" or not word.startswith("-")]
        if rest[:1] == ["-m"]:
            name = " ".join(rest[1:2])
        elif rest and "-c" not in words[:-1]:
            name = os.path.basename(rest[0])
    return shorten(printable(name), room)


def harmless(body: bytes) -> str:
    """A body for a terminal: line ends and tabs stay, other characters that are not printable
    become Python's escapes."""
    return printable_lines(body.decode("utf-8", "backslashreplace"))


def one_line(body: bytes, taken: int) -> str:
    """A body cut to the rest of a terminal's line after `taken` columns."""
    import shutil  # slow to import

    room = max(20, shutil.get_terminal_size((100, 24)).columns - taken)
    text = printable(body[: 4 * room].decode("utf-8", "backslashreplace"))
    return text if len(text) <= room else text[: room - 3] + "..."


@contextlib.contextmanager
def patience(text: str) -> Iterator[Callable[[str], None]]:
    """Show progress while the block runs: after a second, a line on stderr (if that is a terminal)
    says what is being done and for how long. The function that is yielded replaces the text."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    said = [text]
    done = threading.Event()

    def show() -> None:
        began, pause = time.monotonic(), _PATIENCE
        while not done.wait(pause):
            seconds, pause = time.monotonic() - began, 0.5
            progress(f"{said[0]} ... {seconds:.0f} s")
        if pause != _PATIENCE:
            progress()

    def say(text: str) -> None:
        said[0] = text

    thread = threading.Thread(target=show, name="shmq-patience", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        done.set()
        thread.join()
