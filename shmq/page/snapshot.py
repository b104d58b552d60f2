"""The rows of all queues and the totals of an instance, read once for all viewers.

A row is a list, because ten thousand of them travel; `COLUMNS` names its places. It is kept as the
JSON that travels, which takes less memory than a list and is encoded once. A tick has only the rows
that changed since the one before. With many queues a look at all of them takes several ticks, so
that it needs a small share of one core at most; those that are likely to have changed come first.
A queue in which nothing moves is not mapped: its header is read through a descriptor.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shmq import layout, peek, sources, stats
from shmq.door.shortage import shortage
from shmq.door.telling import without_host
from shmq.errors import Gone, LayoutMismatch, NotRunning
from shmq.layout import NONE, Array, EntryState, Ready
from shmq.page.sight import Place, Sight
from shmq.sources import ReadOnlySource
from shmq.views import QueueEntry, QueueView

#: Names of the places of a row. Counts of messages, but for the named ones; rates are messages a
#: second since the look before.
COLUMNS: Final = (
    "topic",
    "channel",  # null: the topic's backlog
    "ready",  # waiting in memory
    "disk",
    "in_flight",
    "deferred",
    "leased",
    "oldest",  # ms since the longest waiting message in memory was published; null: none waits
    "in",  # rate
    "out",  # rate of deliveries
    "finished",  # rate
    "requeued",  # rate, with those that timed out
    "dead",  # moved to the dead topic since the channel was created
    "consumers",
    "memory",  # bytes
    "paused",
)
_MEMORY: Final = COLUMNS.index("memory")
_ACTIVE: Final = slice(COLUMNS.index("ready"), COLUMNS.index("dead"))
_RATES: Final = ("enqueued", "delivered", "finished", "requeued", "timed_out")
_COUNTS: Final = (
    "in_flight_len",
    "deferred_len",
    "deferred_depth",
    "leased",
    "disk_depth",
    "spilling_count",
    "dead_lettered",
    "paused",
    "ready_head",
    "ready_tail",
    "requeue_head",
    "requeue_tail",
    "defer_head",
    "defer_tail",
    "slots_committed",
    "ring_mask",
    "sessions_committed",
    "arena_committed",
    "disk_read",
    "segment.ready",
)
#: Contents of a queue -> the fields of its header that tell of them.
_HOLDS: Final = {
    "leases": ("leased", "run.count"),
    "messages": ("ready_head", "ready_tail", "requeue_head", "requeue_tail"),
    "deliveries": ("in_flight_len",),
}
#: Share of one core that the looks at the queues may take.
_SHARE: Final = 0.02
_LEAST_BUDGET: Final = 0.005  # seconds of processor time in one tick
_FIRST_BUDGET: Final = 0.25  # the same while some queue was never looked at
_AT_ONCE: Final = 16  # rows between two looks at the processor's clock
_FIRST: Final = 0.75  # of the budget, for queues that are likely to have changed
_LATELY: Final = 10.0  # seconds for which a queue that has changed is one of them
#: Seconds between two looks in full at a queue without traffic. Ages change by themselves where
#: messages wait; elsewhere only consumers come and go.
_FULL_EVERY: Final = 1.5
_EMPTY_EVERY: Final = 20.0

_FARTHEST: Final = 1 << 62  # a place in a file, and in none of ours: the header may be damaged
_PIECE: Final = 256  # rows that are sent at once

_WORDS: Final = {4: "I", 8: "Q"}


class _Reader:
    """Reads some fields of a queue's header at once. A dot leads to a field of a structure."""

    def __init__(self, names: tuple[str, ...]) -> None:
        placed = sorted((*_place(name), number) for number, name in enumerate(names))
        text, at = "<", 0
        for offset, size, _ in placed:
            text += f"{offset - at}x{_WORDS[size]}"
            at = offset + size
        self._struct = struct.Struct(text)
        self.pack = struct.Struct("<" + "".join(_WORDS[size] for _, size, _ in placed))
        """Makes bytes of what `read` returns, and the other way round."""
        order = [number for _, _, number in placed]
        self._places = [order.index(number) for number in range(len(names))]

    def read(self, fd: int) -> tuple[int, ...]:
        """The fields, in an order of its own. Raises LayoutMismatch if they are not there."""
        found = os.pread(fd, self._struct.size, 0)
        if len(found) < self._struct.size:
            raise LayoutMismatch(f"a queue's header: only {len(found)} bytes are there")
        return self._struct.unpack(found)

    def sorted(self, found: tuple[int, ...]) -> list[int]:
        """The fields in the order of the names."""
        return [found[place] for place in self._places]


def _place(name: str) -> tuple[int, int]:
    """(offset, bytes) of a field of a queue's header."""
    kind, offset = layout.dtype("queue"), 0
    for word in name.split("."):
        assert kind.fields is not None
        kind, more = kind.fields[word][:2]
        offset += more
    return offset, kind.itemsize


def _mark(source: ReadOnlySource) -> bytes:
    """Bytes that are others whenever a topic or a queue comes, goes, or gets another role."""
    queues, topics = source.directory.queues, source.directory.topics
    columns = [queues[name] for name in ("state", "serial", "role", "flags")]
    return b"".join(column.tobytes() for column in (*columns, topics["state"]))


@dataclass(slots=True)
class _Seen:
    """A queue, and the last look at it. There are up to ten thousand of them."""

    topic: str
    entry: QueueEntry
    fd: int = -1
    words: bytes = b""
    """The fields of the header that were read."""
    when: float = 0.0
    """Monotonic seconds of the last look; `full`: of the last one in full."""
    full: float = 0.0
    row: bytes = b""
    """`"serial":[...]`, as it travels."""
    memory: int = 0
    is_active: bool = False
    """Whether a count or a rate of the row is not 0, so that it changes by itself."""
    tried: bool = False
    """Whether there was a look, even if its segment could not be read."""

    def descriptor(self, source: ReadOnlySource) -> int:
        """Of its segment. Raises as `ReadOnlySource.descriptor`."""
        if self.fd < 0:
            self.fd = source.descriptor(self.entry)
        return self.fd

    def rest(self, source: ReadOnlySource) -> None:
        """After a look: keep what saves work at the next one, unless descriptors are few."""
        if self.fd >= 0 and not sources.may_keep(self.fd):
            self.close()
            source.forget(self.entry)

    def close(self) -> None:
        """Close that."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class Tick:
    """The findings of one look. rows: those that changed, as they travel. went: the queues
    that went, by serial number."""

    facts: dict[str, Any]
    rows: list[bytes] = field(default_factory=list)
    went: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    """The place of each row."""
    left: list[Place] = field(default_factory=list)
    """The place of each queue that went."""

    def encoded(self) -> bytes:
        """The JSON of an object. Serial numbers are text, there and as the keys of `rows`."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The same in pieces, because all rows are a megabyte or more."""
        went = [str(serial) for serial in self.went]
        facts = json.dumps(self.facts | {"went": went}, separators=(",", ":")).encode()
        yield facts[:-1] + b',"rows":{'
        for begin in range(0, len(self.rows), _PIECE):
            yield b"," * (begin > 0) + b",".join(self.rows[begin : begin + _PIECE])
        yield b"}}"


class Snapshots:
    """Looks at one instance. Not for several threads at once."""

    def __init__(self, instance: str, owner: str | int | None = None) -> None:
        """owner: as of `shmq.attach`. Raises ValueError for a name that cannot be one."""
        self.instance = instance
        self._owner = owner
        self._source: ReadOnlySource | None = None
        self._queues: dict[int, _Seen] = {}
        self._order: list[int] = []
        self._next = 0
        self._topics: NDArray[np.int64] = np.zeros(0, np.int64)  # of the queues in `_order`
        self._published: NDArray[np.uint64] = np.zeros(0, np.uint64)  # by topic, at the last tick
        self._moved: dict[int, float] = {}  # serial -> monotonic seconds of the last change
        self._turn = 0
        self._changed: dict[int, None] = {}  # serials of rows that the next tick has
        self._went: list[int] = []
        self._left: list[Place] = []  # where they were
        self._reader = _Reader(_RATES + _COUNTS)
        self._last = 0.0
        self._mark = b""
        self._unseen = self._memory = 0

    @property
    def source(self) -> ReadOnlySource:
        """The instance's segments. Raises NotRunning if there is none, and what opening it
        raises."""
        if self._source is None or self._source.directory.closed:
            self.close()
            self._source = sources.open_readonly(self.instance, self._owner)
        return self._source

    def close(self) -> None:
        """Forget the segments."""
        for seen in self._queues.values():
            seen.close()
        self._queues.clear()
        self._order.clear()
        self._moved.clear()
        self._changed.clear()
        self._went.clear()
        self._left.clear()
        self._published = self._published[:0]
        self._mark = b""
        if self._source is not None:
            self._source.close()
            self._source = None

    # ---- one tick ----

    def tick(self) -> Tick:
        """Look again: the totals, and what changed since the last tick."""
        facts = self._facts()
        seen = [self._queues[serial] for serial in self._changed if serial in self._queues]
        went, self._went = self._went, []
        left, self._left = self._left, []
        self._changed.clear()
        return Tick(facts, [each.row for each in seen], went, _places(seen), left)

    def state(self, others: bool) -> Tick:
        """Look again, with all rows as the last looks found them, for a viewer that comes. others:
        whether there are more, who get with the next tick what has changed."""
        facts = self._facts() | {"columns": COLUMNS}
        if not others:
            self._changed.clear()
            self._went.clear()
            self._left.clear()
        seen = [each for each in self._queues.values() if each.row]
        return Tick(facts, [each.row for each in seen], [], _places(seen))

    def seen_by(self, sight: Sight, tick: Tick) -> Tick:
        """The part of a tick that one viewer may see."""
        if sight.whole:
            return tick
        facts = dict(tick.facts)
        if "gone" not in facts:
            seen = [
                each for each in self._queues.values() if sight.sees(each.topic, each.entry.channel)
            ]
            facts |= {
                "topics": len({each.topic for each in seen}),
                "queues": len(seen),
                "memory": sum(each.memory for each in seen),
                "trouble": ["see the log of the broker"] if facts["trouble"] else [],
                "data_path": "",
            }
        chosen = [sight.sees(*place) for place in tick.places]
        went = [sight.sees(*place) for place in tick.left]
        return Tick(
            facts,
            list(itertools.compress(tick.rows, chosen)),
            list(itertools.compress(tick.went, went)),
            list(itertools.compress(tick.places, chosen)),
            list(itertools.compress(tick.left, went)),
        )

    def _facts(self) -> dict[str, Any]:
        """Look again, and return the totals."""
        try:
            source = self.source
            self._refresh(source)
        except (NotRunning, LayoutMismatch, Gone, OSError) as exc:
            self.close()
            return {"time": time.time(), "gone": without_host(str(exc))}
        self._look(source)
        return {"time": time.time(), **self._totals(source)}

    def _refresh(self, source: ReadOnlySource) -> None:
        """Follow the directory."""
        mark = _mark(source)
        if mark == self._mark:
            return
        self._mark = mark
        names = {entry.index: entry.name for entry in source.directory.live_topics()}
        live = {entry.serial: entry for entry in source.directory.live_queues()}
        for serial, entry in live.items():
            seen = self._queues.get(serial)
            if seen is None and entry.topic in names:
                self._queues[serial] = _Seen(names[entry.topic], entry)
            elif seen is not None and seen.entry != entry:  # a backlog that became a channel
                seen.entry, seen.full = entry, 0.0
        went = [serial for serial in self._queues if serial not in live]
        self._went += went
        for serial in went:
            seen = self._queues.pop(serial)
            self._left.append((seen.topic, seen.entry.channel))
            seen.close()
            source.forget(seen.entry)
        self._order = list(self._queues)
        topics = (seen.entry.topic for seen in self._queues.values())
        self._topics = np.fromiter(topics, np.int64, len(self._order))
        self._unseen = sum(not seen.tried for seen in self._queues.values())
        self._memory = sum(seen.memory for seen in self._queues.values())

    def _look(self, source: ReadOnlySource) -> None:
        """Look at queues until the budget is spent."""
        now = time.monotonic()
        since, self._last = min(now - self._last, 5.0), now
        budget = _FIRST_BUDGET if self._unseen > 0 else max(since * _SHARE, _LEAST_BUDGET)
        began = time.thread_time()
        looked: set[int] = set()
        for number, serial in enumerate(self._likely(source, now), 1):
            self._look_at(source, serial)
            looked.add(serial)
            if number % _AT_ONCE == 0 and time.thread_time() > began + _FIRST * budget:
                break
        self._turn += len(looked)
        for number in range(1, len(self._order) + 1):
            self._next = (self._next + 1) % len(self._order)
            serial = self._order[self._next]
            if serial not in looked:
                self._look_at(source, serial)
            if number % _AT_ONCE == 0 and time.thread_time() > began + budget:
                break

    def _likely(self, source: ReadOnlySource, now: float) -> list[int]:
        """The queues that are likely to have changed: their topic was published to, or they changed
        lately. If they are too many for a tick, each comes in its turn."""
        published = source.directory.topics["messages"].copy()
        before, self._published = self._published, published
        common = min(len(before), len(published))
        fresh = np.zeros(len(published) + 1, np.bool_)
        fresh[:common] = published[:common] != before[:common]
        found = np.flatnonzero(fresh[np.minimum(self._topics, len(published))]).tolist()
        lately = {serial: when for serial, when in self._moved.items() if now - when < _LATELY}
        self._moved = {serial: when for serial, when in lately.items() if serial in self._queues}
        serials = list(dict.fromkeys((*self._moved, *(self._order[place] for place in found))))
        turn = self._turn % len(serials) if serials else 0
        return serials[turn:] + serials[:turn]

    def _look_at(self, source: ReadOnlySource, serial: int) -> None:
        """Look at a queue; note it if its row changed."""
        seen = self._queues[serial]
        self._unseen -= not seen.tried
        seen.tried = True
        try:
            if self._has_changed(source, serial, seen):
                self._changed[serial] = None
        except (Gone, LayoutMismatch, OSError) as exc:
            if shortage(exc):
                raise
        finally:
            seen.rest(source)

    def _has_changed(self, source: ReadOnlySource, serial: int, seen: _Seen) -> bool:
        """Look at a queue. Returns whether its row changed. Raises Gone if it was deleted."""
        reader, now = self._reader, time.monotonic()
        found = reader.read(seen.descriptor(source))
        words = reader.pack.pack(*found)
        every = _FULL_EVERY if seen.is_active else _EMPTY_EVERY
        when, seen.when = seen.when, now
        if words == seen.words and now - seen.full < every:
            return False
        if words != seen.words and seen.words:
            self._moved[serial] = now
        before = reader.pack.unpack(seen.words) if seen.words else found
        new, old = reader.sorted(found), reader.sorted(before)
        elapsed = max(now - when, 1e-3)
        rates = [max(new[place] - old[place], 0) / elapsed for place in range(len(_RATES))]
        named = dict(zip(_COUNTS, new[len(_RATES) :], strict=True))
        if named["segment.ready"] != Ready.READY:
            seen.close()
            raise Gone(f"queue {serial} of instance {self.instance!r} was deleted")
        values = _values(source, seen, rates, named)
        seen.words, seen.full = words, now
        seen.is_active = any(values[_ACTIVE])
        if not seen.is_active:
            source.forget(seen.entry)
        text = json.dumps(values, separators=(",", ":"))
        row = f'"{serial}":{text}'.encode()
        if row == seen.row:
            return False
        self._memory += values[_MEMORY] - seen.memory
        seen.row, seen.memory = row, values[_MEMORY]
        return True

    # ---- lists ----

    def holding(self, what: str) -> Iterator[tuple[str, QueueEntry, QueueView]]:
        """(topic, entry, view) of each queue that has "leases", "messages" that wait in memory, or
        "deliveries" in flight, as the headers say now. The others are not mapped. Raises as
        `source`."""
        source = self.source
        self._refresh(source)
        reader = _Reader(_HOLDS[what])
        for seen in list(self._queues.values()):
            try:
                words = reader.sorted(reader.read(seen.descriptor(source)))
                if words[::2] != words[1::2] if what == "messages" else any(words):
                    yield seen.topic, seen.entry, source.queue(seen.entry)
                    if not seen.is_active:
                        source.forget(seen.entry)
            except (Gone, LayoutMismatch, OSError) as exc:
                if shortage(exc):
                    raise
            finally:
                seen.rest(source)

    # ---- the instance ----

    def _totals(self, source: ReadOnlySource) -> dict[str, Any]:
        """The facts of the instance as a whole."""
        health = stats.read_broker(source)
        return {
            "instance": source.instance,
            "health": health.health,
            "trouble": health.trouble,
            "supervisor": {
                "pid": health.supervisor_pid,
                "alive": health.supervisor_alive,
                "heartbeat": round(health.heartbeat_age, 3),
                "since": health.start_time // 10**9,
                "epoch": health.epoch,
            },
            "reaped": health.reaped,
            "rebuilt": health.rebuilt,
            "processes": len(health.clients),
            "topics": int(np.count_nonzero(source.directory.topics["state"] == EntryState.LIVE)),
            "queues": len(self._queues),
            "data_path": health.data_path,
            "disk_free": health.data_path_free,
            "shm": [health.shm_total - health.shm_free, health.shm_total],
            "memory": self._memory,
        }


def _places(seen: Iterable[_Seen]) -> list[Place]:
    return [(each.topic, each.entry.channel) for each in seen]


def _values(
    source: ReadOnlySource,
    seen: _Seen,
    rates: list[float],
    counts: dict[str, int],
) -> list[Any]:
    """A row, in the order of COLUMNS. rates: a second, in the order of _RATES."""
    kind = layout.dtype("queue")
    header: Array = np.frombuffer(os.pread(seen.fd, kind.itemsize, 0), kind)[0]
    run = peek.run_length(header)
    waiting = _length(counts, "ready") + _length(counts, "requeue")
    oldest = stats.oldest_age(source.queue(seen.entry)) if waiting else None
    return [
        seen.topic,
        seen.entry.channel,
        waiting + counts["spilling_count"],
        max(counts["disk_depth"] - run, 0),
        counts["in_flight_len"],
        counts["deferred_len"] + counts["deferred_depth"] + _length(counts, "defer"),
        counts["leased"] + run,
        None if oldest is None else int(oldest * 1000),
        *(round(rate, 1) for rate in rates[:3]),
        round(rates[3] + rates[4], 1),
        counts["dead_lettered"],
        _consumers(seen.fd, header),
        stats.committed_bytes(header),
        bool(counts["paused"]),
    ]


def _consumers(fd: int, header: Array) -> int:
    """The sessions of a queue that are open."""
    kind, at = layout.dtype("session"), int(header["sessions_at"])
    count = min(int(header["sessions_committed"]), layout.constant("SESSIONS"))
    found = os.pread(fd, count * kind.itemsize, min(at, _FARTHEST))
    sessions = np.frombuffer(found[: len(found) // kind.itemsize * kind.itemsize], kind)
    return int(np.count_nonzero(sessions["client"]))


def _length(counts: dict[str, int], ring: str) -> int:
    """The entries of a ring; 0 if it was changing."""
    length = (counts[f"{ring}_tail"] - counts[f"{ring}_head"]) & NONE
    return length if length <= counts["ring_mask"] + 1 else 0
