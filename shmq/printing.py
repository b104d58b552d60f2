"""Text of others for a terminal, a log or a page of plain text: only what can be printed.

Bytes of messages, of clients and of servers may hold escape sequences, line ends that forge a line,
and characters that change the direction of writing or take no room. All that
a person reads goes through `printable`, which writes each of them as Python's escape, or through
`printable_lines`, which leaves line ends and tabs.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, Final

#: Characters of one text of a peer, and of one line of a log.
LONGEST: Final = 400
LONGEST_LINE: Final = 16 << 10


def printable(text: str, most: int | None = None) -> str:
    """The text with every character that is not printable written as Python's escape: control
    characters, Unicode's line ends, characters that change the writing direction or take no room,
    lone surrogates. most: its longest length, after which it is cut; None: not cut."""
    if most is not None and len(text) > most:
        text = f"{text[:most]}... ({len(text) - most} more characters)"
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def printable_lines(text: str) -> str:
    """As `printable`, but line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char in "\n\t" or char.isprintable() else printable(char) for char in text
    )


def said(data: bytes, most: int = LONGEST) -> str:
    """The bytes of a peer as printable text of at most `most` characters."""
    return printable(bytes(data[: 4 * most + 4]).decode("utf-8", "backslashreplace"), most)


class Formatter(logging.Formatter):
    """Lines of a log: each record is one line, but for those of a traceback, which follow indented.
    Neither a message nor the text of an exception can begin a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        shown = logging.makeLogRecord(record.__dict__)
        shown.msg, shown.args = printable(record.getMessage(), LONGEST_LINE), ()
        shown.exc_info = shown.exc_text = shown.stack_info = None
        text = super().format(shown)
        lines = self.formatException(record.exc_info).split("\n") if record.exc_info else []
        return "\n    ".join([text, *(printable(line, LONGEST_LINE) for line in lines)])


def clean_tracebacks() -> None:
    """Have the tracebacks of this process, and what its libraries log without a handler, shown as
    printable text: the text of an exception may be a peer's."""

    def show(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(printable_lines(text))

    def show_of_thread(found: threading.ExceptHookArgs) -> None:
        if found.exc_type is not SystemExit:
            show(found.exc_type, found.exc_value, found.exc_traceback)

    def show_unraisable(found: Any) -> None:
        sys.stderr.write(f"Exception ignored in {printable(repr(found.object), LONGEST)}\n")
        show(found.exc_type, found.exc_value, found.exc_traceback)

    sys.excepthook = show
    threading.excepthook = show_of_thread
    sys.unraisablehook = show_unraisable
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Formatter("%(message)s"))
