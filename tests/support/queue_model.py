"""The behaviour of a topic and its queues in plain Python: lists, dicts and no shared memory.

Where the library may choose (which of equal deadlines comes first, whether fragmented memory can
hold one more body) the model is told what happened and checks that it was allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

HEAD, UNIT, RECORD_HEAD = 16, 64, 30
TRANSIT = 256  # least budget of READY
SLOTS_FIRST = 128


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

    @property
    def record_bytes(self) -> int:
        return len(self.body) + RECORD_HEAD


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
)


@dataclass(eq=False)
class Queue:
    """A channel, or the topic's backlog (channel None)."""

    topic: Topic
    channel: str | None
    index: int
    serial: int
    ephemeral: bool = False
    paused: bool = False
    ready: list[Msg] = field(default_factory=list)
    back: list[Msg] = field(default_factory=list)
    in_flight: dict[int, Msg] = field(default_factory=dict)
    deferred: dict[int, Msg] = field(default_factory=dict)
    done: list[Msg] = field(default_factory=list)
    loans: int = 0
    spilling: list[tuple[Msg, str]] | None = None  # with the state it came from
    spill_flag: bool = False  # a batch is being written, emptied or not
    disk: list[Record] = field(default_factory=list)
    read: int = 0
    write: int = 0
    sessions: list[Session] = field(default_factory=list)
    orders: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    gone: bool = False

    # ---- budgets ----

    @property
    def on_disk(self) -> bool:
        return self.read != self.write or self.spill_flag

    def held(self) -> list[Msg]:
        return [*self.in_flight.values(), *self.back, *self.deferred.values(), *self.done]

    def in_use_bytes(self) -> int:
        return sum(msg.block for msg in self.held())

    def may_hold_more(self) -> bool:
        """Slots in use must leave room for the spill."""
        held = self.held()
        return len(held) < self.topic.limits["in_flight_slots"] and (
            not held or self.in_use_bytes() <= self.topic.bytes_budget
        )

    @property
    def used_ready(self) -> int:
        return len(self.ready) + len(self.spilling or ())

    @property
    def empty(self) -> bool:
        return not (self.ready or self.held() or self.spilling or self.on_disk)

    def room(self, lengths: list[int], deferred: bool) -> str:
        """ "ok", "full" or "big", as far as slots are concerned."""
        limits = self.topic.limits
        budget = limits["in_flight_slots"] if deferred else self.topic.ready_budget
        if len(lengths) > budget or sum(map(block, lengths)) > self.topic.bytes_budget:
            return "big"
        used = len(self.held()) if deferred else self.used_ready
        taken = self.used_ready + len(self.held()) + self.loans
        if used + len(lengths) > budget or taken + len(lengths) > self.topic.slots_max:
            return "full"
        nbytes = sum(map(block, lengths))
        if deferred and used and self.in_use_bytes() + nbytes > self.topic.bytes_budget:
            return "full"
        return "ok"

    # ---- into it ----

    def enter(self, msg: Msg, due: int) -> None:
        self.counters["enqueued"] += 1
        self.counters["enqueued_bytes"] += len(msg.body)
        if due:
            msg.due = due
            self.deferred[msg.id] = msg
        else:
            self.ready.append(msg)

    def put_back(self, msg: Msg, after: int) -> None:
        msg.holder, msg.after, msg.pos = None, after, None
        msg.order = next(self.orders)
        self.back.append(msg)

    # ---- out of it ----

    def next_source(self) -> str | None:
        have_ready = bool(self.ready) and not self.on_disk
        if self.back:
            first = self.back[0]
            waits = have_ready and self.ready[0].seq < first.after
            waits = waits and all(msg.after for msg in self.back)
            if not waits or not self.may_hold_more():
                return "back"
        return "ready" if have_ready and self.may_hold_more() else None

    def take(self, session: Session, n: int) -> list[Msg]:
        """Hand out up to n; the caller makes the deliveries."""
        taken: list[Msg] = []
        n = 0 if self.paused else min(n, session.max_in_flight - session.in_flight)
        while len(taken) < n:
            source = self.next_source()
            if source is None:
                break
            msg = (self.back if source == "back" else self.ready).pop(0)
            msg.attempts += 1
            msg.order = next(self.orders)
            self.in_flight[msg.id] = msg
            taken.append(msg)
        session.delivered += len(taken)
        self.counters["delivered"] += len(taken)
        return taken

    def drop(self, msg: Msg) -> None:
        """Out of memory, unless somebody looks at it."""
        msg.holder = None
        if msg.pins:
            self.done.append(msg)

    def unpin(self, msg: Msg) -> None:
        msg.pins -= 1
        if not msg.pins and msg in self.done:
            self.done.remove(msg)

    def finish(self, msg: Msg) -> None:
        assert msg.holder
        msg.holder.session.finished += 1
        self.counters["finished"] += 1
        del self.in_flight[msg.id]
        self.drop(msg)

    def requeue(self, msg: Msg, due: int) -> None:
        assert msg.holder
        msg.holder.session.requeued += 1
        self.counters["requeued"] += 1
        del self.in_flight[msg.id]
        if due:
            msg.holder, msg.due = None, due
            self.deferred[msg.id] = msg
        else:
            self.put_back(msg, self.topic.seq + 1)

    def give_back(self, sessions: list[Session]) -> int:
        """Requeue the messages that closed or dead consumers held, in the order of delivery."""
        mine = [m for m in self.in_flight.values() if m.holder and m.holder.session in sessions]
        for msg in sorted(mine, key=lambda msg: msg.order):
            del self.in_flight[msg.id]
            self.put_back(msg, 0)
        for session in sessions:
            session.open = False
            self.sessions.remove(session)
        self.counters["returned"] += len(mine)
        return len(mine)

    def timed_out(self, msg: Msg) -> None:
        assert msg.holder
        msg.holder.session.timed_out += 1
        self.counters["timed_out"] += 1
        del self.in_flight[msg.id]
        self.put_back(msg, self.topic.seq + 1)

    def came_due(self, msg: Msg) -> None:
        del self.deferred[msg.id]
        self.put_back(msg, self.topic.seq + 1)

    def clear(self) -> int:
        """nsqd's empty."""
        spilling = [msg for msg, _ in self.spilling or ()]
        waiting = [*self.ready, *self.back, *self.in_flight.values(), *self.deferred.values()]
        dropped = len(self.disk) + len(waiting) + len(spilling)
        for msg in (*waiting, *spilling):
            self.drop(msg)
        self.ready, self.back, self.in_flight, self.deferred = [], [], {}, {}
        self.disk.clear()
        if self.spilling:
            self.spilling = []
        self.read = self.write
        return dropped

    # ---- disk ----

    def advance(self, n: int) -> int:
        moved = 0
        limit = self.topic.limits["in_flight_slots"]
        while moved < n and self.ready and len(self.held()) < limit:
            self.put_back(self.ready.pop(0), 0)
            moved += 1
        return moved

    def spill_candidates(self, everything: bool) -> list[tuple[Msg, str]]:
        """In the order of their writing."""
        found = [(msg, "ready") for msg in self.ready]
        if everything:
            flying = sorted(self.in_flight.values(), key=lambda msg: msg.order)
            found = [
                *((msg, "in_flight") for msg in flying),
                *((msg, "back") for msg in self.back),
                *found,
            ]
        return found

    def spill_begin(self, n: int, max_bytes: int, everything: bool) -> list[tuple[Msg, str]]:
        batch: list[tuple[Msg, str]] = []
        nbytes = 0
        for msg, source in self.spill_candidates(everything):
            if len(batch) == n or (batch and nbytes + msg.record_bytes > max_bytes):
                break
            nbytes += msg.record_bytes
            batch.append((msg, source))
        for msg, source in batch:
            held = getattr(self, source)
            held.remove(msg) if isinstance(held, list) else held.pop(msg.id)
            msg.holder = None
        if batch:
            self.spilling, self.spill_flag = batch, True
        return batch

    def spill_end(self, records: list[Record], write: int) -> bool:
        """False: emptied or adopted meanwhile."""
        batch, self.spilling, self.spill_flag = self.spilling, None, False
        if not batch:
            return False
        self.disk.extend(records)
        self.write = write
        self.counters["spilled"] += len(batch)
        for msg, _ in batch:
            self.drop(msg)
        return True

    def spill_undo(self) -> None:
        """They become what they were; what was in flight waits again."""
        for msg, source in self.spilling or ():
            msg.pos = None
            if source == "ready":
                self.ready.append(msg)
            else:
                if source == "in_flight":
                    msg.after = 0
                self.back.append(msg)
        self.ready.sort(key=lambda msg: msg.seq)
        self.back.sort(key=lambda msg: msg.order)

    def adopt(self) -> None:
        self.spill_undo()
        self.spill_flag = False
        if self.spilling:
            self.spilling = []

    def restorable(self, wanted: int) -> int:
        """How many of the first `wanted` records fit, when halved until they do."""
        while wanted:
            lengths = [len(record.msg.body) for record in self.disk[:wanted]]
            if self.room(lengths, deferred=True) == "ok":
                break
            wanted //= 2
        return wanted

    def restore(self, count: int, next_position: int) -> list[Msg]:
        records = self.disk[:count]
        del self.disk[:count]
        for record in records:
            self.put_back(record.msg, 0)
            record.msg.pos = record.position
        if records:
            self.read = next_position
        self.counters["restored"] += count
        return [record.msg for record in records]

    def evict_read_ahead(self) -> int:
        """Messages that were read ahead and not taken go back, from the end; those delivered before
        go in front of them."""
        self.back.sort(key=lambda msg: (not msg.attempts and not msg.after, msg.order))
        for msg in self.back:
            msg.order = next(self.orders)
        run: list[Msg] = []
        position = self.read
        while self.back:
            msg = self.back[-1]
            if msg.pos is None or msg.pos >> 40 != position >> 40:
                break
            if msg.pos + msg.record_bytes != position:
                break
            run.append(self.back.pop())
            position = msg.pos
        for msg in run:
            assert msg.pos is not None
            self.disk.insert(0, Record(msg, msg.pos, msg.pos + msg.record_bytes))
        self.read = position
        return len(run)


@dataclass(eq=False)
class Topic:
    """The topic, its channels and its backlog."""

    limits: dict[str, int]
    queues: list[Queue] = field(default_factory=list)
    paused: bool = False
    seq: int = 0
    messages: int = 0
    bytes: int = 0

    @property
    def ready_budget(self) -> int:
        return max(self.limits["mem_queue_size"], TRANSIT)

    @property
    def slots_max(self) -> int:
        return self.ready_budget + self.limits["in_flight_slots"]

    @property
    def bytes_budget(self) -> int:
        return self.limits["arena_size"] // 4 * 3

    @property
    def channels(self) -> list[Queue]:
        return [queue for queue in self.queues if queue.channel is not None]

    @property
    def backlog(self) -> Queue | None:
        return next((queue for queue in self.queues if queue.channel is None), None)

    def targets(self) -> list[Queue] | None:
        """Where a publish goes; None: a backlog must be made first."""
        backlog = self.backlog
        if self.channels and not self.paused and (backlog is None or backlog.empty):
            return sorted(self.channels, key=lambda queue: queue.index)
        return [backlog] if backlog else None

    def publish(
        self, ids: list[int], bodies: list[bytes], timestamp: int, due: int, targets: list[Queue]
    ) -> None:
        """One transaction."""
        for number, (id_, body) in enumerate(zip(ids, bodies, strict=True), 1):
            for queue in targets:
                queue.enter(Msg(id_, body, timestamp, self.seq + number), due)
        self.seq += len(bodies)
        self.messages += len(bodies)
        self.bytes += sum(map(len, bodies))

    def pump_one(self, targets: list[Queue]) -> None:
        """The next message of the backlog to these channels."""
        source = self.next_of_backlog()
        backlog = self.backlog
        assert source
        assert backlog
        msg, state = source
        held = getattr(backlog, state)
        held.remove(msg) if isinstance(held, list) else held.pop(msg.id)
        self.seq += 1
        for queue in targets:
            copy = replace(msg, seq=self.seq, holder=None, pins=0, pos=None, after=0, block=0)
            queue.enter(copy, msg.due if state == "deferred" else 0)

    def next_of_backlog(self) -> tuple[Msg, str] | None:
        backlog = self.backlog
        if backlog is None:
            return None
        if backlog.back:
            return backlog.back[0], "back"
        if backlog.on_disk:
            return None
        if backlog.ready:
            return backlog.ready[0], "ready"
        if backlog.deferred:
            return min(backlog.deferred.values(), key=lambda msg: msg.due), "deferred"
        return None
