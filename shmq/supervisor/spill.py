"""Moves messages between memory and disk: overflow out, refill in, backlogs to their channels.

One loop, so no lock is on disk. Each round looks at the headers of the queues it watches at once
(numpy) and then gives every one that needs something a bounded bite, so that none starves another.

Watched is what somebody asks attention for: a publisher at the high-water mark or without room, a
consumer at the low-water mark, who empties, unpauses or returns what a dead client held; and from
then on as long as it needs something. Of the others a few are looked at every second, in case that
a ring was lost. So thousands of idle queues cost nothing.

* out: a queue whose ready ring is 3/4 full, or whose publisher waits for room, until it is half
  empty. At the first overflow its oldest quarter goes to the requeue ring unread, so consumers go
  on from memory. A queue that is being emptied fast anyway is left alone: one message on disk
  sends all that follow through the disk too.
* in: a queue with something on disk and little left in its requeue ring, ahead of need. What was
  read goes back, by the read position alone, when a publisher needs its room and nobody takes it.
* what came back (timed out, due, requeued) and nobody takes: the youngest, when it leaves a
  publisher of deferred messages no room; and if that is not enough what comes before the disk,
  back in front of what is there.
* deferred messages: beyond half of what may be held, and back in time (`deferral`).
* backlogs: of unpaused topics that have channels.

The disk refuses (full, I/O error): the batch goes back to where it was, `health` says so, and it is
tried again every second. Nothing is lost; publishers wait or get Full. Reading and what removes
files that were read go on meanwhile: they are what makes room on a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shmq import _native, layout
from shmq._native import Broker, Busy, Gone, LeaseLost, Spill
from shmq.options import Options
from shmq.storage.diskqueue import DamagedFile, pack, unpack
from shmq.supervisor import damage
from shmq.supervisor.arbiter import Bell
from shmq.supervisor.deferral import LEAD, Deferral, lacking
from shmq.supervisor.memory import Thrift, scarce
from shmq.supervisor.roster import Look, Queue, Roster
from shmq.supervisor.trouble import DiskTrouble, probe

_BATCH_BYTES = 4 << 20  # of records written or read at once
_LEAST_BYTES = 16 << 10  # ... when the disk is nearly full
_BATCH_MESSAGES = 32768
_BITES = 4  # batches a queue may write in one round
_PUMP_MESSAGES = 2048
_OPEN_MOST = 256  # queues whose files stay open

_RETRY_AFTER = 1.0  # seconds after a disk error
_TICK = 1.0  # seconds between rounds when nobody rings
_TICK_WATCHING = 0.005  # ... while a queue needs something; doubles as long as nothing can be done
_TICK_WAITING = 0.100  # ... up to this; also while something is to be synced
_TICK_DRAINING = 0.0005  # ... while consumers empty what is on disk
_DRAINING = 0.050  # seconds since the last refill in which it is believed that they do
_OTHERS = 32  # queues that did not ask are looked at every second, in turn
_FAST_WINDOW = 0.010  # seconds in which a fast consumer takes
_PATIENCE = 0.020  # seconds in which a waiting publisher sees that there is room
_FAST_SHARE = 8  # ... this part (1/8) of the queue's capacity

_NEVER = np.iinfo(np.int64).max

_Work = Callable[[Queue], bool]

_log = logging.getLogger(__name__)


class Spiller:
    """One loop. `health` is nsqd's: `OK`, or `NOK - ` and the disk's last error."""

    def __init__(
        self, broker: Broker, roster: Roster, options: Options, trouble: DiskTrouble
    ) -> None:
        """trouble: where everybody is told what the disk refuses."""
        self._thrift = Thrift(broker)
        self._changes = -1  # of the roster, when what is gone was last let go of
        self._broker = broker
        self._roster = roster
        self._options = options
        self._trouble = trouble
        self._deferral = Deferral(broker, roster)
        self._active: set[Queue] = set()  # with disk operations that are not synced yet
        self._open: dict[Queue, None] = {}  # whose files may be open, last used last
        self._pressed: set[Queue] = set()  # channels that a backlog waits for
        self._watched: dict[Queue, None] = {}
        self._due = np.full(layout.constant("QUEUES"), _NEVER)  # by index: of what is on disk
        self._others: Iterator[Queue] = iter(())
        self._others_at = 0.0
        self._pause = _TICK_WATCHING
        self.health = "OK"
        self.bad_files = 0

    def run(self, bell: Bell) -> None:
        """The loop."""
        while not bell.stopped:
            bell.wait(self._round(time.monotonic()))

    # -- choosing

    def _round(self, now: float) -> float:
        """How long to sleep, if nobody rings: not at all if anything was moved."""
        self._let_go()
        self._gather(now)
        if not self._watched and not self._active:
            self._look_whether_over()
            return _TICK
        look = Look.at([queue for queue in self._watched if not queue.gone])
        needs, busy, pause = self._serve(look, now)
        self._tidy(look, now)
        self._thrift.look(look, now)
        self._make_room(look)
        self._forget(look, needs)
        if not needs and not self._active:
            self._look_whether_over()
        if busy:
            self._pause = _TICK_WATCHING
            return 0.0
        if needs:
            pause = min(pause, self._pause)
            self._pause = min(2 * self._pause, _TICK_WAITING)
        return min(pause, _TICK_WAITING) if self._active else pause

    def _let_go(self) -> None:
        """Of queues that were deleted: who refers to one keeps its memory mapped."""
        if self._changes == self._roster.changes:
            return
        self._changes = self._roster.changes
        for queues in (self._watched, self._open):
            for queue in [queue for queue in queues if queue.gone]:
                del queues[queue]
        for found in (self._active, self._pressed):
            found.difference_update([queue for queue in found if queue.gone])
        self._others = iter([queue for queue in self._others if not queue.gone])

    def _make_room(self, look: Look) -> None:
        """In /dev/shm, for publishers whose queue could not grow."""
        hot = look.hot
        small = look.wanted & (hot["arena_committed"].astype(np.int64) < look.arena_max)
        for row in np.flatnonzero(small).tolist():
            if scarce(int(hot["need_bytes"][row])):
                self._thrift.at_once(self._roster.queues)
                return

    def _gather(self, now: float) -> None:
        """Watch what asks for attention, what has deferred messages to be read soon, and now and
        then some others."""
        rung = self._broker.attention()
        if rung:
            self._pause = _TICK_WATCHING
        soon = np.flatnonzero(self._due <= _native.realtime() + LEAD)
        for index in (*rung, *soon.tolist()):
            queue = self._roster.queue(index)
            if queue is not None:
                self._watched[queue] = None
        for queue in filter(None, map(self._roster.queue, rung)):
            if queue.view.read("need_slots"):
                queue.asked_at = now
        self._due[soon] = _NEVER
        if now >= self._others_at:
            self._others_at = now + _TICK
            others = [*itertools.islice(self._others, _OTHERS)]
            self._others = self._others if others else iter(self._roster.queues)
            self._watched.update(dict.fromkeys(others))

    def _serve(self, look: Look, now: float) -> tuple[set[Queue], bool, float]:
        """A bite for everyone: who needs something still, whether anything was moved, how soon to
        look again."""
        hot, busy, pause = look.hot, False, _TICK
        on_disk = (hot["disk_read"] != hot["disk_write"]) | (hot["spilling"] != 0)
        needs = {look.queues[row] for row in np.flatnonzero(look.wanted).tolist()}

        def each(queues: Iterable[Queue], work: _Work, kind: str = "write") -> list[Queue]:
            chosen = list(queues)
            needs.update(chosen)
            return [queue for queue in chosen
                    if queue.retry_at.get(kind, 0) <= now
                    and self._guarded(queue, work, kind)]  # fmt: skip

        full = []
        for row in np.flatnonzero(self._overflowing(look, on_disk)).tolist():
            queue = look.queues[row]
            settled = on_disk[row] or hot["overflowed"][row] or queue in self._pressed
            if settled or not self._is_fast(queue, int(hot["delivered"][row]), now):
                full.append(queue)
            else:
                needs.add(queue)
                pause = _FAST_WINDOW
        busy |= bool(each(full, self._spill))
        busy |= bool(each(self._deferral.to_write(look, self._pressed), self._deferral.write))
        busy |= bool(each(self._crowded(look), self._relieve))
        self._pressed.clear()
        busy |= bool(each(self._deferral.to_read(look), self._deferral.read, "read"))
        for queue in each(self._running_low(look, on_disk), self._restore, "read"):
            queue.restored_at, busy = now, True
        busy |= bool(each(filter(self._is_pumped, look.queues), self._pump))
        needs |= self._pressed
        for row in np.flatnonzero(on_disk).tolist():
            if now - look.queues[row].restored_at < _DRAINING:
                needs.add(look.queues[row])
                pause = _TICK_DRAINING
        return needs, busy, pause

    def _forget(self, look: Look, needs: set[Queue]) -> None:
        """Watch only what needs something still."""
        for queue in look.queues:
            if queue not in needs:
                due = queue.sidecar.due
                self._due[queue.index] = _NEVER if due is None else due
        self._watched = dict.fromkeys(needs)

    def _overflowing(self, look: Look, on_disk: NDArray[np.bool_]) -> NDArray[np.bool_]:
        hot, ready = look.hot, look.ready
        everything = self._options.mem_queue_size == 0
        full = ready > 0 if everything else ready * 4 >= look.capacity * 3
        full = full | look.wanted
        # once something is on disk all that comes waits behind it, so keep room ahead of need
        full |= on_disk & (ready * 2 >= look.capacity)
        committed = hot["arena_committed"].astype(np.int64) >= look.arena_max
        for row in np.flatnonzero(committed & ~full).tolist():
            free = int(look.queues[row].view.header["arena"]["free_bytes"])
            full[row] = free * 8 < look.arena_max[row]
        if self._pressed:
            full |= np.array([queue in self._pressed for queue in look.queues])
        usable = (ready > 0) & ~look.ephemeral & (hot["base_pending"] == 0)
        chosen: NDArray[np.bool_] = full & usable
        return chosen

    def _is_fast(self, queue: Queue, delivered: int, now: float) -> bool:
        """Whether its consumers empty it at such a rate that disk would only slow them down."""
        since, before = queue.delivered
        elapsed = now - since
        if elapsed > 10 * _FAST_WINDOW:  # too long ago to say anything: look again in a moment
            queue.delivered = (now, delivered)
            return True
        if elapsed < _FAST_WINDOW:
            return True
        queue.delivered = (now, delivered)
        return (delivered - before) * _FAST_SHARE * _FAST_WINDOW >= queue.capacity * elapsed

    def _running_low(self, look: Look, on_disk: NDArray[np.bool_]) -> list[Queue]:
        low = on_disk & (look.waiting < look.low_water) & (look.hot["base_pending"] == 0)
        chosen = [look.queues[row] for row in np.flatnonzero(low).tolist()]
        # what lies there may be leased: then it stays until that ends, which rings
        return [queue for queue in chosen if not layout.run_length(queue.view.header)]

    def _is_pumped(self, queue: Queue) -> bool:
        """Whether it is a backlog on its way to channels."""
        topic = queue.topic
        if queue.channel is not None or len(topic.queues) == 1 or not _holds(queue):
            return False
        return not int(self._roster.directory.topics[topic.index]["paused"])

    def _crowded(self, look: Look) -> list[Queue]:
        """Where what came back may keep a publisher of deferred messages from its room."""
        hot = look.hot
        held = hot["held"] + look.deferring + hot["need_slots"]
        full = (held > look.inflight_slots) | (hot["need_bytes"] > 0)
        usable = (look.waiting > 0) & ~look.ephemeral & (hot["base_pending"] == 0)
        return [look.queues[row] for row in np.flatnonzero(look.wanted & full & usable).tolist()]

    # -- out

    def _spill(self, queue: Queue) -> bool:
        target = 0 if self._options.mem_queue_size == 0 else queue.capacity // 2
        header, moved = queue.view.header, False
        read, write = queue.positions
        if target and read == write and not int(header["overflowed"]):
            # nothing in a new file has been read, so a flush can put all that is older in front
            self._begin_file(queue)
            moved = self._broker.advance(queue.index, _oldest_quarter(queue)) > 0
        for _ in range(_BITES):
            ready, now = queue.ready, time.monotonic()
            wanted = int(header["need_bytes"]) or int(header["need_slots"])
            surplus = ready - target
            if surplus <= 0 and wanted and now - queue.spilled_at > _PATIENCE:
                surplus = max(ready // 4, int(header["need_slots"]))
            if surplus <= 0 or not ready:
                break
            count = min(surplus, _BATCH_MESSAGES)
            batch = self._broker.spill_begin(queue.index, count, queue.batch_bytes)
            if batch is None or not self._write_some(queue, batch):
                break
            queue.spilled_at = now
            moved = True
        return moved

    def _relieve(self, queue: Queue) -> bool:
        """Make room among what is held, if writing deferred messages did not: what was read ahead
        of need; else the youngest of what came back and nobody takes, behind what is ready; else
        what comes before all of that, back in front of what is on disk."""
        needed, now = lacking(queue), time.monotonic()
        if not needed:
            return False
        if self._broker.unrestore(queue.index):  # nobody takes it, and the disk has it still
            queue.no_room, queue.no_room_until = queue.view.read("free_tail"), now + _RETRY_AFTER
            return True
        moved = False
        while ready := queue.ready:
            batch = self._broker.spill_begin(queue.index, ready, queue.batch_bytes)
            if batch is None or not self._write_some(queue, batch):
                return moved
            moved = True
            if queue.ready >= ready:
                return True
        count = needed + queue.view.read("inflight_slots") // 8
        if self._write_returned(queue, count):
            return True
        if self._write_ahead(queue, live=True):
            queue.no_room, queue.no_room_until = queue.view.read("free_tail"), now + _RETRY_AFTER
            moved = True
        if lacking(queue):  # what was handed out before has no turn to keep
            moved |= self._write_returned(queue, count, out=True)
        if lacking(queue):
            moved |= self._deferral.write(queue, few=True)
        return moved

    def _write_returned(self, queue: Queue, count: int, *, out: bool = False) -> bool:
        batch = self._broker.spill_begin(
            queue.index, count, queue.batch_bytes, returned=not out, out=out
        )
        return batch is not None and self._write_some(queue, batch)

    def _write_some(self, queue: Queue, batch: Spill) -> bool:
        """`write`, but a disk that is nearly full is filled to the end, with smaller batches."""
        try:
            written = self.write(queue, batch)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self._begin_file(queue) and queue.batch_bytes == _LEAST_BYTES:
                raise
            queue.batch_bytes = max(queue.batch_bytes // 8, _LEAST_BYTES)
            return True
        queue.batch_bytes = min(queue.batch_bytes * 2, _BATCH_BYTES)
        return written

    def _begin_file(self, queue: Queue) -> bool:
        """Go on in the next file if this one has been read to its end, and free it. Whether it
        was."""
        read, write = queue.positions
        file, offset = unpack(read)
        if read == write and offset:
            following = pack(file + 1, 0)
            if self._broker.disk_set(queue.index, read, following, 0):
                queue.disk.drop_before(following)
                return True
        return False

    def write(self, queue: Queue, batch: Spill) -> bool:
        """Put a batch on disk and end it. False: the queue was emptied meanwhile.

        Raises OSError; the batch is then back where it was.
        """
        write_position = queue.positions[1]
        lengths = np.frombuffer(batch.lengths, np.uint32)
        try:
            plan = queue.disk.plan(write_position, lengths)
            np.frombuffer(batch.positions, np.uint64)[:] = plan[:-1]
            records = batch.encode()
            queue.disk.write(records, plan[:-1], lengths, write_position=write_position)
            self._active.add(queue)
        except BaseException:
            batch.end(write_position, False)
            raise
        self._well()
        if batch.end(int(plan[-1]), True):
            return True
        queue.disk.cut(write_position)
        return False

    # -- in

    def _restore(self, queue: Queue) -> bool:
        read, write = queue.positions
        if read == write or not _has_room(queue):
            return False
        if queue.no_room == queue.view.read("free_tail") and time.monotonic() < queue.no_room_until:
            return False
        try:
            chunk = queue.disk.read(read, write, _bytes_that_fit(queue), _native.scan_records)
        except DamagedFile as damage:
            self._set_aside(queue, read, write, damage)
            return True
        self._active.add(queue)
        queue.record_bytes = len(chunk.data) // max(chunk.count, 1)
        if not chunk.count:
            return self._broker.disk_set(queue.index, read, chunk.next_position, 0)
        if chunk.position != read:  # was at the end of a file
            depth = queue.view.read("disk_depth")
            if not self._broker.disk_set(queue.index, read, chunk.position, depth):
                return False
        freed = queue.view.read("free_tail")
        fitted = self._broker.restore(queue.index, chunk.data, chunk.position, chunk.next_position)
        if fitted is None or fitted[0]:
            return fitted is not None
        queue.no_room, queue.no_room_until = freed, time.monotonic() + _TICK_WAITING
        return self._make_way(queue)

    def _make_way(self, queue: Queue) -> bool:
        """Write some of what is ready: it fills the memory that older messages on disk need, and
        may not be taken before them."""
        batch = self._broker.spill_begin(queue.index, queue.ready // 4 + 1, queue.batch_bytes)
        return batch is not None and self._write_some(queue, batch)

    def _set_aside(self, queue: Queue, read: int, write: int, damage: DamagedFile) -> None:
        """Go on behind a damaged file; what was good in it has been delivered. If it was the file
        being written, writing goes on behind it too."""
        bad = queue.disk.set_aside(damage.file)
        following = damage.next_position
        depth = queue.disk.recount(following, max(write, following), _native.scan_records)
        lost = queue.view.read("disk_depth") - depth
        self._broker.disk_set(queue.index, read, following, depth)
        self._active.add(queue)
        self.bad_files += 1
        _log.error("%s: %s; set aside as %s, up to %d messages lost", queue, damage, bad, lost)

    # -- backlogs

    def _pump(self, backlog: Queue) -> bool:
        """Move some of a backlog to its topic's channels; a full channel gets room first."""
        topic = backlog.topic
        if backlog.sidecar.chunks:
            self._deferral.read(backlog, everything=True)
        moved = self._broker.pump(topic.index, topic.generation, _PUMP_MESSAGES)
        if moved < 0:
            self._pressed.update(queue for queue in topic.channels if not queue.ephemeral)
        return moved > 0

    # -- files

    def _tidy(self, look: Look, now: float) -> None:
        """Drop files that were read (or emptied) completely, sync what is due."""
        for row in np.flatnonzero(look.hot["disk_read"] != look.seen_read).tolist():
            self._active.add(look.queues[row])
        for queue in list(self._active):
            if queue.gone:
                self._active.discard(queue)
            elif queue.retry_at.get("tidy", 0) <= now:
                self._guarded(queue, self._sync, "tidy")

    def _sync(self, queue: Queue) -> bool:
        read, write = queue.positions
        if read != queue.seen_read:
            if unpack(read)[0] != unpack(queue.seen_read)[0]:
                queue.disk.drop_before(read)
            queue.disk.note(1)
            queue.seen_read = read
        depth = queue.view.read("disk_depth")
        if queue.disk.maybe_sync(time.monotonic(), depth, read, write):
            self._active.discard(queue)
        return False

    def _guarded(self, queue: Queue, work: _Work, kind: str) -> bool:
        """Do one queue's work under its lock; trouble with it or its disk stops no other, and no
        work of another kind."""
        self._keep_open(queue)
        with queue.lock:
            if queue.gone:
                return False
            try:
                if queue.positions != queue.checked:
                    damage.mend_positions(self._broker, queue)
                    queue.checked = queue.positions
                return work(queue)
            except (Gone, Busy):
                pass  # removed or emptied meanwhile; or a stopped client holds it
            except OSError as exc:
                queue.retry_at[kind] = time.monotonic() + _RETRY_AFTER
                self.trouble(exc)
            except damage.BROKEN as exc:
                queue.retry_at[kind] = time.monotonic() + _RETRY_AFTER
                _log.error("%s: cannot move messages between memory and disk: %s", queue, exc)
        return False

    def _keep_open(self, queue: Queue) -> None:
        """Its files may be opened now; those of the queue that was used longest ago are closed, if
        there are many."""
        self._open.pop(queue, None)
        self._open[queue] = None
        if len(self._open) > _OPEN_MOST:
            oldest = next(iter(self._open))
            del self._open[oldest]
            with oldest.lock:
                oldest.disk.close()

    def trouble(self, exc: OSError) -> None:
        """Note what the disk said; logged when it is news."""
        health = f"NOK - {exc.strerror or exc}"
        if health != self.health:
            where = f" ({exc.filename})" if exc.filename else ""
            _log.error("disk trouble: %s%s; trying again every second", exc.strerror or exc, where)
        self.health = health
        self._trouble.met("spiller", exc)

    def _well(self) -> None:
        if self.health != "OK":
            _log.info("the disk works again")
            self.health = "OK"
            self._trouble.over("spiller")

    def _look_whether_over(self) -> None:
        """Nothing is there for the disk any more (consumers took it), so nothing would tell that it
        works again."""
        if self.health != "OK":
            with contextlib.suppress(OSError):
                probe(Path(self._options.data_path or "."), _LEAST_BYTES)
                self._well()

    # -- the end

    def flush(self, queue: Queue, tell: Callable[[str], None]) -> None:
        """Everything in memory to disk, in order, and the positions with it. `tell` is called now
        and then, with how far it has come.

        For when no loop runs any more. Raises OSError; what was not written is still in memory.
        """
        disk, count = queue.disk, 0
        with queue.lock:
            self._end_leases(queue)
            self._broker.unrestore(queue.index)
            while self._deferral.write_all(queue) or self._write_ahead(queue, live=False):
                pass
            while True:
                batch = self._broker.spill_begin(queue.index, _BATCH_MESSAGES, _BATCH_BYTES, True)
                if batch is not None:
                    count += batch.count
                    self.write(queue, batch)
                    tell(f"{queue}: {count} messages")
                elif not self._deferral.write_all(queue):  # a consumer has just put off some
                    break
            read, write = queue.positions
            if queue.has_files:
                disk.drop_before(read)
                disk.sync(queue.view.read("disk_depth"), read, write, names=True)
            disk.close()

    def _end_leases(self, queue: Queue) -> None:
        """They go back, the oldest to the front: what they hold comes before what is on disk, or
        is there."""
        if not queue.view.read("leases_committed"):
            return
        serial = int(queue.view.header["segment"]["serial"])
        for lease in reversed(layout.open_leases(queue.view)):
            with contextlib.suppress(LeaseLost):  # finished meanwhile
                self._broker.lease_end(queue.index, serial, lease.id, True)

    def _write_ahead(self, queue: Queue, *, live: bool) -> bool:
        """What is in flight and in the requeue ring to right in front of what is on disk, for it
        comes before that. Whether there may be more. live: only of the ring, and nothing that its
        turn puts behind others.

        Where it does not fit (what was read of the file is shorter, and not as long as the youngest
        of them) it is left for the end of the files, out of its turn; or, live, where it is.
        """
        read, write = queue.positions
        if not live and (read == write or not (queue.waiting or queue.view.read("inflight_len"))):
            return False
        depth, most = queue.view.read("disk_depth"), queue.view.read("held")
        batch = self._broker.spill_begin(queue.index, most, 0, ahead=not live, front=live)
        if batch is None:
            return False
        try:
            # so that after a power loss nobody begins to read amid what is overwritten here
            queue.disk.sync(depth, read, write)
            queue.disk.write_ahead(batch.encode(), batch.position, read)
            queue.disk.note(batch.count)
            self._active.add(queue)
        except BaseException:
            batch.end(0, False)
            raise
        return batch.end(0, True) or not live


def _holds(queue: Queue) -> bool:
    """Whether there is anything in it to deliver, now or later."""
    read, write = queue.positions
    deferred = queue.view.ring_length("defer") + queue.view.read("deferred_len")
    return read != write or queue.ready + queue.waiting + deferred + queue.sidecar.depth > 0


def _has_room(queue: Queue) -> bool:
    """Whether there is room to read what is on disk."""
    _, slots, _, arena_max = queue.limits
    held, held_bytes = queue.view.read("held"), queue.view.read("held_bytes")
    return held < slots - slots // 8 and held_bytes < arena_max * 5 // 8


def _oldest_quarter(queue: Queue) -> int:
    """How many messages stay in memory at the first overflow: a quarter of those that are ready,
    and no more than a quarter of the bytes, or nothing would be left to spill."""
    oldest = queue.view.ready[: min(queue.ready, queue.capacity) // 4]
    nbytes = np.cumsum(queue.view.slots["capacity"][oldest], dtype=np.int64)
    return int(np.searchsorted(nbytes, queue.view.read("arena_max") // 4, "right"))


def _bytes_that_fit(queue: Queue) -> int:
    """How much to read: twice the low-water mark, but nothing that would not fit and be read again
    later."""
    view, (_, slots, low_water, arena_max) = queue.view, queue.limits
    room = arena_max * 3 // 4 - view.read("held_bytes")
    messages = min(2 * low_water, slots - slots // 8 - view.read("held"))
    return max(4096, min(_BATCH_BYTES, room, messages * queue.record_bytes))
