"""Processes as /proc shows them.

A pid alone never identifies a process, because the kernel uses it again. A process is identified by
its pid and its start time, which the layout keeps for every client.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Final, Self

_PF_EXITING: Final = 0x4  # include/linux/sched.h; set for each thread as soon as it begins to exit
_DEAD: Final = ("Z", "X", "x")


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of a `stat` file that shmq uses."""

    state: str
    """R, S, D, Z, ...: see proc(5)."""
    flags: int
    start_time: int
    """Clock ticks since boot."""
    stack: int
    """Address where the stack begins; 0: not readable. An exec changes it."""

    @classmethod
    def read(cls, pid: int | str, thread: int | str | None = None) -> Self | None:
        """Of a process, or of one of its threads. None if there is none, or /proc hides it."""
        task = "" if thread is None else f"/task/{thread}"
        try:
            with open(f"/proc/{pid}{task}/stat", encoding="utf-8", errors="replace") as file:
                text = file.read()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
        return cls(fields[0], int(fields[6]), int(fields[19]), int(fields[25]))

    @property
    def is_dead(self) -> bool:
        """Whether it has ended: a zombie has."""
        return self.state in _DEAD

    @property
    def is_ending(self) -> bool:
        """Whether it has ended or begun to exit."""
        return self.is_dead or self.flags & _PF_EXITING != 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process as /proc showed it."""

    pid: int
    start_time: int
    """Clock ticks since boot; 0: /proc hides it (another user's, under hidepid)."""
    program: int
    """The start address of its stack, which an exec changes; 0: not readable."""
    ending: bool
    """Whether it is a zombie, or all of its threads are exiting."""

    @classmethod
    def look(cls, pid: int) -> Self | None:
        """Look up a process. None if there is none with this pid."""
        stat = Stat.read(pid)
        if stat is None:
            # the mount option hidepid must not make living processes look dead
            return cls(pid, 0, 0, False) if _exists(pid) else None
        # the first thread may have ended alone; the process has ended when all threads have
        return cls(pid, stat.start_time, stat.stack, stat.is_ending and _all_are_ending(pid))

    def is_same(self, start_time: int, program: int) -> bool:
        """Returns True if this is the process that attached with these values, and it runs the same
        program."""
        if self.ending or self.start_time not in (0, start_time):
            return False
        return program in (0, self.program) or self.program == 0


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it cannot be read, or the process
    is a zombie."""
    with contextlib.suppress(OSError):
        stat = Stat.read(pid)
        if stat is not None and not stat.is_dead:
            return stat.start_time
    return None


def exit_code(pid: int, start_time: int) -> int | None:
    """How an ending process ended, as wait(2) tells it: the signal, or the exit status << 8. None
    if it is gone, does not end, or belongs to a user whose processes this one may not trace."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid() != 0:
            return None  # the kernel says 0 then
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    is_ending = fields[0] in _DEAD or int(fields[6]) & _PF_EXITING
    return int(fields[49]) if is_ending and int(fields[19]) == start_time else None


def is_running(pid: int, thread: int) -> bool:
    """Returns True if the process has this thread and the thread is not exiting."""
    stat = Stat.read(pid, thread)
    return stat is not None and not stat.is_ending


def is_alive(pid: int, start_time: int) -> bool:
    """Returns True if the process that began at `start_time` still lives."""
    process = Process.look(pid)
    return process is not None and process.is_same(start_time, 0)


def program_name(pid: int) -> str:
    """The name of a process for the log. Empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return name_of(file.read(4096).decode(errors="replace").split("\0"))
    except OSError:
        return ""


def short_name(pid: int) -> str:
    """The first 15 characters of a process's name, which is readable until it is reaped. Empty if
    it cannot be read."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return name_of([file.read()[:-1].decode(errors="replace")])
    except OSError:
        return ""


def name_of(words: list[str]) -> str:
    """The name of a command line for the log: the program without its path, and for Python the
    script or module. The other arguments are left out: one of them may be a password."""
    name = os.path.basename(words[0])
    if name.startswith("python"):
        shown = words[1:3] if words[1:2] == ["-m"] else words[1:2]
        if shown and (len(shown) == 2 or not shown[0].startswith("-")):
            name = " ".join([name, *map(os.path.basename, shown)])
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:100].strip()


def pid_namespace() -> int:
    """The inode of this process's PID namespace; 0 if it cannot be read."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _all_are_ending(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return not any(is_running(pid, int(thread)) for thread in os.listdir(f"/proc/{pid}/task"))
    return True
