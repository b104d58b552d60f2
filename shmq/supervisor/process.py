"""What /proc says of a process: enough to know that it is still the one that attached."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

_PF_EXITING = 0x4  # include/linux/sched.h; set for each task as soon as it begins to exit


@dataclass(frozen=True, slots=True)
class Process:
    """A look at a process. A pid alone is never trusted: it is used again."""

    pid: int
    start_time: int  # clock ticks since boot; 0: /proc hides it (another user's, under hidepid)
    program: int  # where its stack starts, so that an exec shows; 0: not readable
    ending: bool  # a zombie, or every thread of it is on its way out

    @classmethod
    def look(cls, pid: int) -> Process | None:
        """None if there is no such process."""
        fields = _stat(f"/proc/{pid}/stat")
        if fields is None:
            # a mount option must not make living processes look dead
            return cls(pid, 0, 0, False) if _exists(pid) else None
        ending = fields[0] in ("Z", "X", "x") or _exiting(fields)
        # the first thread may have ended alone; the process has ended when all have
        ending = ending and _all_exiting(pid)
        return cls(pid, int(fields[19]), int(fields[25]), ending)

    def is_same(self, start_time: int, program: int) -> bool:
        """Whether it is the process, running the program, that had these when it attached."""
        if self.ending or self.start_time not in (0, start_time):
            return False
        return program in (0, self.program) or self.program == 0


def is_running(pid: int, thread: int) -> bool:
    """Whether the process has this thread, and it is not on its way out."""
    fields = _stat(f"/proc/{pid}/task/{thread}/stat")
    return fields is not None and fields[0] not in ("Z", "X", "x") and not _exiting(fields)


def is_alive(pid: int, start_time: int) -> bool:
    """Whether the process that began at `start_time` is still there."""
    process = Process.look(pid)
    return process is not None and process.is_same(start_time, 0)


def program_name(pid: int) -> str:
    """What a process is called in a log. Empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return name_of(file.read(4096).decode(errors="replace").split("\0"))
    except OSError:
        return ""


def name_of(words: list[str]) -> str:
    """What a command line is called in a log: the program without its path, and for Python the
    script or module. Nothing else of it: there may be a password among the arguments."""
    name = os.path.basename(words[0])
    if name.startswith("python"):
        shown = words[1:3] if words[1:2] == ["-m"] else words[1:2]
        if shown and (len(shown) == 2 or not shown[0].startswith("-")):
            name = " ".join([name, *map(os.path.basename, shown)])
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:100].strip()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _exiting(fields: list[str]) -> bool:
    return int(fields[6]) & _PF_EXITING != 0


def _stat(path: str) -> list[str] | None:
    """The fields of a stat file from the third (state) on; the second may hold anything."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return text[text.rindex(")") + 2 :].split()


def _all_exiting(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return not any(is_running(pid, int(task)) for task in os.listdir(f"/proc/{pid}/task"))
    return True
