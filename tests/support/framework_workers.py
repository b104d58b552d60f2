"""Commands that run a task framework's worker processes, as people start them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import psutil

from support.processes import HELPERS, Child, eventually

BIN = Path(sys.executable).parent


class Runs:
    """A file to which tasks add a line `NAME KEY PID` when they begin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def lines(self) -> list[list[str]]:
        """All lines so far. The end of the text may be a line that is just being written."""
        whole = self.path.read_text().rpartition("\n")[0]
        return [line.split() for line in whole.splitlines()]

    def count(self, name: str) -> Counter[str]:
        """How often a task of this name began, by key."""
        return Counter(key for each, key, _ in self.lines() if each == name)


def began(name: str, key: object) -> None:
    """Called by a task: add a line to the file that RUNS names."""
    fd = os.open(os.environ["RUNS"], os.O_WRONLY | os.O_APPEND)
    os.write(fd, f"{name} {key} {os.getpid()}\n".encode())
    os.close(fd)


class Command:
    """A command and its worker processes, in a session of their own."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        self._words = ["setsid", str(BIN / words[0]), *words[1:]]
        self._env = {**HELPERS, **env}
        self._child: Child | None = None
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        self._child = Child(self._words, self._env)

    @property
    def errors(self) -> str:
        """The standard error of the running command."""
        assert self._child is not None
        return self._child.errors

    @property
    def ended(self) -> bool:
        """Whether the command itself has ended."""
        return self._child is None or self._child.process.poll() is not None

    def workers(self) -> list[int]:
        """The process ids of its worker processes."""
        assert self._child is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._child.pid).children(recursive=True)
            return [each.pid for each in children if _is_worker(each)]
        return []

    def kill_worker(self, chance: random.Random) -> bool:
        """SIGKILL one of its worker processes. Returns False if it has none just now. A command
        that ends with its worker is started again by `keep`."""
        found = self.workers()
        if not found:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(found), signal.SIGKILL)
            return True
        return False

    def keep(self) -> None:
        """Start it again if it has ended, as a service manager does."""
        if self.ended:
            self.close()
            self.start()

    def close(self) -> None:
        """SIGKILL the command and all of its processes."""
        if self._child is not None:
            pid = self._child.pid
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._child.close()
            eventually(lambda: not _session(pid), what=f"the processes of {self._words[1]} ended")
            self._child = None


def _is_worker(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in words
    except psutil.NoSuchProcess:
        return False


def _session(leader: int) -> list[int]:
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(each.pid) == leader and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each.pid)
    return found
