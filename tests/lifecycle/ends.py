"""The columns of the matrix: every end that a handle, its process or its broker may have; and what
may stay after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple

from lifecycle.handles import Row


class Where(Enum):
    """The maker of the end: the process, which goes on; the process, which ends with it; or the
    one who looks, from outside."""

    INSIDE = "inside"
    PROCESS = "process"
    SIGNAL = "signal"
    OUTSIDE = "outside"

    @staticmethod
    def of(end: str) -> Where:
        return next(where for where, ends in ENDS.items() if end in ends)


ENDS: dict[Where, tuple[str, ...]] = {
    Where.INSIDE: ("close", "owner", "collected", "thread", "exception", "second"),
    Where.PROCESS: (
        "returned",
        "raised",
        "at_once",
        "with_threads",
        "fork_ends",
        "fork_closes",
        "fork_stays",
        "killed_beside_fork",
        "replaced",
    ),
    Where.SIGNAL: ("sigterm", "sigkill"),
    Where.OUTSIDE: (
        "stopped_and_continued",
        "supervisor_killed",
        "gateway_killed",
        "instance_stopped",
    ),
}


def has(row: Row, end: str) -> bool:
    """Whether the row has this end. A program has few. Only the broker that rows share has a
    gateway; and only of executors a second one that is made and closed must leave the first one as
    it is."""
    if row.ends is not None:
        return end in row.ends
    if end == "second":
        return "executor" in row.name
    return not row.own or end != "gateway_killed"


class Stays(NamedTuple):
    """Names that may be more after these ends of these rows. They are gone when the process has
    ended and another one has made such a handle."""

    rows: Callable[[Row], bool]
    ends: tuple[str, ...]
    names: tuple[str, ...]
    """Patterns."""
    why: str


_UNCLOSED = ENDS[Where.PROCESS] + ENDS[Where.SIGNAL]
_WITH_A_FORK = ("fork_stays", "killed_beside_fork")
_ALIVE = ENDS[Where.INSIDE] + ENDS[Where.OUTSIDE]
STAYS: tuple[Stays, ...] = (
    Stays(
        lambda row: row.name == "embedded_broker_on_disk",
        (*_UNCLOSED, "collected", "exception"),
        (".local/state/shmq/embedded-N*",),
        "a broker that was not closed leaves its data path; the next embedded one removes it, "
        "unless it has messages",
    ),
    Stays(
        lambda row: row.tree,
        (*_ALIVE, *_WITH_A_FORK, "replaced"),
        ("sem.shmq.tree-N.*", "shmq-memory-N", "shmq.tree-N", "shmq.tree-N:*", "supervisor"),
        "the instance of a tree of processes lives until the last of them ends; a process that "
        "becomes another program is the same",
    ),
    Stays(
        lambda row: "embedded" in row.name,
        ("replaced",),
        ("*shmq.embedded-N*", "shmq-memory-N", "supervisor", "embedded-N"),
        "the same, of an embedded broker",
    ),
    Stays(
        lambda row: "executor" in row.name,
        ("replaced",),
        (f"{sys.executable} *", "tasks/pool", "client 0 pins*"),
        "the same, of the workers of a pool",
    ),
    Stays(
        lambda row: "queue" in row.name,
        ("owner", "thread"),
        ("/dev/shm/shmq.*",),
        "a process of root may drop its rights, so its queues keep descriptors while they live",
    ),
    Stays(
        lambda row: row.tree and "queue" in row.name,
        (*_ALIVE, *_WITH_A_FORK),
        ("shmq.tree-N.N",),
        "a closed queue keeps its items for others until its last object is collected",
    ),
    Stays(
        lambda row: row.name == "private_queue_of_a_broker",
        (*_ALIVE, *_WITH_A_FORK),
        ("shmq.lifecycle.N", "queue-*"),
        "the same, of a queue in a broker",
    ),
    Stays(
        lambda row: row.name == "wait_for_a_result",
        ("collected", "thread", "exception", "second"),
        ("Thread*", "client*"),
        "the thread that waits has the handle",
    ),
    Stays(
        lambda row: row.keeps,
        _ALIVE,
        ("client*", "/dev/shm/*"),
        "frameworks make and drop their objects for each task: a process attaches once",
    ),
    Stays(
        lambda row: row.name == "joblib_executor",
        ("owner", "thread", *ENDS[Where.OUTSIDE]),
        (
            f"{sys.executable} *",
            "shmq.tree-N.N",
            "shmq-pool",
            "/dev/shm/*",
            "anon_inode:*",
            "pipe:*",
            "socket:*",
        ),
        "after a call of Parallel the workers stay for the next one, until the backend is gone",
    ),
    Stays(
        lambda row: row.name == "viewer",
        ("owner", "thread"),
        ("/dev/shm/shmq.lifecycle",),
        "arrays of a closed one stay valid, so the directory is mapped until it is collected",
    ),
)


def stays(row: Row, end: str, name: str) -> bool:
    """Whether the table says that this is there after the end."""
    return any(
        each.rows(row)
        and end in each.ends
        and any(fnmatchcase(name, pattern) for pattern in each.names)
        for each in STAYS
    )


def alike(row: Row) -> tuple[object, ...]:
    """Rows for which this is the same may be made and ended at the same time."""
    ends = row.ends or ()
    return (row.own, ends, has(row, "second"), *(each.rows(row) for each in STAYS))
