"""The log of deaths of an instance: who died, what it held, and how long the repair took.

The supervisor writes it; reading needs no supervisor and only the right to read. It has the last
256 deaths.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from shmq import chronicle
from shmq.chronicle import HELD_BYTES, Chronicle
from shmq.layout import Array, ClientKind


class How(enum.IntEnum):
    """How a process ended, as far as the supervisor could tell."""

    DIED = 0
    """It was gone when the supervisor looked."""
    KILLED = 1
    """By a signal."""
    EXITED = 2
    """With an exit status, without a detach."""
    EXEC = 3
    """It became another program."""


class Lock(enum.IntFlag):
    """Kinds of locks of the core."""

    REGISTRY = 1
    """Names: one per instance."""
    PUBLISH = 2
    """A topic's."""
    DELIVER = 4
    """A queue's."""


_NONE: Final = Lock(0)


@dataclass(frozen=True)
class Held:
    """Messages of one channel that a process held. channel None: a topic's backlog."""

    topic: str
    channel: str | None
    messages: int


@dataclass(frozen=True)
class Death:
    """One death. pid, uid: the process and its user."""

    number: int
    """Counts the deaths of an instance from 1."""
    time: int
    """When the supervisor noticed it, CLOCK_REALTIME ns. For a supervisor: when the next one took
    over."""
    pid: int
    kind: str
    """client, supervisor or gateway."""
    program: str
    """Its program, for Python with the script or module; "" if it was not known."""
    how: How
    status: int
    """The signal that killed it, or its exit status; 0 if neither is known."""
    uid: int
    messages: int
    """Messages that were returned; 0 for a supervisor, which holds none."""
    held: tuple[Held, ...]
    """Its messages by channel, the most first; those without a place in a record are left out."""
    locks: Lock
    """Locks that it left behind. One that another process found first is missing here; it is in
    `rebuilt`."""
    rebuilt: int
    """Queues that were rebuilt since the death before, because somebody died inside them."""
    repair: float
    """Seconds from the notice to the end of the repair."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a document."""
        return {
            "number": self.number,
            "time": self.time,
            "pid": self.pid,
            "kind": self.kind,
            "program": self.program,
            "how": self.how.name.lower(),
            "status": self.status,
            "uid": self.uid,
            "message_count": self.messages,
            "held": [
                {"topic": item.topic, "channel": item.channel, "message_count": item.messages}
                for item in self.held
            ],
            "locks": locks_of(self.locks),
            "rebuilt_count": self.rebuilt,
            "repair_ms": round(self.repair * 1000, 3),
        }


@dataclass
class Report:
    """A death before it has a number. See `Death` for the meaning of the fields."""

    time: int
    pid: int
    kind: int
    program: str = ""
    how: How = How.DIED
    status: int = 0
    uid: int = 0
    messages: int = 0
    held: list[Held] = field(default_factory=list)
    locks: Lock = _NONE
    rebuilt: int = 0
    repair: float = 0.0


def locks_of(locks: Lock) -> list[str]:
    """The names of some kinds of locks."""
    return [kind.name.lower() for kind in Lock if kind & locks and kind.name]


def read(
    instance: str | None = None, *, after: int = 0, owner: str | int | None = None
) -> list[Death]:
    """Read the deaths of an instance (None: the default one), the oldest first. after: only those
    with a higher number. Raises what `chronicle.open_readonly` raises."""
    with chronicle.open_readonly(instance, owner) as source:
        return read_from(source, after=after)


def read_from(source: Chronicle, *, after: int = 0) -> list[Death]:
    """Read the deaths from an open chronicle, as `read`."""
    records = source.read("deaths")
    numbers = records["number"]
    place = (numbers % np.uint64(len(records))).astype(np.int64)
    good = chronicle.intact(records) & (numbers > after) & (place == np.arange(len(records)))
    found = records[good]
    return [_death(row) for row in found[np.argsort(found["number"])]]


def last_number(source: Chronicle) -> int:
    """The number of the last death; 0 if there is none."""
    return max((death.number for death in read_from(source)), default=0)


def write(source: Chronicle, number: int, report: Report) -> None:
    """Write one death. Raises OSError if /dev/shm is full."""
    record = source.blank("deaths")
    record["number"], record["time"] = number, report.time
    record["repair"] = int(report.repair * 1e9)
    record["pid"], record["uid"] = report.pid, report.uid
    record["kind"], record["how"] = report.kind, report.how
    record["status"], record["locks"] = report.status, report.locks
    record["messages"], record["rebuilt"] = report.messages, report.rebuilt
    record["title"] = report.program.encode("utf-8", "replace")
    text = b""
    for item in sorted(report.held, key=lambda item: -item.messages):
        line = f"{item.messages} {item.topic} {item.channel or ''}\n".encode()
        if len(text) + len(line) > HELD_BYTES:
            break
        text += line
    record["held"] = text
    source.write("deaths", number, record)


def _death(row: Array) -> Death:
    kind = int(row["kind"])
    return Death(
        number=int(row["number"]),
        time=int(row["time"]),
        pid=int(row["pid"]),
        kind=ClientKind(kind).name.lower() if kind in frozenset(ClientKind) else str(kind),
        program=bytes(row["title"]).decode("utf-8", "replace"),
        how=How(int(row["how"])) if int(row["how"]) in frozenset(How) else How.DIED,
        status=int(row["status"]),
        uid=int(row["uid"]),
        messages=int(row["messages"]),
        held=tuple(_held(bytes(row["held"]))),
        locks=Lock(int(row["locks"]) & 7),
        rebuilt=int(row["rebuilt"]),
        repair=int(row["repair"]) / 1e9,
    )


def _held(text: bytes) -> list[Held]:
    found = []
    for line in text.decode("ascii", "replace").splitlines():
        words = line.split(" ")
        if len(words) == 3 and words[0].isdecimal():
            found.append(Held(words[1], words[2] or None, int(words[0])))
    return found
