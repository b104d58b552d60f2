"""The log of a broker's process: to stderr, as nsqd writes it or as JSON.

Both formatters escape characters that are not printable, so text that comes from a client can
neither begin a line of its own nor move a terminal's cursor. Callers need no escaping.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import logging
import os
import stat
import sys
import time

from shmq import audit
from shmq.options import Options
from shmq.printing import LONGEST_LINE, Formatter, clean_tracebacks

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


class _NsqdFormatter(Formatter):
    """nsqd's lines: `[nsqd] 2026/01/31 12:00:00.000000 INFO: text`."""

    def __init__(self, prefix: str) -> None:
        super().__init__("%(message)s")
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(record.created))
        micros = int(record.created % 1 * 1e6)
        return f"{self._prefix}{when}.{micros:06d} {_level(record)}: {super().format(record)}"


class _JsonFormatter(logging.Formatter):
    """One JSON object per line. A traceback is in its field `exception`, so no record takes two
    lines."""

    def __init__(self, instance: str) -> None:
        super().__init__("%(message)s")
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        document = {
            "time": when.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": _level(record).lower(),
            "logger": record.name,
            "message": record.getMessage()[:LONGEST_LINE],
            "instance": self._instance,
            "pid": os.getpid(),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        text = json.dumps(document, ensure_ascii=False)
        if text.isprintable():
            return text
        # JSON itself escapes only the characters below U+0020
        return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _level(record: logging.LogRecord) -> str:
    """The level as nsqd spells it."""
    if record.levelno >= logging.CRITICAL:
        return "FATAL"
    return record.levelname


def set_up_logging(options: Options) -> None:
    """Send the log of this process to stderr, as nsqd does or as JSON, and the audit log to the
    place that the options name. Raises OSError if the audit log cannot be opened."""
    handler = logging.StreamHandler(sys.stderr)
    if options.log_format == "json":
        handler.setFormatter(_JsonFormatter(options.instance))
    else:
        handler.setFormatter(_NsqdFormatter(options.log_prefix))
    logging.raiseExceptions = False  # a closed stderr must not end a broker
    logging.basicConfig(level=_LEVELS[options.log_level], handlers=[handler], force=True)
    audit.set_up(options.audit_log, handler.formatter)
    clean_tracebacks()


def set_log_level(options: Options) -> None:
    """Set the level that the log begins at."""
    logging.getLogger().setLevel(_LEVELS[options.log_level])


def shorten_log(most: int = 1 << 20, kept: int = 64 << 10) -> None:
    """If stderr is a file of more than `most` bytes, keep only its last `kept` bytes: for a log
    that nobody rotates. Lines that other processes write meanwhile may be lost."""
    status = os.fstat(2)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= most:
        return
    fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_APPEND)
    last = os.pread(2, kept, status.st_size - kept)
    os.ftruncate(2, 0)
    os.write(2, last[last.find(b"\n") + 1 :])
