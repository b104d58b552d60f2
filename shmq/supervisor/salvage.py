"""Saves messages where something has overwritten the header of a queue.

* If the positions on disk are impossible, they are taken from the position file and the data files.
* If the words that say which chunks count are impossible, every chunk file that exists counts.
* If the segment is no longer usable, the intact messages of its slots go to the queue's files, and
  the segment gets a name that nobody opens (`shm.set_aside_queue`). Other queues continue.

A duplicate is better than a loss: a message that may already be on disk, or that was finished
while the damage happened, is delivered again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shmq import _native, layout, shm
from shmq._native import Broker
from shmq.errors import ShmqError
from shmq.layout import Array
from shmq.names import is_ephemeral, valid_name
from shmq.options import Options
from shmq.storage import deferred, key_file
from shmq.storage.deferred import CHUNK_SHIFT, ChunkFile, DeferredStore
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.diskqueue_recovery import recount, recover_positions, set_aside
from shmq.storage.positions import Meta, unpack
from shmq.supervisor.registry import FIRST_POSITION, Queue

#: Exceptions that using a queue may raise if something has overwritten its header.
BROKEN = (ShmqError, ValueError, TypeError, LookupError, ArithmeticError)

_BODY_AT = 16  # of a block of the arena, whose size is a multiple of _BLOCK
_BLOCK = 64

_log = logging.getLogger(__name__)


# -- positions


def repair_positions(broker: Broker, queue: Queue) -> bool:
    """If the header's positions are impossible, take them from the files. Returns true if they
    were. Raises OSError."""
    read, write = queue.positions
    if queue.disk.can_be(read, write):
        return False
    found = recover_positions(queue.disk, None, _native.scan_records)
    _log.error(
        "%s: something has overwritten its positions on disk; reading on as after a power loss, "
        "%d messages",
        queue,
        found.depth,
    )
    drop_emptied_chunks(broker, queue)
    broker.disk_adopt(
        queue.index,
        found.read_position,
        found.write_position,
        found.depth,
        queue.deferred_store.highest,
    )
    return True


def set_renamed_aside(queue: Queue, numbers: list[int]) -> None:
    """Tell the files that reading left behind from those that somebody gave a number below the read
    position while the messages of the queue were in memory, and set these aside. numbers: of the
    queue's files. Raises OSError.

    A file is deleted before the position file leaves it behind. So what is below that was not left
    by reading.
    """
    disk, read_file = queue.disk, unpack(queue.positions[0])[0]
    older = [number for number in numbers if number < read_file]
    meta = disk.load_meta() if older else None
    least = unpack(meta.read_position)[0] if meta else 0
    disk.lowest = min([number for number in older if number >= least], default=read_file)
    for number in older:
        if number >= least:
            continue
        bad = set_aside(disk, number)
        _log.error(
            "%s: a file below the read position, and nothing says that its messages were "
            "delivered; set aside as %s. To have them delivered, give it its name again while the "
            "broker is stopped and nothing of it is kept in memory",
            disk.file_path(number),
            bad,
        )


# -- chunks of deferred messages


def take_up_chunks(broker: Broker, queue: Queue, files: list[ChunkFile]) -> None:
    """Take up the files that count by the header, or all of them if its words are impossible.
    Raises OSError."""
    words = _chunk_words(queue)
    queue.deferred_store.take_up(files, *(words or ()))
    if not words:
        _count_all_chunks(broker, queue)


def drop_emptied_chunks(broker: Broker, queue: Queue) -> None:
    """Delete the chunks that were emptied, or none if the header's words are impossible. Raises
    OSError."""
    words = _chunk_words(queue)
    if words and words[0] <= queue.deferred_store.highest:
        queue.deferred_store.drop(words[2])
    else:
        _count_all_chunks(broker, queue)


def _chunk_words(queue: Queue) -> tuple[int, int, int] | None:
    """The header's words (write, read, gone) for `DeferredStore.take_up`, None if they are
    impossible: only a chunk that was written can have been read or emptied."""
    gone, read, write = (queue.view.read(f"deferred_{name}") for name in ("gone", "read", "write"))
    can_be = max(gone, read >> CHUNK_SHIFT) <= write < 1 << (64 - CHUNK_SHIFT)
    return (write, read, gone) if can_be else None


def _count_all_chunks(broker: Broker, queue: Queue) -> None:
    _log.error(
        "%s: something has overwritten which of its deferred messages on disk count; all that are "
        "there do, %d",
        queue,
        queue.deferred_store.depth,
    )
    depth = queue.view.read("disk_depth")
    broker.disk_adopt(queue.index, *queue.positions, depth, queue.deferred_store.highest)


# -- a segment


def is_store(options: Options, serial: int) -> bool:
    """True if the segment is a results store. Raises FileNotFoundError, NotTrusted."""
    kind = layout.dtype("segment")
    fd = shm.open_queue(options.instance, serial, owners=shm.own())
    try:
        head = os.pread(fd, kind.itemsize, 0).ljust(kind.itemsize, b"\0")
    finally:
        os.close(fd)
    return int(np.frombuffer(head, kind)[0]["kind"]) == layout.SegmentKind.STORE


def parse_base(base: str) -> tuple[str, str | None] | None:
    """Topic and channel (None: a backlog) of a base name; None if it cannot be one."""
    topic, colon, channel = base.partition(":")
    if not valid_name(topic) or (colon and not valid_name(channel)):
        return None
    return topic, channel if colon else None


class _Found(NamedTuple):
    """An intact message of a slot. turn: its place in the order; due: Unix ns, or 0."""

    turn: tuple[int, int]
    due: int
    record: bytes


def salvage_queue(
    instance: str,
    serial: int,
    committed: int,
    disk: DiskQueue,
    store: DeferredStore,
    ephemeral: bool = False,
) -> bool:
    """Append the messages in a queue's segment to the queue's files (nothing if it is ephemeral),
    then set the segment aside. Returns whether the queue was paused.

    committed: its topic's commit word. `store` has taken up its chunks. Raises OSError; then
    nothing is lost, and the segment stays.
    """
    fd = shm.open_queue(instance, serial, owners=shm.own())
    try:
        wreck = _Wreck(fd, committed)
        topic, key = disk.base.partition(":")[0], key_file.load(disk.data_path)
        found = [] if ephemeral else sorted(wreck.messages(topic, key))
        if not ephemeral:
            _append(disk, wreck.positions, [one.record for one in found if not one.due])
            _defer(store, sorted((one.due, one.record) for one in found if one.due))
        wreck.close()
        bad = shm.set_aside_queue(instance, serial)
        _log.error("%s: set aside as %s; %d messages of it are kept", disk.base, bad, len(found))
        return wreck.paused
    finally:
        os.close(fd)
        disk.close()


def salvage_unnamed(options: Options, serial: int, committed: int = 0) -> str | None:
    """Save the messages of a queue's segment that the directory no longer names: append them to the
    files that the segment's own header names, and remove the segment.

    Returns the base name of those files. None if the header names none (the segment is then set
    aside), or if the segment has no message to keep.
    committed: its topic's commit word; 0 if it is not known: messages whose publish was under way
    are then left out. Raises OSError; then nothing is lost, and a second try may write messages
    twice.
    """
    fd = shm.open_queue(options.instance, serial, owners=shm.own())
    try:
        wreck, name = _Wreck(fd, committed), shm.queue_name(options.instance, serial)
        if not wreck.is_open:
            shm.unlink_queue(options.instance, serial)
            return None
        base = wreck.base
        if base is None:
            wreck.close()
            bad = shm.set_aside_queue(options.instance, serial)
            _log.error("%s: nothing says whose queue it was; set aside as %s", name, bad)
            return None
        topic, _, channel = base.partition(":")
        found = []
        if not is_ephemeral(channel or topic):
            data_path = Path(options.data_path or ".")
            found = sorted(wreck.messages(topic, key_file.load(data_path)))
            store = DeferredStore(data_path, base)
            store.take_up(deferred.existing(data_path).get(base, ()))
            disk = DiskQueue(
                data_path,
                base,
                max_bytes_per_file=options.max_bytes_per_file,
                max_msg_size=max(options.max_msg_size, *(len(one.record) for one in found), 0),
                sync_every=options.sync_every,
                sync_timeout=options.sync_timeout,
            )
            try:
                _append(disk, wreck.positions, [one.record for one in found if not one.due])
                _defer(store, sorted((one.due, one.record) for one in found if one.due))
            finally:
                disk.close()
        wreck.close()
        shm.unlink_queue(options.instance, serial)
        _log.error("%s: %d messages of %s are kept in its files", name, len(found), base)
        return None if is_ephemeral(channel or topic) else base
    finally:
        os.close(fd)


def _append(disk: DiskQueue, positions: tuple[int, int], records: list[bytes]) -> None:
    if disk.can_be(*positions):
        read, write = positions
        disk.cut(write)
        found = Meta(recount(disk, read, write, _native.scan_records), read, write)
    else:
        found = recover_positions(disk, None, _native.scan_records)
        if not found.write_position:
            found = Meta(0, FIRST_POSITION, FIRST_POSITION)
    depth, read, write = found.depth, found.read_position, found.write_position
    lengths = [len(record) for record in records]
    plan = disk.plan(write, lengths)
    disk.write(b"".join(records), plan, lengths, write_position=write)
    if records or disk.meta_path.exists():
        disk.sync(depth + len(records), read, int(plan[-1]), names=True)


def _defer(store: DeferredStore, entries: list[tuple[int, bytes]]) -> None:
    for begin in range(0, len(entries), deferred.MAX_MESSAGES):
        dues, records = zip(*entries[begin : begin + deferred.MAX_MESSAGES], strict=True)
        store.add(store.write(dues, [len(record) for record in records], b"".join(records)))


class _Wreck:
    """A queue's segment, read as a file: unlike a mapping, this allocates no page for a hole."""

    def __init__(self, fd: int, committed: int) -> None:
        kind = layout.dtype("queue")
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._committed = committed
        head = os.pread(fd, kind.itemsize, 0).ljust(kind.itemsize, b"\0")
        self._header = np.frombuffer(head, kind)[0]
        self._slots_at = kind.itemsize

    @property
    def positions(self) -> tuple[int, int]:
        """The header's read and write position; they may be impossible."""
        return int(self._header["disk_read"]), int(self._header["disk_write"])

    @property
    def paused(self) -> bool:
        """True if the header says, in a possible word, that the queue is paused."""
        return int(self._header["paused"]) == 1

    @property
    def is_open(self) -> bool:
        """True if the segment was completely made and not removed, as far as can be told."""
        head = self._header["segment"]
        return int(head["ready"]) not in (layout.Ready.RAW, layout.Ready.CLOSED) or self._size == 0

    @property
    def base(self) -> str | None:
        """The base name of its files, by its header. None if that is not a valid name, or if
        another build of shmq made the segment."""
        head, base = self._header["segment"], layout.text(self._header["base"])
        is_ours = int(head["magic"]) == layout.MAGIC
        is_ours = is_ours and int(head["fingerprint"]) == layout.FINGERPRINT
        return base if is_ours and parse_base(base) else None

    def close(self) -> None:
        """Store CLOSED, so that processes that have it mapped find the queue gone."""
        if self._size < self._header.dtype.itemsize:
            return  # too short: no process that has it mapped can read this word
        ready = _native.LAYOUT["segment"]["ready"]
        os.pwrite(self._fd, layout.Ready.CLOSED.to_bytes(4, "little"), ready[1])

    def messages(self, topic: str, key: bytes | None) -> Iterator[_Found]:
        """The messages of all intact slots, in the order of the slots. topic, key: for the seals of
        those that are sealed; key None: they lose them."""
        slots = self._slots()
        state = layout.State
        for row in slots[np.isin(slots["word"] & np.uint64(0xFF), _HOLDING)]:
            this = state(int(row["word"]) & 0xFF)
            body = self._body(row)
            if body is None or (
                (this is state.PREPARED and int(row["order"]) > self._committed)
                or (this is state.MOVING and int(row["move"]) <= self._committed)
            ):
                continue
            was = this
            if this in (state.SPILLING, state.RESTORED, state.MOVING):
                was = state(int(row["previous"])) if int(row["previous"]) in _PREVIOUS else this
            is_late = was is state.DEFERRED or (this is state.PREPARED and int(row["deadline"]))
            record = _native.encode_slot(row.tobytes(), body, topic, key)
            yield _Found(_turn(was, row), int(row["deadline"]) if is_late else 0, record)

    def _slots(self) -> Array:
        """All slots that lie before the next region of the segment, regardless of the number of
        slots in the header."""
        kind = layout.dtype("slot")
        places = [int(self._header[name]) for name in _PLACES]
        end = min((at for at in places if at > self._slots_at), default=self._size)
        count = max(min(end, self._size) - self._slots_at, 0) // kind.itemsize
        return np.frombuffer(os.pread(self._fd, count * kind.itemsize, self._slots_at), kind)

    def _body(self, row: Array) -> bytes | None:
        """The properties and the body of a slot; None if the slot's fields are impossible."""
        at, length, capacity = int(row["body"]), int(row["length"]), int(row["capacity"])
        if not int(row["id"]) or length > capacity:
            return None
        if not length:
            return b""
        # two words of the header tell where bodies begin; if they differ, the size that the
        # allocator stored before the body shows which one is right
        places = {int(self._header["arena_at"]), self._size - int(self._header["arena_max"])}
        for arena in places:
            if self._slots_at < arena <= self._size - at - capacity and at % _BLOCK == _BODY_AT:
                head = os.pread(self._fd, 8, arena + at - _BODY_AT)
                size = int.from_bytes(head, "little") & ~(_BLOCK - 1)
                if size == capacity + _BODY_AT or len(places) == 1:
                    return os.pread(self._fd, length, arena + at)
        return None


_HOLDING = [
    layout.State[name]
    for name in (
        "PREPARED",
        "READY",
        "IN_FLIGHT",
        "DEFERRED",
        "REQUEUED",
        "SPILLING",
        "RESTORED",
        "MOVING",
        "LEASED",
    )
]
_PREVIOUS = (
    layout.State.READY,
    layout.State.REQUEUED,
    layout.State.IN_FLIGHT,
    layout.State.DEFERRED,
)
_PLACES = ("ready_at", "defer_at", "requeue_at", "free_at", "in_flight_when_at", "arena_at")


def _turn(state: layout.State, row: Array) -> tuple[int, int]:
    """The order of a flush: messages in flight by delivery, requeued ones, ready ones."""
    if state in (layout.State.IN_FLIGHT, layout.State.LEASED):
        return 0, int(row["move"])
    if state in (layout.State.REQUEUED, layout.State.RESTORED):
        return 1, int(row["order"])
    return 2, int(row["order"])
