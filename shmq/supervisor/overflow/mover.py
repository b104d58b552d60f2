"""Moves messages between memory and disk: spill, relieve, restore, flush.

The spiller calls every method under the queue's lock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shmq import _native, peek
from shmq._native import Broker, Spill
from shmq.errors import LeaseLost
from shmq.layout import SpillSource
from shmq.storage.diskqueue import DamagedFile
from shmq.storage.diskqueue_recovery import (
    find_record,
    keep_piece,
    keep_record,
    recount,
    set_aside,
)
from shmq.storage.positions import pack, unpack
from shmq.storage.records import RecordRun
from shmq.supervisor.overflow.deferred import DeferredMover
from shmq.supervisor.overflow.files import Files
from shmq.supervisor.overflow.policy import (
    BATCH_BYTES,
    bytes_that_fit,
    has_room,
    lacking,
    log_too_big,
    never_fits,
    oldest_quarter,
)
from shmq.supervisor.overflow.prepend import prepend
from shmq.supervisor.overflow.state import States
from shmq.supervisor.registry import Queue

_LEAST_BYTES = 16 << 10  # bytes written at once, at least, while the disk is nearly full
_BATCH_MESSAGES = 32768
_BITES = 4  # batches a queue may write in one round
_WORTH = 8  # while consumers wait for the disk, do not spill less than this part of the capacity
_PRICE = 2  # ... and one message for so many that were read from disk
_MOUTHFUL = 512 << 10  # bytes of records restored under one hold of the locks
_PATIENCE = 0.020  # seconds in which a waiting publisher notices that there is room
_EVICTED_FOR = 1.0  # seconds until evicted messages may be read back, unless a slot is freed first
_NO_ROOM_FOR = 0.100  # seconds until a restore without room is tried again, as above

_log = logging.getLogger(__name__)


class Mover:
    """Moves messages of one queue at a time."""

    def __init__(
        self,
        broker: Broker,
        states: States,
        files: Files,
        deferred: DeferredMover,
        spill_all: bool,
    ) -> None:
        """spill_all: no message stays ready in memory (`mem_queue_size` is 0)."""
        self._broker = broker
        self._states = states
        self._files = files
        self._deferred = deferred
        self._spill_all = spill_all

    # -- out

    def spill(self, queue: Queue) -> bool:
        """Spill the ready ring until it is half empty; while consumers wait for the disk, only as
        much as restores have paid for. Returns whether anything was moved. Raises OSError."""
        state = self._states[queue]
        starved = state.is_starved(time.monotonic())
        if starved and state.credit < _PRICE * min(queue.capacity // _WORTH, queue.ready // 2):
            return False
        target = 0 if self._spill_all else queue.capacity // 2
        header, moved = queue.view.header, False
        read, write = queue.positions
        if target and read == write and not int(header["overflowed"]):
            # nothing has been read from a new file, so a flush can write all older messages as the
            # file before it
            self._begin_file(queue)
            moved = self._broker.stage_oldest(queue.index, oldest_quarter(queue)) > 0
        for _ in range(_BITES):
            ready, now = queue.ready, time.monotonic()
            wanted = int(header["need_bytes"]) or int(header["need_slots"])
            surplus = ready - target
            if surplus <= 0 and wanted and now - state.spilled_at > _PATIENCE:
                surplus = max(ready // 4, int(header["need_slots"]))
            if starved:
                surplus = min(surplus, state.credit // _PRICE)
            if surplus <= 0 or not ready:
                break
            count = min(surplus, _BATCH_MESSAGES)
            batch = self._broker.spill_begin(queue.index, count, state.batch_bytes)
            if batch is None or not self._write_some(queue, batch):
                break
            state.spilled_at = now
            state.credit = max(state.credit - _PRICE * batch.count, 0)
            moved = True
        return moved

    def relieve(self, queue: Queue) -> bool:
        """Make room for deferred messages by moving requeued messages that nobody takes to disk.

        Each step is taken only while room is lacking. In the picture 1r was requeued by a consumer
        and waits for others, 2d was delivered before and returned by a dead consumer, 3 and 4 were
        read ahead from disk:

            start                                ring [1r 2d 3 4]  disk [5 6]            ready [7]
            evict what was read ahead            ring [1r 2d]      disk [3 4 5 6]        ready [7]
            spill the ready ring                 ring [1r 2d]      disk [3 4 5 6 7]      ready []
            requeued messages to the end         ring [2d]         disk [3 4 5 6 7 1]    ready []
            the others in front of the disk      ring []           disk [2 3 4 5 6 7 1]  ready []
            or, without room there, to the end   ring []           disk [3 4 5 6 7 1 2]  ready []

        1r waits for all messages that were published before its requeue, so its place is after
        them. 2d was delivered before, so no order is promised for it, and the last step may move it
        to the end. Message 3 was never delivered: it is never written after newer ones.
        """
        state, needed, now = self._states[queue], lacking(queue), time.monotonic()
        if not needed:
            return False
        if self._broker.evict_read_ahead(queue.index):  # nobody takes these, and disk has them too
            state.no_room, state.no_room_until = queue.view.read("free_tail"), now + _EVICTED_FOR
            return True
        moved = False
        while ready := queue.ready:
            batch = self._broker.spill_begin(queue.index, ready, state.batch_bytes)
            if batch is None or not self._write_some(queue, batch):
                return moved
            moved = True
            if queue.ready >= ready:
                return True
        count = needed + queue.view.read("in_flight_slots") // 8
        if self._write_requeued(queue, count):
            return True
        if self._prepend(queue, live=True):
            state.no_room, state.no_room_until = queue.view.read("free_tail"), now + _EVICTED_FOR
            moved = True
        if lacking(queue):  # messages that were delivered before have no order to keep
            moved |= self._write_requeued(queue, count, out=True)
        if lacking(queue):
            moved |= self._deferred.write(queue, few=True)
        return moved

    def _write_requeued(self, queue: Queue, count: int, *, out: bool = False) -> bool:
        """Write requeued messages that wait for others to the end. out: also the others that were
        delivered before."""
        source = SpillSource.DELIVERED if out else SpillSource.REQUEUED
        batch = self._broker.spill_begin(
            queue.index, count, self._states[queue].batch_bytes, source
        )
        return batch is not None and self._write_some(queue, batch)

    def _prepend(self, queue: Queue, *, live: bool) -> bool:
        if live and self._spill_all:
            return False  # what is in front was read back, and is not finished yet
        return prepend(self._broker, self._files, queue, live=live)

    def _write_some(self, queue: Queue, batch: Spill) -> bool:
        """Call `write`, with smaller batches while the disk is nearly full, to use all of it."""
        state = self._states[queue]
        try:
            written = self.write(queue, batch)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self._begin_file(queue) and state.batch_bytes == _LEAST_BYTES:
                raise
            state.batch_bytes = max(state.batch_bytes // 8, _LEAST_BYTES)
            return True
        state.batch_bytes = min(state.batch_bytes * 2, BATCH_BYTES)
        return written

    def _begin_file(self, queue: Queue) -> bool:
        """If the file has been read to its end, continue in the next one and delete it. Returns
        whether it had been."""
        read, write = queue.positions
        file, offset = unpack(read)
        if read == write and offset and not self._spill_all:
            following = pack(file + 1, 0)
            if self._broker.disk_set(queue.index, read, following, 0):
                queue.disk.drop_before(following)
                return True
        return False

    def write(self, queue: Queue, batch: Spill) -> bool:
        """Write a batch to disk and end it. False if the queue was emptied meanwhile.

        Raises OSError; the batch is then back in its place in memory.
        """
        write_position = queue.positions[1]
        lengths = np.frombuffer(batch.lengths, np.uint32)
        try:
            plan = self._plan_and_write(queue, batch, write_position, lengths)
            self._files.active.add(queue)
        except BaseException:
            batch.end(write_position, False)
            raise
        if batch.end(int(plan[-1]), True):
            return True
        queue.disk.cut(write_position)
        return False

    @staticmethod
    def _plan_and_write(
        queue: Queue, batch: Spill, write_position: int, lengths: NDArray[np.uint32]
    ) -> NDArray[np.uint64]:
        """Write a batch, and return its plan. If the system lets a file not grow, the files end
        there from now on, and the batch goes on in the next. Raises OSError."""
        disk = queue.disk
        while True:
            most = disk.max_bytes_per_file
            plan = disk.plan(write_position, lengths)
            np.frombuffer(batch.positions, np.uint64)[:] = plan[:-1]
            records = batch.encode()
            try:
                disk.write(records, plan[:-1], lengths, write_position=write_position)
            except OSError as exc:
                if exc.errno == errno.EFBIG and disk.max_bytes_per_file < most:
                    continue
                raise
            return plan

    # -- in

    def restore(self, queue: Queue) -> bool:
        """Read messages back into the requeue ring. Returns whether anything was moved. Raises
        OSError."""
        state = self._states[queue]
        read, write = queue.positions
        if read == write or not has_room(queue):
            return False
        if state.no_room == queue.view.read("free_tail") and time.monotonic() < state.no_room_until:
            return False
        starved = state.is_starved(time.monotonic())
        try:
            nbytes = bytes_that_fit(queue, state.record_bytes, everything=starved)
            run = queue.disk.read(read, write, nbytes, _native.scan_records)
        except DamagedFile as damage:
            self._set_aside(queue, read, write, damage)
            return True
        counted = queue.view.read("disk_depth")
        self._files.active.add(queue)
        state.record_bytes = len(run.data) // max(run.count, 1)
        if not run.count:
            _log_missing(queue, counted)
            return self._broker.disk_set(queue.index, read, run.next_position, 0)
        if run.position != read:  # the read position was at the end of a file
            depth = queue.view.read("disk_depth")
            if not self._broker.disk_set(queue.index, read, run.position, depth):
                return False
        freed, waiting = queue.view.read("free_tail"), queue.waiting
        fitted = self._restore_some(queue, run)
        if fitted is None:
            return False
        if fitted:
            if run.next_position == write and fitted == run.count:
                _log_missing(queue, counted - run.count)
            state.filled = waiting + fitted
            state.credit = min(state.credit + fitted, _PRICE * queue.capacity)
            return True
        if never_fits(queue, run.data[: int(run.lengths[0])]):
            self._keep_first(queue, run)
            return True
        state.no_room, state.no_room_until = freed, time.monotonic() + _NO_ROOM_FOR
        return self._make_way(queue)

    def _keep_first(self, queue: Queue, run: RecordRun) -> None:
        """Set the first record of a run aside, and go on behind it. Raises OSError."""
        size = int(run.lengths[0])
        bad = keep_record(queue.disk, bytes(run.data[:size]))
        following = run.next_position if run.count == 1 else run.position + size
        depth = max(queue.view.read("disk_depth") - 1, 0)
        if self._broker.disk_set(queue.index, run.position, following, depth):
            log_too_big(queue, size, bad)
        else:
            bad.unlink()  # the queue was emptied meanwhile

    def _restore_some(self, queue: Queue, run: RecordRun) -> int | None:
        """Restore records in pieces, so that nobody waits long for the locks, and consumers get the
        first ones at once. Returns how many fitted; None: the read position has moved."""
        data, total, at = memoryview(run.data), 0, 0
        while at < len(data):
            piece = data[at : at + _MOUTHFUL]
            if at + len(piece) < len(data):
                used = _native.scan_records(piece, run.max_msg_size)[1]
                piece = piece[:used] if used else data[at:]
            position, at = run.position + at, at + len(piece)
            following = run.next_position if at == len(data) else run.position + at
            fitted = self._broker.restore(queue.index, piece, position, following)
            if fitted is None:
                return total or None
            total += fitted[0]
            if fitted[1] < len(piece):
                break
        return total

    def _make_way(self, queue: Queue) -> bool:
        """Spill part of the ready ring: its messages fill the memory that older messages on disk
        need, and may not be delivered before those."""
        count = queue.ready // 4 + 1
        batch = self._broker.spill_begin(queue.index, count, self._states[queue].batch_bytes)
        return batch is not None and self._write_some(queue, batch)

    def _set_aside(self, queue: Queue, read: int, write: int, damage: DamagedFile) -> None:
        """Set a damaged piece of a file aside and continue at the next whole record in it. If there
        is none, set the file aside and continue after it; if it was the write file, writing
        continues after it too. The intact messages before the damage have been delivered."""
        found = find_record(queue.disk, damage.position, write)
        if found is not None:
            self._skip(queue, read, write, damage, found)
            return
        bad = set_aside(queue.disk, damage.file)
        name = "it is gone" if bad is None else f"set aside as {bad}"
        following = damage.next_position
        depth = recount(queue.disk, following, max(write, following), _native.scan_records)
        lost = queue.view.read("disk_depth") - depth
        self._broker.disk_set(queue.index, read, following, depth)
        self._files.active.add(queue)
        _log.error("%s: %s; %s, up to %d messages lost", queue, damage, name, max(lost, 0))

    def _skip(self, queue: Queue, read: int, write: int, damage: DamagedFile, found: int) -> None:
        """Set the piece of a file before the position `found` aside, and continue there."""
        bad = keep_piece(queue.disk, damage.position, found)
        depth = recount(queue.disk, found, write, _native.scan_records)
        if not self._broker.disk_set(queue.index, read, found, depth):
            bad.unlink()  # the queue was emptied meanwhile
            return
        self._files.active.add(queue)
        _log.error(
            "%s: %s: damaged from offset %d to %d (%s); this piece was set aside as %s, 1 message "
            "or more lost, going on behind it",
            queue,
            damage.path,
            unpack(damage.position)[1],
            unpack(found)[1],
            damage.reason,
            bad,
        )

    # -- the end

    def flush(self, queue: Queue, tell: Callable[[str], None]) -> None:
        """Write everything in memory to disk, in order, and then the positions. `tell` is called
        now and then with the progress.

        All loops must have ended. Raises OSError; messages that were not written are then still in
        memory.
        """
        disk, count = queue.disk, 0
        with queue.lock:
            self._end_leases(queue)
            self._broker.evict_read_ahead(queue.index)
            while self._deferred.write_all(queue) or self._prepend(queue, live=False):
                pass
            while True:
                batch = self._broker.spill_begin(
                    queue.index, _BATCH_MESSAGES, BATCH_BYTES, SpillSource.ALL
                )
                if batch is not None:
                    count += batch.count
                    self.write(queue, batch)
                    tell(f"{queue}: {count} messages")
                elif not self._deferred.write_all(queue):  # a consumer may just have deferred some
                    break
            read, write = queue.positions
            if queue.has_files:
                disk.sync(queue.view.read("disk_depth"), read, write, names=True)
            disk.close()

    def _end_leases(self, queue: Queue) -> None:
        """Return all leases, the oldest last, so that its messages come first. Leased messages come
        before those on disk, or are on disk themselves."""
        if not queue.view.read("leases_committed"):
            return
        serial = int(queue.view.header["segment"]["serial"])
        for lease in reversed(peek.open_leases(queue.view)):
            with contextlib.suppress(LeaseLost):  # it was finished meanwhile
                self._broker.lease_end(queue.index, serial, lease.id, True)


def _log_missing(queue: Queue, missing: int) -> None:
    """Say how many messages were counted and are not in the files, of which all is read. A file
    that was cut off between two records shows nothing else."""
    if missing > 0:
        _log.error(
            "%s: its files had %d messages fewer than were counted: a file was cut off between two "
            "messages, or the position file's count was wrong",
            queue,
            missing,
        )
