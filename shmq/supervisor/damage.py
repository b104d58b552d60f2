"""What is done where something has overwritten what a queue's header says.

* Positions on disk that cannot be: the position file and the data files have them too.
* What cannot be of which chunks of deferred messages count: all that are there do.
* A segment that cannot be used any more: what its slots still hold goes to the queue's files, the
  segment gets a name that nobody opens (`segments.set_aside_queue`). Its other queues go on.

Rather twice than never: what may be on disk already, or was finished amid the damage, is delivered.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shmq import _native, layout, segments
from shmq._native import Broker, ShmqError
from shmq.layout import Array
from shmq.names import is_ephemeral, valid_name
from shmq.options import Options
from shmq.storage import deferred
from shmq.storage.deferred import CHUNK_SHIFT, ChunkFile, Sidecar
from shmq.storage.diskqueue import DiskQueue, Meta, encode_records
from shmq.supervisor.roster import FIRST_POSITION, Queue

#: What using a queue raises whose header something has overwritten.
BROKEN = (ShmqError, ValueError, TypeError, LookupError, ArithmeticError)

_BODY_AT = 16  # of a block of the arena, whose size is a multiple of _BLOCK
_BLOCK = 64

_log = logging.getLogger(__name__)


# -- positions


def mend_positions(broker: Broker, queue: Queue) -> bool:
    """If the header's positions cannot be, take what the files say; whether it was so. Raises
    OSError."""
    read, write = queue.positions
    if queue.disk.can_be(read, write):
        return False
    found = queue.disk.start(None, _native.scan_records)
    _log.error(
        "%s: something has overwritten its positions on disk; reading on as after a power loss, "
        "%d messages", queue, found.depth,
    )  # fmt: skip
    drop_emptied(broker, queue)
    broker.disk_adopt(
        queue.index, found.read_position, found.write_position, found.depth, queue.sidecar.highest
    )
    return True


# -- chunks of deferred messages


def take_up_chunks(broker: Broker, queue: Queue, files: list[ChunkFile]) -> None:
    """Take up the files as the header says; if what it says cannot be, all of them. Raises
    OSError."""
    words = _chunk_words(queue)
    queue.sidecar.take_up(files, *(words or ()))
    if not words:
        _mend_chunks(broker, queue)


def drop_emptied(broker: Broker, queue: Queue) -> None:
    """Delete the chunks that were emptied, none if what the header says cannot be. Raises
    OSError."""
    words = _chunk_words(queue)
    if words and words[0] <= queue.sidecar.highest:
        queue.sidecar.drop(words[2])
    else:
        _mend_chunks(broker, queue)


def _chunk_words(queue: Queue) -> tuple[int, int, int] | None:
    """What `Sidecar.take_up` is to know, if it can be: only chunks that were written are read or
    emptied."""
    gone, read, write = (queue.view.read(f"deferred_{name}") for name in ("gone", "read", "write"))
    can_be = max(gone, read >> CHUNK_SHIFT) <= write < 1 << (64 - CHUNK_SHIFT)
    return (write, read, gone) if can_be else None


def _mend_chunks(broker: Broker, queue: Queue) -> None:
    _log.error(
        "%s: something has overwritten which of its deferred messages on disk count; all that are "
        "there do, %d", queue, queue.sidecar.depth,
    )  # fmt: skip
    depth = queue.view.read("disk_depth")
    broker.disk_adopt(queue.index, *queue.positions, depth, queue.sidecar.highest)


# -- a segment


def parse_base(base: str) -> tuple[str, str | None] | None:
    """Topic and channel (None: a backlog) of a base name; None if it cannot be one."""
    topic, colon, channel = base.partition(":")
    if not valid_name(topic) or (colon and not valid_name(channel)):
        return None
    return topic, channel if colon else None


class _Found(NamedTuple):
    """A message in a slot. turn: its place among the others; due: Unix ns, or 0."""

    turn: tuple[int, int]
    due: int
    record: bytes


def salvage(
    instance: str,
    serial: int,
    committed: int,
    disk: DiskQueue,
    sidecar: Sidecar,
    ephemeral: bool = False,
) -> bool:
    """Put what a queue's segment holds behind what is in its files (of an ephemeral one nothing),
    then set the segment aside: whether the queue was paused. committed: its topic's commit word.

    `sidecar` has taken up its chunks. Raises OSError; nothing is lost then, and nothing set aside.
    """
    fd = segments.open_queue(instance, serial, owners=segments.own())
    try:
        wreck = _Wreck(fd, committed)
        found = [] if ephemeral else sorted(wreck.messages())
        if not ephemeral:
            _append(disk, wreck.positions, [one.record for one in found if not one.due])
            _defer(sidecar, sorted((one.due, one.record) for one in found if one.due))
        wreck.close()
        bad = segments.set_aside_queue(instance, serial)
        _log.error("%s: set aside as %s; %d messages of it are kept", disk.base, bad, len(found))
        return wreck.paused
    finally:
        os.close(fd)
        disk.close()


def rescue(options: Options, serial: int, committed: int = 0) -> str | None:
    """Put what a queue's segment holds that has no name in the directory any more behind what is in
    the files that the segment's own header names, and remove the segment. That name, which is the
    files'; None: the header names none, and the segment was set aside, or nothing of it counts.

    committed: its topic's commit word; 0: not known, and what was not published to the end is left
    out. Raises OSError; nothing is lost then, and a second try may write messages twice.
    """
    fd = segments.open_queue(options.instance, serial, owners=segments.own())
    try:
        wreck, name = _Wreck(fd, committed), segments.queue_name(options.instance, serial)
        if not wreck.is_open:
            segments.unlink_queue(options.instance, serial)
            return None
        base = wreck.base
        if base is None:
            wreck.close()
            bad = segments.set_aside_queue(options.instance, serial)
            _log.error("%s: nothing says whose queue it was; set aside as %s", name, bad)
            return None
        topic, _, channel = base.partition(":")
        found = []
        if not is_ephemeral(channel or topic):
            found = sorted(wreck.messages())
            data_path = Path(options.data_path or ".")
            sidecar = Sidecar(data_path, base)
            sidecar.take_up(deferred.existing(data_path).get(base, ()))
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
                _defer(sidecar, sorted((one.due, one.record) for one in found if one.due))
            finally:
                disk.close()
        wreck.close()
        segments.unlink_queue(options.instance, serial)
        _log.error("%s: %d messages of %s are kept in its files", name, len(found), base)
        return None if is_ephemeral(channel or topic) else base
    finally:
        os.close(fd)


def _append(disk: DiskQueue, positions: tuple[int, int], records: list[bytes]) -> None:
    if disk.can_be(*positions):
        read, write = positions
        disk.cut(write)
        found = Meta(disk.recount(read, write, _native.scan_records), read, write)
    else:
        found = disk.start(None, _native.scan_records)
        if not found.write_position:
            found = Meta(0, FIRST_POSITION, FIRST_POSITION)
    depth, read, write = found.depth, found.read_position, found.write_position
    lengths = [len(record) for record in records]
    plan = disk.plan(write, lengths)
    disk.write(b"".join(records), plan, lengths, write_position=write)
    if records or disk.meta_path.exists():
        disk.sync(depth + len(records), read, int(plan[-1]), names=True)


def _defer(sidecar: Sidecar, entries: list[tuple[int, bytes]]) -> None:
    for begin in range(0, len(entries), deferred.MAX_MESSAGES):
        dues, records = zip(*entries[begin : begin + deferred.MAX_MESSAGES], strict=True)
        sidecar.add(sidecar.write(dues, [len(record) for record in records], b"".join(records)))


class _Wreck:
    """A queue's segment, read as a file: no hole of it gets a page by that."""

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
        """Read and write position, as the header has them."""
        return int(self._header["disk_read"]), int(self._header["disk_write"])

    @property
    def paused(self) -> bool:
        """As the header has it, if that can be."""
        return int(self._header["paused"]) == 1

    @property
    def is_open(self) -> bool:
        """Whether it was made to the end and not removed, as far as can be told."""
        head = self._header["segment"]
        return int(head["ready"]) not in (layout.Ready.RAW, layout.Ready.CLOSED) or self._size == 0

    @property
    def base(self) -> str | None:
        """The base name of its files, by its header; None if that cannot be one, or if another
        build of shmq has made the segment."""
        head, base = self._header["segment"], layout.text(self._header["base"])
        is_ours = int(head["magic"]) == layout.MAGIC
        is_ours = is_ours and int(head["fingerprint"]) == layout.FINGERPRINT
        return base if is_ours and parse_base(base) else None

    def close(self) -> None:
        """Who has it mapped is to find it gone."""
        if self._size < self._header.dtype.itemsize:
            return  # nobody who has it mapped can look
        ready = _native.LAYOUT["segment"]["ready"]
        os.pwrite(self._fd, layout.Ready.CLOSED.to_bytes(4, "little"), ready[1])

    def messages(self) -> Iterator[_Found]:
        """What the slots say that are intact, in whatever place."""
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
            record = encode_records(
                [int(row["timestamp"])], [int(row["attempts"])], [int(row["id"])], [body]
            )
            yield _Found(_turn(was, row), int(row["deadline"]) if is_late else 0, record)

    def _slots(self) -> Array:
        """As many as lie before what follows them, whatever number of them the header gives."""
        kind = layout.dtype("slot")
        places = [int(self._header[name]) for name in _PLACES]
        end = min((at for at in places if at > self._slots_at), default=self._size)
        count = max(min(end, self._size) - self._slots_at, 0) // kind.itemsize
        return np.frombuffer(os.pread(self._fd, count * kind.itemsize, self._slots_at), kind)

    def _body(self, row: Array) -> bytes | None:
        """The body of a slot, if it can be one."""
        at, length, capacity = int(row["body"]), int(row["length"]), int(row["capacity"])
        if not int(row["id"]) or length > capacity:
            return None
        if not length:
            return b""
        # two words of the header say where bodies begin; the block's own size tells them apart
        places = {int(self._header["arena_at"]), self._size - int(self._header["arena_max"])}
        for arena in places:
            if self._slots_at < arena <= self._size - at - capacity and at % _BLOCK == _BODY_AT:
                head = os.pread(self._fd, 8, arena + at - _BODY_AT)
                size = int.from_bytes(head, "little") & ~(_BLOCK - 1)
                if size == capacity + _BODY_AT or len(places) == 1:
                    return os.pread(self._fd, length, arena + at)
        return None


_HOLDING = [
    layout.State[name] for name in (
        "PREPARED", "READY", "INFLIGHT", "DEFERRED", "BACK", "SPILLING", "RESTORED", "MOVING",
        "LEASED",
    )
]  # fmt: skip
_PREVIOUS = (layout.State.READY, layout.State.BACK, layout.State.INFLIGHT, layout.State.DEFERRED)
_PLACES = ("ready_at", "defer_at", "requeue_at", "free_at", "inflight_when_at", "arena_at")


def _turn(state: layout.State, row: Array) -> tuple[int, int]:
    """As a flush has it: in flight by delivery, what came back, what is ready."""
    if state in (layout.State.INFLIGHT, layout.State.LEASED):
        return 0, int(row["move"])
    if state in (layout.State.BACK, layout.State.RESTORED):
        return 1, int(row["order"])
    return 2, int(row["order"])
