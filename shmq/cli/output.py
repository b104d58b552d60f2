"""What the commands print: tables, ages, bodies, one JSON object a line, and a sign of life."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import psutil

_PATIENCE = 1.0  # seconds before a wait is worth a line
_TEXT_COLUMNS = frozenset({"TOPIC/CHANNEL", "TOPIC", "CHANNEL", "ID", "BODY", "NAME", "FIELD",
                           "VALUE", "FILE", "DUE", "STATE", "LINE", "CHECK", "KIND",
                           "RING", "OWNER", "DATA PATH", "COMMAND"})  # fmt: skip
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def print_json(document: dict[str, Any]) -> None:
    """One object, one line, written out at once."""
    click.echo(json.dumps({"v": 1, **document}, separators=(",", ":")))
    sys.stdout.flush()


def format_rows(
    titles: Sequence[str], rows: Sequence[Sequence[str]], indent: str = ""
) -> list[str]:
    """Columns as wide as they need; names and bodies to the left, numbers to the right."""
    lines = []
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in [titles, *rows]:
        cells = [
            cell.ljust(width) if title in _TEXT_COLUMNS else cell.rjust(width)
            for cell, width, title in zip(row, widths, titles, strict=True)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def print_rows(titles: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> None:
    """`format_rows`, on stdout."""
    for line in format_rows(titles, rows, indent):
        click.echo(line)


def forget_output() -> None:
    """Nobody reads our stdout any more: what is still buffered goes nowhere, without a word."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def age(seconds: float) -> str:
    """A duration in four signs or so."""
    if seconds < 0.0005:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 10:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 600:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 36000 else f"{seconds / 3600:.0f}h"


def size(nbytes: float) -> str:
    """Bytes as people read them."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"


def moment(ns: int, fraction: bool = False) -> str:
    """Nanoseconds since 1970 as local time; the number if that is no time."""
    try:
        text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ns // 10**9))
    except (OverflowError, OSError, ValueError):
        return str(ns)
    return f"{text}.{ns % 10**9 // 10**6:03d}" if fraction else text


def shorten(text: str, room: int) -> str:
    """A name in so many columns: what tells it from others is at both ends."""
    if len(text) <= room:
        return text
    left = room // 2
    return f"{text[:left]}…{text[len(text) - (room - 1 - left) :]}"


def command_name(pid: int, room: int) -> str:
    """What a process is, in so many columns: of an interpreter, what it runs. "" if it is gone or
    not ours to see."""
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


def printable(text: str) -> str:
    """A name or path for a terminal: what moves its cursor is escaped."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def body_field(body: bytes) -> dict[str, str]:
    """A body in JSON: `body` if it is UTF-8, else `body_base64`."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode("ascii")}


def harmless(body: bytes) -> str:
    """A body for a terminal: line ends and tabs as they are, other control signs as \\xNN."""
    text = body.decode("utf-8", "backslashreplace")
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def one_line(body: bytes, taken: int) -> str:
    """A body in what is left of a terminal's line beside `taken` columns."""
    room = max(20, shutil.get_terminal_size((100, 24)).columns - taken)
    text = body[: 4 * room].decode("utf-8", "backslashreplace")
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return text if len(text) <= room else text[: room - 3] + "..."


@contextlib.contextmanager
def patience(text: str) -> Iterator[Callable[[str], None]]:
    """While the block runs: after a second a line on stderr, if that is a terminal, says what is
    being done and for how long. The function it gives changes what it says."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    said = [text]
    done = threading.Event()

    def show() -> None:
        began, pause = time.monotonic(), _PATIENCE
        while not done.wait(pause):
            seconds, pause = time.monotonic() - began, 0.5
            click.echo(f"\r{said[0]} ... {seconds:.0f} s\x1b[K", nl=False, err=True)
        if pause != _PATIENCE:
            click.echo("\r\x1b[K", nl=False, err=True)

    def say(text: str) -> None:
        said[0] = text

    thread = threading.Thread(target=show, name="shmq-patience", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        done.set()
        thread.join()
