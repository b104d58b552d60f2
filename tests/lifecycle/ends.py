"""The columns of the matrix: every end that a handle, its process or its broker may have; and what
may stay after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from lifecycle.handles import Row


class Where(Enum):
    """Who makes the end: the process, which goes on; the process, which ends with it; or the one
    who looks, from outside."""

    INSIDE = "inside"
    PROCESS = "process"
    SIGNAL = "signal"
    OUTSIDE = "outside"

    @staticmethod
    def of(end: str) -> Where:
        return next(where for where, ends in ENDS.items() if end in ends)


ENDS: dict[Where, tuple[str, ...]] = {
    Where.INSIDE: ("close", "owner", "collected", "thread", "exception"),
    Where.PROCESS: (
        "returned",
        "raised",
        "at_once",
        "with_threads",
        "fork_ends",
        "fork_closes",
        "fork_stays",
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
#: Only of the broker that rows share, which has a gateway.
OF_THE_GATEWAY = "gateway_killed"


class Stays(NamedTuple):
    """What may be more after these ends of these rows. It is gone when the process has ended and
    another one has made such a handle."""

    rows: Callable[[Row], bool]
    ends: tuple[str, ...]
    names: tuple[str, ...]
    """How they begin."""
    why: str


_UNCLOSED = ENDS[Where.PROCESS] + ENDS[Where.SIGNAL]
_ALIVE = ENDS[Where.INSIDE] + ENDS[Where.OUTSIDE]
STAYS: tuple[Stays, ...] = (
    Stays(
        lambda row: row.name == "embedded_broker_on_disk",
        (*_UNCLOSED, "collected", "exception"),
        (".local/state/shmq/embedded-N",),
        "a broker that was not closed leaves its data path; the next embedded one removes it, "
        "unless it has messages",
    ),
    Stays(
        lambda row: row.tree,
        (*_ALIVE, "fork_stays", "replaced"),
        ("sem.shmq.tree", "shmq-memory-N", "shmq.tree-N", "supervisor"),
        "the instance of a tree of processes lives until the last of them ends; a process that "
        "becomes another program is the same",
    ),
    Stays(
        lambda row: "embedded" in row.name,
        ("replaced",),
        ("sem.shmq.embedded-N", "shmq-memory-N", "shmq.embedded-N", "supervisor", "embedded-N"),
        "the same, of an embedded broker",
    ),
    Stays(
        lambda row: row.name == "executor_of_a_broker",
        ("replaced",),
        (sys.executable, "tasks/pool", "client 0 pins"),
        "the same, of the workers of a durable pool, which go on with its tasks",
    ),
    Stays(
        lambda row: row.name in {"queue", "joinable_queue", "simple_queue"},
        (*_ALIVE, "fork_stays"),
        ("shmq.tree-N.N",),
        "a closed queue keeps its items for others until its last object is collected",
    ),
    Stays(
        lambda row: row.name == "wait_for_a_result",
        ("collected", "exception"),
        ("Thread", "client"),
        "the thread that waits has the handle",
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
        each.rows(row) and end in each.ends and name.startswith(each.names) for each in STAYS
    )


def alike(row: Row) -> tuple[bool, ...]:
    """Rows for which this is the same may be made and ended at the same time."""
    return (row.own, *(each.rows(row) for each in STAYS))
