"""Where the processes of a session, Python's and a JVM's, stand when nothing goes on any more.

Every JVM prints the stacks of its threads at SIGQUIT and goes on. A Python process prints those of
its threads at SIGABRT, and dies of it, if it was started with `ENVIRONMENT`. Both write to their
stderr, which must end up in the log that `report` gets.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}
#: Seconds for a log to grow no further after a signal, and characters of it that are shown.
QUIET, MOST = 2.0, 6000
#: Threads of a JVM in which work of Spark's waits; dozens of others are idle pools.
_THREADS = re.compile(r'^"(?:Thread-\d+|stream execution|Executor task|dag-scheduler|.*[Pp]ython)')


def report(sessions: Sequence[int], log: Path) -> str:
    """Return the waits of these sessions' processes, and the end of their log. Kills their Python
    processes."""
    said = log.read_text(errors="replace")[-MOST:]
    rows = [_row(process) for process in _processes(sessions)]
    threads = _asked(sessions, "java", signal.SIGQUIT, log)
    stacks = _asked(sessions, "python", signal.SIGABRT, log)
    blocks = [block for block in threads.split("\n\n") if _THREADS.match(block.lstrip("\n"))]
    parts = {
        "processes: pid, parent, age in s, state, waits in, system call, command": "\n".join(rows),
        "the end of the log": said,
        "threads of the JVM": "\n\n".join(blocks)[: 3 * MOST],
        "stacks of Python": stacks[: 3 * MOST],
    }
    return "\n".join(f"---- {title}\n{text}" for title, text in parts.items())


def _processes(sessions: Sequence[int]) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) in sessions:
                yield process


def _row(process: psutil.Process) -> str:
    def read(name: str) -> str:
        try:
            return Path(f"/proc/{process.pid}/{name}").read_text().strip()
        except OSError:
            return "?"

    with contextlib.suppress(psutil.Error):
        age = time.time() - process.create_time()
        words = " ".join(process.cmdline())
        words = words if len(words) < 100 else f"{words[:30]} ... {words[-66:]}"
        return (
            f"{process.pid} {process.ppid()} {age:.0f} {process.status()} {read('wchan')} "
            f"({' '.join(read('syscall').split()[:3])}) {words}"
        )
    return f"{process.pid} has ended"


def _asked(sessions: Sequence[int], name: str, number: signal.Signals, log: Path) -> str:
    """Return the text that the processes of this name add to the log at a signal."""
    before = log.stat().st_size
    for process in _processes(sessions):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(name):
                process.send_signal(number)
    size = -1
    while size != (size := log.stat().st_size):
        time.sleep(QUIET)
    with log.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")
