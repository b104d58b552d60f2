"""Records the history: every second the totals and the busiest channels, every minute again.

Its cost hardly grows with the number of queues: in a second it looks at as many as fit a share of
a core. It looks first at those whose topic was published to and those that moved lately, then at
the others in turn. A queue's counters are never lowered, so what it counted while nobody looked is
in a later record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shmq import chronicle, layout, peek, shm
from shmq.chronicle import COUNTERS, GAUGES, Chronicle
from shmq.errors import ShmqError
from shmq.layout import Array
from shmq.options import Options
from shmq.supervisor.loops import Bell
from shmq.supervisor.registry import Queue, Registry, hot_array

_SCAN = 1.1e-3  # seconds of CPU for the headers of queues, in each second
_LOOK = 0.3e-3  # ... and for the consumers and the oldest messages of single queues
_CHUNK = 256  # queues between two looks at the clock
_LATELY = 10.0  # seconds after which a queue that does not move is looked at in turn
_SECOND_DECAY, _MINUTE_DECAY = 0.95, 0.9  # factors on a queue's score at each record
_STAYS = 1.25  # factor on the score of a channel that was in the record before
_REQUEUED = 64  # slots of the requeue ring in which the oldest message is looked for
_SAY_EVERY = 3600.0  # seconds between two warnings that a record cannot be written

_MOVES = [COUNTERS.index(name) for name in ("published", "delivered", "finished")]
_READY, _LEASED, _ON_DISK, _OLDEST, _CONSUMERS = (
    GAUGES.index(name) for name in ("ready", "leased", "on_disk", "oldest", "consumers")
)
_DROPPED = COUNTERS.index("dropped")
_RARE = [(COUNTERS.index(name), name) for name in ("expired", "dead_lettered")]
_MOST = (1 << 62) - 1  # an overwritten counter must not overflow
_NO_HOT = hot_array(1).view(np.uint8)

_log = logging.getLogger(__name__)


def open_chronicle(options: Options) -> Chronicle | None:
    """The instance's chronicle, for its supervisor; None if the options want none, or it cannot be
    made, which is logged."""
    name = shm.history_name(options.instance)
    try:
        if options.history_bytes:
            mode, group = options.permissions()
            return chronicle.open_or_make(options.instance, options.history_bytes, mode, group)
        shm.unlink_segment(name)
    except (OSError, ShmqError) as exc:
        _log.warning("no history and no log of deaths is kept: %s", exc)
    return None


class Historian:
    """The loop that records the history."""

    def __init__(self, registry: Registry, source: Chronicle) -> None:
        self._registry = registry
        self._chronicle = source
        self._names = _Names(source)
        self._queues = _Table(registry)
        self._said = -_SAY_EVERY

    def run(self, bell: Bell) -> None:
        """Record until the bell is stopped."""
        table, plan = self._queues, self._chronicle.plan
        seconds = _Recorder("seconds", 10**9, plan.second_rows, _SECOND_DECAY)
        minutes = _Recorder("minutes", 60 * 10**9, plan.minute_rows, _MINUTE_DECAY)
        table.update(_CHUNK * 1e3, seconds.rows)  # the counts to begin with
        recorders = (seconds, minutes)
        for recorder in recorders:
            recorder.begin(table)
            recorder.add(table)
        while not bell.check():
            bell.wait(1 - time.time() % 1 + 0.001)
            if bell.check() or not seconds.is_over():
                continue
            table.update(_SCAN, seconds.rows)
            for recorder in recorders:
                recorder.add(table)
                if recorder.is_over():
                    self._write(recorder)

    def _write(self, recorder: _Recorder) -> None:
        try:
            place, record = recorder.finish(self._queues, self._chronicle)
            for row in recorder.rows.tolist():
                self._names.enter(self._queues.queue(row))
            self._chronicle.write(recorder.region, place, record)
        except OSError as exc:
            if time.monotonic() - self._said > _SAY_EVERY:
                self._said = time.monotonic()
                _log.warning("cannot write the history: %s", exc)


class _Table:
    """The last known counters and gauges of every queue; row i belongs to queue i of the
    directory."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._changes = -1
        self._queues: list[Queue | None] = []
        self._hot: list[Array] = []  # of each queue, in a list: a queue's object is in no cache
        size = 64
        self.live = np.zeros(0, np.int64)  # the rows of queues
        self.totals = np.zeros(len(GAUGES), np.int64)  # of the gauges
        self.serial = np.zeros(size, np.int64)
        self.counters = np.zeros((size, len(COUNTERS)), np.int64)
        self.gauges = np.zeros((size, len(GAUGES)), np.int64)
        self.oldest_at = np.zeros(size, np.int64)  # CLOCK_REALTIME ns; 0: none waits
        self.rows = np.zeros(0, np.int64)  # those whose counters the last update found changed
        self.moved = np.zeros((0, len(COUNTERS)), np.int64)  # by how much, row by row
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._moved_at = np.full(size, -_LATELY)
        self._topic = np.zeros(size, np.int64)
        self._published = np.zeros(0, np.uint64)  # messages of each topic, at the last update
        self._turn = self._look_turn = 0
        # Of fresh memory, epoch 1, everything is new that was counted before the first look.
        self._skips_counts = int(registry.directory.header["epoch"]) > 1

    def queue(self, row: int) -> Queue | None:
        """The queue of a row."""
        return self._queues[row] if row < len(self._queues) else None

    def oldest(self, rows: NDArray[np.int64], now: int) -> NDArray[np.int64]:
        """The gauge `oldest` of some rows at `now` (CLOCK_REALTIME ns)."""
        since = self.oldest_at[rows]
        age = np.maximum((now - since) // 10**6 + 1, 1)
        found: NDArray[np.int64] = np.where(since > 0, age, 0)
        return found

    def update(self, seconds: float, chosen: NDArray[np.int64]) -> None:
        """Look at as many queues as fit so much CPU time; `chosen`: rows that are looked at more
        closely."""
        self._enter()
        self._parts.clear()
        now = time.monotonic()
        until = time.thread_time() + seconds
        order = self._order(now)
        done = 0
        for begin in range(0, len(order), _CHUNK):
            rows = order[begin : begin + _CHUNK]
            self._read(rows, now)
            done += len(rows)
            if time.thread_time() > until:
                break
        self._turn += done
        if self._parts:
            self.rows, self.moved = map(np.concatenate, zip(*self._parts, strict=True))
        else:
            self.rows, self.moved = self.rows[:0], self.moved[:0]
        self._look(chosen, time.thread_time() + _LOOK)
        self._skips_counts = False

    def _enter(self) -> None:
        """Take up queues that were made, and forget those that are gone."""
        registry = self._registry
        changes = registry.changes
        if changes == self._changes:
            return
        self._changes = changes
        queues = registry.queues
        size = max((queue.index for queue in queues), default=-1) + 1
        if size > len(self.serial):
            self._grow(max(size, len(self.serial) * 5 // 4))
        self._queues = [None] * len(self.serial)
        self._hot = [_NO_HOT] * len(self.serial)
        before, now = self.serial, np.zeros_like(self.serial)
        for queue in queues:
            index = queue.index
            now[index], self._topic[index] = queue.serial, queue.topic.index
            self._queues[index], self._hot[index] = queue, queue.hot
        other = before != now
        self.totals -= self.gauges[other].sum(axis=0)
        for column in (self.counters, self.gauges, self.oldest_at):
            column[other] = 0
        self._moved_at[other] = time.monotonic()  # a new queue is looked at soon
        self.serial = now
        self.live = np.flatnonzero(now)

    def _grow(self, size: int) -> None:
        more = size - len(self.serial)
        for name in ("serial", "counters", "gauges", "oldest_at", "_topic", "_moved_at"):
            column = getattr(self, name)
            width = [(0, more)] + [(0, 0)] * (column.ndim - 1)
            setattr(self, name, np.pad(column, width))

    def _order(self, now: float) -> NDArray[np.int64]:
        """The rows to look at: first those that are likely to have moved."""
        topics = self._registry.directory.topics
        published = topics["messages"].copy()
        before, self._published = self._published, published
        active = now - self._moved_at < _LATELY
        common = min(len(before), len(published))
        fresh = np.ones(max(len(published), 1), np.bool_)
        fresh[:common] = published[:common] != before[:common]
        active |= fresh[np.minimum(self._topic, len(fresh) - 1)]
        live = self.serial != 0
        first, rest = np.flatnonzero(live & active), np.flatnonzero(live & ~active)
        return np.concatenate((_turned(first, self._turn), _turned(rest, self._turn)))

    def _read(self, rows: NDArray[np.int64], now: float) -> None:
        """Read the headers of some queues."""
        pieces = self._hot
        hot = hot_array(len(rows))
        np.concatenate([pieces[row] for row in rows.tolist()], out=hot.view(np.uint8))
        before = self.gauges[rows]
        counters, gauges = _counters(hot, self.counters[rows]), _gauges(hot, before)
        changed = (counters != self.counters[rows]).any(axis=1)
        for place in np.flatnonzero(
            changed | (hot["policy"] != 0) | (hot["dropped"] != 0)
        ).tolist():
            self._read_rare(int(rows[place]), counters[place])
        for place in np.flatnonzero(hot["leases_committed"]).tolist():
            self._read_run(int(rows[place]), gauges[place])
        moved = np.maximum(counters - self.counters[rows], 0)
        if self._skips_counts:
            moved[:] = 0
        has_counted = moved.any(axis=1)
        if has_counted.any():
            self._parts.append((rows[has_counted], moved[has_counted]))
        has_moved = has_counted | (gauges != before).any(axis=1)
        self._moved_at[rows[has_moved]] = now
        self.totals += (gauges - before).sum(axis=0)
        self.counters[rows], self.gauges[rows] = counters, gauges

    def _read_rare(self, row: int, counters: NDArray[np.int64]) -> None:
        """Read the counters that are not in the hot lines."""
        queue = self._queues[row]
        if queue is not None:
            header = queue.view.header
            for place, name in _RARE:
                counters[place] = int(header[name]) & _MOST
            counters[_DROPPED] = int(header["dropped"] + header["dropped_oldest"]) & _MOST

    def _read_run(self, row: int, gauges: NDArray[np.int64]) -> None:
        """Take the messages that are leased on disk from those that wait there."""
        queue = self._queues[row]
        run = 0 if queue is None else peek.run_length(queue.view.header)
        gauges[_LEASED] += run
        gauges[_ON_DISK] = max(int(gauges[_ON_DISK]) - run, 0)

    def _look(self, chosen: NDArray[np.int64], until: float) -> None:
        """Look for the consumers and the oldest message of single queues: those chosen, those that
        moved, and the others in turn."""
        turn = self._look_turn
        for part in (chosen, _turned(self.rows, turn), _turned(self.live, turn)):
            for row in part.tolist():
                queue = self.queue(row)
                if queue is None:
                    continue
                consumers = int(np.count_nonzero(queue.view.sessions["client"]))
                self.totals[_CONSUMERS] += consumers - self.gauges[row, _CONSUMERS]
                self.gauges[row, _CONSUMERS] = consumers
                self.oldest_at[row] = peek.oldest_at(queue.view, _REQUEUED) or 0
                self._look_turn += 1
                if time.thread_time() > until:
                    break
        self.oldest_at[self.gauges[:, _READY] == 0] = 0


class _Recorder:
    """Adds up one kind of record."""

    def __init__(self, region: str, length: int, room: int, decay: float) -> None:
        """length: ns of a record's time. room: channels in a record."""
        self.region = region
        self.rows: NDArray[np.int64] = np.zeros(0, np.int64)  # the channels of the last record
        self._length, self._room, self._decay = length, room, decay
        self._sums = np.zeros((0, len(COUNTERS)), np.int64)
        self._counted = np.zeros(0, np.bool_)  # the rows of `_sums` that may not be zeros
        self._serial = np.zeros(0, np.int64)
        self._score = np.zeros(0)
        self._total = np.zeros(len(COUNTERS), np.int64)  # also of queues that are gone
        self._chosen_of: NDArray[np.int64] | None = None
        self._period = 0
        self._began = 0.0

    def begin(self, table: _Table) -> None:
        """Begin the next record."""
        self._period = time.time_ns() // self._length
        self._began = time.monotonic()
        if len(self._sums) == len(table.counters):
            self._sums[self._counted] = 0
        else:
            self._sums = np.zeros_like(table.counters)
        self._counted[:] = False
        self._total[:] = 0

    def is_over(self) -> bool:
        """True if the record's time is over, or the clock was set back."""
        return time.time_ns() // self._length != self._period

    def add(self, table: _Table) -> None:
        """Add what the queues have counted since the last call."""
        if len(self._serial) < len(table.serial):
            more = len(table.serial) - len(self._serial)
            self._serial = np.pad(self._serial, (0, more))
            self._score = np.pad(self._score, (0, more))
            self._counted = np.pad(self._counted, (0, more))
            self._sums = np.pad(self._sums, ((0, len(table.serial) - len(self._sums)), (0, 0)))
        if self._serial is not table.serial:
            other = self._serial != table.serial
            self._sums[other], self._score[other] = 0, 0
            self._serial = table.serial
        self._sums[table.rows] += table.moved
        self._counted[table.rows] = True
        self._total += table.moved.sum(axis=0)

    def finish(self, table: _Table, source: Chronicle) -> tuple[int, Array]:
        """(place, record) of the time that is over now; and begin the next one."""
        self._choose(table)
        record = source.blank(self.region)
        live = table.live
        totals = np.concatenate((self._total, table.totals))
        # one instant for all: the total is at least as old as the oldest channel
        now = time.time_ns()
        waiting = table.oldest_at[table.oldest_at > 0]
        if len(waiting):
            age = max(now - int(waiting.min()), 0) // 10**6 + 1
            totals[len(COUNTERS) + _OLDEST] = age
        record["totals"] = np.clip(totals, 0, 0xFFFFFFFF)
        record["span"], record["queues"] = time.monotonic() - self._began, len(live)
        rows = self.rows
        numbers = np.concatenate((self._sums[rows], table.gauges[rows]), axis=1)
        numbers[:, len(COUNTERS) + _OLDEST] = table.oldest(rows, now)
        record["serials"][0, : len(rows)] = table.serial[rows] & 0xFFFFFFFF
        record["rows"][0, : len(rows)] = chronicle.shorten(numbers)
        # the time that is over ends when the next one begins, unless the clock was set
        end = now // self._length * self._length
        is_next = now // self._length == self._period + 1
        when = end - 1 if is_next else now
        record["time"] = when
        self.begin(table)
        return when // self._length, record

    def _choose(self, table: _Table) -> None:
        """Choose the channels of this record: those with the highest score."""
        counted = np.flatnonzero(self._counted)
        if not len(counted) and self._chosen_of is table.serial:
            return  # the order has not changed
        self._chosen_of = table.serial
        self._score *= self._decay
        self._score[counted] += self._sums[counted][:, _MOVES].sum(axis=1)
        waits = (table.gauges[:, _READY] > 0) | (table.gauges[:, _ON_DISK] > 0)
        wanted = self._score + 1e-3 * waits + 1e-6
        wanted[self.rows] *= _STAYS
        live = table.live
        if len(live) > self._room:
            parted = np.argpartition(-wanted[live], max(self._room - 1, 0))
            live = np.sort(live[parted[: self._room]])
        self.rows = live


class _Names:
    """The table of names in the chronicle."""

    def __init__(self, source: Chronicle) -> None:
        self._chronicle = source
        self._places: dict[int, tuple[chronicle.Key, int]] = chronicle.read_names(source)
        used = {place for _, place in self._places.values()}
        self._free = [place for place in range(source.plan.names) if place not in used]

    def enter(self, queue: Queue | None) -> None:
        """Note the names of a queue, if they are not noted. Raises OSError."""
        if queue is None:
            return
        serial, key = queue.serial & 0xFFFFFFFF, (queue.topic.name, queue.channel)
        known, place = self._places.pop(serial, (None, -1))
        if place < 0:  # the table is in the order of use
            place = self._free.pop() if self._free else self._oldest()
        if known != key:
            record = self._chronicle.blank("names")
            record["serial"], record["is_channel"] = queue.serial, queue.channel is not None
            record["topic"], record["channel"] = key[0].encode(), (key[1] or "").encode()
            self._chronicle.write("names", place, record)
        self._places[serial] = key, place

    def _oldest(self) -> int:
        return self._places.pop(next(iter(self._places)))[1]


def _turned(rows: NDArray[np.int64], by: int) -> NDArray[np.int64]:
    return np.roll(rows, -(by % len(rows))) if len(rows) else rows


def _ring(hot: Array, name: str) -> NDArray[np.int64]:
    length: NDArray[np.int64] = (hot[f"{name}_tail"] - hot[f"{name}_head"]).astype(np.int64)
    return np.where(length > hot["ring_mask"].astype(np.int64) + 1, 0, length)


def _counters(hot: Array, before: NDArray[np.int64]) -> NDArray[np.int64]:
    """The counters of some queues, in the order of COUNTERS; the rare ones stay as they were."""
    found = before.copy()
    for place, name in enumerate(
        ("enqueued", "delivered", "finished", "requeued", "timed_out", "returned")
    ):
        found[:, place] = hot[name] & np.uint64(_MOST)
    return found


def _gauges(hot: Array, before: NDArray[np.int64]) -> NDArray[np.int64]:
    """The gauges of some queues, in the order of GAUGES; those that are not in the hot lines stay
    as they were."""
    slots, rings = hot["slots_committed"].astype(np.int64), hot["ring_mask"].astype(np.int64) + 1
    fixed = layout.dtype("queue").itemsize + layout.dtype("latency").itemsize
    memory = fixed + slots * layout.dtype("slot").itemsize + rings * (4 * 4 + 2 * 12)
    memory += hot["sessions_committed"].astype(np.int64) * layout.dtype("session").itemsize
    memory += hot["arena_committed"].astype(np.int64)
    columns: Sequence[Array] = (
        _ring(hot, "ready") + _ring(hot, "requeue") + hot["spilling_count"],
        hot["in_flight_len"],
        hot["deferred_len"] + _ring(hot, "defer") + hot["deferred_depth"].astype(np.int64),
        hot["leased"],
        hot["disk_depth"],
        before[:, _OLDEST],
        memory >> 10,
        before[:, _CONSUMERS],
    )
    found = np.stack([column.astype(np.int64) for column in columns], axis=1)
    return np.maximum(found, 0)
