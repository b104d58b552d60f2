"""The parts of the model of a queue: its messages, consumers, deliveries and records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.queue_model import Queue

HEAD, UNIT, RECORD_HEAD = 16, 64, 30
TRANSIT = 256  # least budget of READY
SLOTS_FIRST = 128
ENVELOPE, EXPIRES_ENTRY, FAILURES_ENTRY = 12, 23, 19  # bytes of a record
AT_ONCE = 1  # the due time of a convicted message
MOST_FAILURES = 65535
SECOND = 1_000_000_000

#: Reads the due time of a message that was just deferred, between `least` and `most` ns from now.
DueOf = Callable[["Queue", "Msg", float, float], int]


def block(length: int) -> int:
    """Bytes of the arena that a body of this length takes."""
    return -(-(length + HEAD) // UNIT) * UNIT


@dataclass(eq=False)
class Msg:
    """A message in one queue."""

    id: int
    body: bytes
    timestamp: int
    seq: int
    attempts: int = 0
    order: int = 0  # of return or delivery
    after: int = 0  # REQUEUED: seq it waits for
    pos: int | None = None  # REQUEUED, as restored: where its record lies
    due: int = 0
    deadline: int = 0
    holder: Delivery | None = None
    pins: int = 0
    block: int = 0  # bytes of the arena it has; at least block(len(body))
    failures: int = 0
    failed: bool = False  # it has a count of failures, if only 0
    suspect: bool = False
    reason: str = ""  # of its conviction
    expires: int | None = None  # by its own time to live
    was_due: bool = False  # if it expires, `expires` has the channel's time to live, too
    begin: int | None = None  # of a time to live that the channel gets: when it was due

    def written(self) -> Msg:
        """As it is on disk."""
        was_due = self.was_due and self.expires is not None
        return replace(self, pins=0, holder=None, was_due=was_due, begin=None)

    @property
    def record_bytes(self) -> int:
        more = EXPIRES_ENTRY if self.expires is not None else 0
        final = self.was_due and self.expires is not None
        more += FAILURES_ENTRY if self.failed or self.suspect or final else 0
        return len(self.body) + RECORD_HEAD + (ENVELOPE + more if more else 0)


@dataclass(eq=False)
class Session:
    """A consumer."""

    queue: Queue
    client: Any
    max_in_flight: int
    timeout: int | None
    native: Any
    open: bool = True
    delivered: int = 0
    finished: int = 0
    requeued: int = 0
    timed_out: int = 0
    noted: Msg | None = None  # the last suspect it got

    @property
    def in_flight(self) -> int:
        return sum(m.holder.session is self for m in self.queue.in_flight.values() if m.holder)


@dataclass(eq=False)
class Delivery:
    """A message as handed out once."""

    msg: Msg
    session: Session
    native: Any
    single: bool

    @property
    def live(self) -> bool:
        """Still in flight as this delivery."""
        return self.session.queue.in_flight.get(self.msg.id) is self.msg and (
            self.msg.holder is self
        )


@dataclass
class Record:
    """A message on disk."""

    msg: Msg
    position: int
    next_position: int


COUNTERS = (
    "enqueued",
    "enqueued_bytes",
    "dropped",
    "delivered",
    "finished",
    "requeued",
    "timed_out",
    "returned",
    "spilled",
    "restored",
    "dropped_oldest",
    "rejected",
    "expired",
    "dead_lettered",
)
