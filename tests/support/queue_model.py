"""The behaviour of a topic and its queues in plain Python: lists, dicts and no shared memory.

Where the library may choose (which of equal deadlines comes first, whether fragmented memory can
hold one more body) the model is told what happened and checks that it was allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shmq.settings import NONE, Settings
from support.queue_parts import (
    AT_ONCE,
    COUNTERS,
    MOST_FAILURES,
    SECOND,
    TRANSIT,
    DueOf,
    Msg,
    Record,
    Session,
    block,
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
    settings: Settings = NONE

    # ---- settings ----

    @property
    def counts_failures(self) -> bool:
        return bool(self.settings.max_attempts or self.settings.retry_delay)

    @property
    def limited(self) -> bool:
        return self.settings.overflow != "disk"

    @property
    def skips(self) -> bool:
        """Whether a full one is left out."""
        return self.settings.overflow == "drop-newest" if self.limited else self.ephemeral

    @property
    def makes_room(self) -> bool:
        return self.settings.overflow == "drop-oldest"

    @property
    def waiting(self) -> int:
        return len(self.ready) + len(self.spilling or ()) + len(self.disk) + len(self.back)

    def fits(self, settings: Settings) -> bool:
        """Whether it can have these settings now."""
        most = settings.max_messages
        if most is None:
            return True
        enough = most >= self.waiting or settings.overflow == "drop-oldest"
        return most <= self.topic.ready_budget and enough

    def exceeds(self, lengths: list[int]) -> bool:
        """Whether these and what waits are more than the limits allow."""
        s, nbytes = self.settings, sum(lengths) + sum(len(msg.body) for msg in self.ready)
        return bool(
            (s.max_messages and self.waiting + len(lengths) > s.max_messages)
            or (s.max_bytes and nbytes > s.max_bytes)
        )

    def admit(
        self, lengths: list[int], deferred: bool, lent: bool = False, lends: bool = False
    ) -> str:
        """ "ok", "full" or "big", by the limits and as far as slots are concerned."""
        s = self.settings
        room = "ok" if lent else self.room(lengths, deferred)
        if room == "big":
            return room
        if self.limited and not deferred and not (lends and self.makes_room):
            if s.max_messages and len(lengths) > s.max_messages:
                return "big"
            if s.max_bytes and sum(lengths) > s.max_bytes:
                return "big"
            if self.exceeds(lengths) and not (self.makes_room and not self.ready):
                return "full"
        return room

    def surplus(self, lengths: list[int]) -> int:
        """How many of the oldest must go before these come."""
        kept, self.ready = self.ready, list(self.ready)
        while self.ready and self.exceeds(lengths):
            del self.ready[0]
        count = len(kept) - len(self.ready)
        self.ready = kept
        return count

    def make_room(self, count: int) -> None:
        for _ in range(count):
            self.cast_out(self.ready.pop(0), "overflow")

    # ---- failures and expiry ----

    def is_over(self, msg: Msg, now: int) -> bool:
        ends = [] if msg.expires is None else [msg.expires]
        waits = msg.id in self.deferred and not msg.attempts
        if self.settings.message_ttl and not waits and not (msg.was_due and ends):
            begin = msg.timestamp if msg.begin is None else msg.begin
            ends.append(begin + int(self.settings.message_ttl * SECOND))
        return bool(ends) and min(ends) <= now

    def cast_out(self, msg: Msg, reason: str) -> None:
        """A message that waited is dropped, or convicted."""
        expired = reason == "expired"
        self.counters["expired" if expired else "dropped_oldest"] += 1
        kept = self.settings.expired_to_dead if expired else self.settings.overflow_to_dead
        if kept and self.channel is not None:
            self.convict(msg, reason, AT_ONCE)
        else:
            self.drop(msg)

    def convict(self, msg: Msg, reason: str, due: int) -> None:
        msg.holder, msg.reason, msg.due = None, reason, due
        self.deferred[msg.id] = msg

    def count_failure(self, msg: Msg, most: int = MOST_FAILURES) -> None:
        msg.failures, msg.failed = min(msg.failures + 1, most), True

    def take_back(self, msg: Msg, after: int, due_of: DueOf, delay: float | None = None) -> None:
        """After a failure was counted. delay: ns, None: the queue's."""
        most = self.settings.max_attempts
        if most and msg.failures >= most:
            self.convict(msg, "attempts", AT_ONCE)
            return
        least = longest = delay or 0.0
        if delay is None and self.settings.retry_delay:
            first, last = self.settings.retry_delay
            usual = min(first * 2 ** min(max(msg.failures - 1, 0), 60), last) * SECOND
            least, longest = usual * 0.9 - 1, usual * 1.1 + 1000
        if longest:
            msg.holder, msg.due = None, due_of(self, msg, least, longest)
            self.deferred[msg.id] = msg
        else:
            self.put_back(msg, after)

    def fail(self, msg: Msg, due_of: DueOf, delay: float | None = None) -> None:
        self.count_failure(msg)
        msg.suspect = False
        self.take_back(msg, self.topic.seq + 1, due_of, delay)

    def holds_suspect(self, session: Session) -> bool:
        msg = session.noted
        return (
            msg is not None
            and msg.suspect
            and self.in_flight.get(msg.id) is msg
            and msg.holder is not None
            and msg.holder.session is session
        )

    def bars(self, session: Session) -> bool:
        """Whether the session may take nothing because of a suspect."""
        mates = [each for each in self.sessions if each.client is session.client]
        if any(self.holds_suspect(each) for each in mates):
            return True
        is_next = bool(self.back) and self.back[0].suspect
        return is_next and any(each.in_flight for each in mates)

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

    def room(self, lengths: list[int], deferred: bool, restored: bool = False) -> str:
        """ "ok", "full" or "big", as far as slots are concerned. restored: they come from disk."""
        limits, nbytes = self.topic.limits, sum(map(block, lengths))
        budget = limits["in_flight_slots"] if deferred or restored else self.topic.ready_budget
        most = budget // 2 if deferred and self.limited else budget
        if len(lengths) > most or nbytes > self.topic.bytes_budget:
            return "big"
        used = len(self.held()) if deferred or restored else self.used_ready
        taken = self.used_ready + len(self.held()) + self.loans
        if used + len(lengths) > budget or taken + len(lengths) > self.topic.slots_max:
            return "full"
        nbytes += self.in_use_bytes()
        if (deferred or restored) and used and nbytes > self.topic.bytes_budget:
            return "full"
        crowded = len(self.deferred) + len(lengths) > most or nbytes > self.topic.bytes_budget // 2
        if deferred and self.limited and self.deferred and crowded:  # half is for what is in flight
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

    def take(self, session: Session, n: int, now: int) -> list[Msg]:
        """Hand out up to n; the caller makes the deliveries."""
        taken: list[Msg] = []
        n = 0 if self.paused else min(n, session.max_in_flight - session.in_flight)
        if n > 0 and self.counts_failures and self.bars(session):
            n = 0
        while len(taken) < n:
            source = self.next_source()
            if source is None:
                break
            held = self.back if source == "back" else self.ready
            if self.is_over(held[0], now):
                self.cast_out(held.pop(0), "expired")
                continue
            if self.counts_failures and held[0].suspect:
                if taken:
                    break
                n, session.noted = 1, held[0]
            msg = held.pop(0)
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

    def _settle(self, msg: Msg) -> None:
        assert msg.holder
        msg.holder.session.requeued += 1
        self.counters["requeued"] += 1
        del self.in_flight[msg.id]

    def release(self, msg: Msg, delay: float, due_of: DueOf) -> None:
        """No failure. delay: ns."""
        self._settle(msg)
        if self.counts_failures:
            msg.suspect = False
        if delay:
            msg.holder, msg.due = None, due_of(self, msg, delay, delay)
            self.deferred[msg.id] = msg
        else:
            self.put_back(msg, self.topic.seq + 1)

    def requeue(self, msg: Msg, delay: float | None, due_of: DueOf) -> None:
        """A failure. delay: ns, None: the queue's."""
        if not self.counts_failures:
            self.release(msg, delay or 0, due_of)
            return
        self._settle(msg)
        self.fail(msg, due_of, delay)

    def reject(self, msg: Msg, due: int) -> None:
        self._settle(msg)
        self.count_failure(msg)
        msg.suspect = False
        self.convict(msg, "rejected", due)

    def give_back(self, sessions: list[Session], due_of: DueOf, died: bool = False) -> int:
        """Requeue the messages that closed or dead consumers held, in the order of delivery."""
        mine = [m for m in self.in_flight.values() if m.holder and m.holder.session in sessions]
        mine.sort(key=lambda msg: msg.order)
        died = died and self.counts_failures
        most = self.settings.max_attempts
        for msg in mine if died else ():
            self.count_failure(msg, most - (len(mine) > 1) if most else MOST_FAILURES)
            msg.suspect = msg.suspect or bool(most)
        for msg in mine:
            del self.in_flight[msg.id]
            if died:
                self.take_back(msg, 0, due_of)
            else:
                self.put_back(msg, 0)
        for session in sessions:
            session.open = False
            self.sessions.remove(session)
        self.counters["returned"] += len(mine)
        return len(mine)

    def timed_out(self, msg: Msg, due_of: DueOf) -> None:
        assert msg.holder
        msg.holder.session.timed_out += 1
        self.counters["timed_out"] += 1
        del self.in_flight[msg.id]
        if self.counts_failures:
            self.fail(msg, due_of)
        else:
            self.put_back(msg, self.topic.seq + 1)

    def came_due(self, msg: Msg) -> None:
        del self.deferred[msg.id]
        ttl = self.settings.message_ttl
        if not msg.attempts and not msg.was_due:
            if ttl:
                its = msg.due + int(ttl * SECOND)
                msg.expires = its if msg.expires is None else min(its, msg.expires)
            elif msg.expires is None:
                msg.begin = msg.due
            msg.was_due = True
        self.put_back(msg, 0 if msg.suspect else self.topic.seq + 1)

    def sweep(self, now: int) -> int:
        """Messages that wait and have expired go."""
        count = 0
        for held in (self.back, self.ready):
            for msg in [msg for msg in held if self.is_over(msg, now)]:
                held.remove(msg)
                self.cast_out(msg, "expired")
                count += 1
        for msg in list(self.deferred.values()):
            if not msg.reason and self.is_over(msg, now):
                del self.deferred[msg.id]
                self.cast_out(msg, "expired")
                count += 1
        return count

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

    def stage_oldest(self, n: int) -> int:
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
            if self.room(lengths, deferred=False, restored=True) == "ok":
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
            number = next(self.orders)
            if not msg.attempts and not msg.after:
                msg.order = number
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
        self,
        ids: list[int],
        bodies: list[bytes],
        timestamp: int,
        due: int,
        targets: list[Queue],
        expires: int | None = None,
    ) -> None:
        """One transaction."""
        for number, (id_, body) in enumerate(zip(ids, bodies, strict=True), 1):
            for queue in targets:
                msg = Msg(id_, body, timestamp, self.seq + number, expires=expires)
                queue.enter(msg, due)
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

    def carry(self, msg: Msg, target: Queue, timestamp: int | None = None) -> None:
        """A dead letter comes to this topic, or (with the time of that) back to it: nothing but the
        message."""
        self.seq += 1
        self.messages += 1
        self.bytes += len(msg.body)
        copy = Msg(msg.id, msg.body, timestamp or msg.timestamp, self.seq, msg.attempts)
        target.enter(copy, 0)

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
