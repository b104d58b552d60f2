"""Read-only views of the two kinds of segments: the directory and the queues.

Nothing is copied and no lock is taken. A view never reaches beyond the `..._committed` words,
because on tmpfs even reading a hole allocates a page. The data may be changing while it is read:
counts can be off by the number of messages that are moving, and ring entries are checked before
they are used. A reader that must be sure of a slot compares its state word before and after
reading it (see `peek`). `sources` has the ways to get a view.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmq import procfs
from shmq.errors import BadArgument, BadName, Gone, LayoutMismatch, NotReady
from shmq.layout import (
    FINGERPRINT,
    FLAG_EPHEMERAL,
    LAYOUT_VERSION,
    MAGIC,
    NONE,
    VERSION,
    Array,
    EntryState,
    Ready,
    Role,
    SegmentKind,
    constant,
    dtype,
    has_pages,
    text,
)
from shmq.settings import Settings

_TRIES = 5


def check_segment(buffer: Any, kind: int, what: str, size: int | None = None) -> None:
    """Check that the buffer is a whole and ready segment of this build. These are the core's own
    checks, for readers that go without the core. Raises LayoutMismatch, NotReady if the
    segment is being made, and Gone if it is closed. `what` names the segment in the error.
    size: the segment's bytes, if the buffer is only its beginning."""
    raw = memoryview(buffer)
    size = raw.nbytes if size is None else size
    head_type = dtype("segment")
    if raw.nbytes < head_type.itemsize:
        raise NotReady(f"{what}: only {raw.nbytes} bytes, its making was not finished")
    head = np.ndarray((), head_type, raw)
    magic, version = int(head["magic"]), int(head["layout_version"])
    if int(head["ready"]) == Ready.RAW and magic == 0:
        raise NotReady(f"{what}: not ready, its making was not finished; try again")
    if magic != MAGIC:
        raise LayoutMismatch(f"{what}: not made by shmq (magic {magic:#x})")
    if version != LAYOUT_VERSION:
        raise LayoutMismatch(
            f"{what}: layout version {version}, but this is shmq {VERSION} with layout version "
            f"{LAYOUT_VERSION}: use the shmq that made it, or let that one flush it "
            "(`shmq serve --drain`)"
        )
    if int(head["kind"]) != kind:
        raise LayoutMismatch(f"{what}: kind {int(head['kind'])} instead of {kind}")
    if int(head["fingerprint"]) != FINGERPRINT:
        raise LayoutMismatch(
            f"{what}: made by another build of shmq (compiler, C library or page size differ): "
            "run both sides from the same installation"
        )
    if int(head["ready"]) == Ready.CLOSED:
        raise Gone(f"{what}: closed")
    if int(head["ready"]) != Ready.READY:
        raise NotReady(f"{what}: not ready, its making was not finished; try again")
    if not 0 < int(head["size"]) <= size:
        raise LayoutMismatch(f"{what}: says {int(head['size'])} bytes but has {size}")


def _check_regions(header: Array, regions: dict[str, int], what: str) -> None:
    """Check that every region is aligned, after the header and within the segment."""
    size = int(header["segment"]["size"])
    for name, nbytes in regions.items():
        at = int(header[name])
        if at < header.dtype.itemsize or at % 8 or at + nbytes > size:
            raise LayoutMismatch(
                f"{what}: {name} is {at} (+ {nbytes} bytes) in a segment of {size}: damaged"
            )


class _View:
    """The base of both kinds of view. `buffer` stays mapped as long as any array lives."""

    KIND: int
    STRUCTURE: str

    def __init__(self, buffer: Any, what: str) -> None:
        check_segment(buffer, self.KIND, what)
        if memoryview(buffer).nbytes < dtype(self.STRUCTURE).itemsize:
            raise LayoutMismatch(f"{what}: shorter than its header")
        self._buffer = memoryview(buffer).toreadonly()
        self.what = what
        self._backed: dict[str, int] = {}  # region -> number of its entries that have pages
        self.header: Array = np.ndarray((), dtype(self.STRUCTURE), self._buffer)
        """The segment's header, a record array of no dimensions: `int(view.header["epoch"])`."""
        self.header_bytes = self._buffer.cast("B")[: self.header.dtype.itemsize]
        """The bytes of the header, for a reader that takes many fields at once."""

    @property
    def nbytes(self) -> int:
        """Number of mapped bytes; none of them is read."""
        return self._buffer.nbytes

    def read(self, field: str) -> int:
        """The present value of one field of the header."""
        return int(self.header[field])

    @property
    def closed(self) -> bool:
        """Whether the segment was removed: its contents are no longer valid."""
        return int(self.header["segment"]["ready"]) != Ready.READY

    def _place(self, at: str) -> int:
        """The offset of a region."""
        return self.read(at)

    def _array(self, kind: Any, at: str, count: int, most: int) -> Array:
        place = self._place(at)
        count, backed = min(count, most), self._backed.get(at, 0)
        if count > backed:
            if has_pages(self._buffer, place, count * kind.itemsize):
                self._backed[at] = count
            else:
                count = backed  # the count was overwritten
        return np.ndarray((count,), kind, self._buffer, place)


# ---- directory ----


@dataclass(frozen=True)
class TopicEntry:
    """A live topic of the directory."""

    index: int
    generation: int
    name: str
    paused: bool
    ephemeral: bool
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A live queue of the directory. channel is None for a topic's backlog."""

    index: int
    serial: int
    topic: int
    channel: str | None
    ephemeral: bool


@dataclass(frozen=True)
class StoreEntry:
    """A live results store of the directory."""

    index: int
    serial: int
    name: str
    max_keys: int
    max_bytes: int


class DirectoryView(_View):
    """The directory segment."""

    KIND = SegmentKind.DIRECTORY
    STRUCTURE = "directory"

    def __init__(self, buffer: Any, what: str = "directory segment") -> None:
        super().__init__(buffer, what)
        _check_regions(
            self.header,
            {
                "clients_at": dtype("client").itemsize * constant("CLIENTS"),
                "waiters_at": dtype("waiter").itemsize * constant("WAITERS"),
                "requests_at": dtype("request").itemsize * constant("REQUESTS"),
                "topics_at": dtype("topic").itemsize * constant("TOPICS"),
                "queues_at": dtype("entry").itemsize * constant("QUEUES"),
                "stores_at": dtype("store_entry").itemsize * constant("STORES"),
                "deadline_at": 8 * constant("QUEUES"),
                "due_at": 8 * constant("QUEUES"),
                "writers_at": dtype("writer").itemsize * constant("WRITERS"),
            },
            what,
        )

    @property
    def limits(self) -> Array:
        """The limits in force: nanoseconds, bytes and counts."""
        limits: Array = self.header["limits"]
        return limits

    @property
    def clients(self) -> Array:
        """Client entries, including free ones."""
        count = self.read("clients_committed")
        return self._array(dtype("client"), "clients_at", count, constant("CLIENTS"))

    @property
    def waiters(self) -> Array:
        """Waiter entries that were ever used."""
        count = self.read("waiters_high")
        return self._array(dtype("waiter"), "waiters_at", count, constant("WAITERS"))

    @property
    def requests(self) -> Array:
        """Request slots."""
        count = constant("REQUESTS")
        return self._array(dtype("request"), "requests_at", count, count)

    @property
    def topics(self) -> Array:
        """Topic entries, including free ones."""
        count = self.read("topics_committed")
        return self._array(dtype("topic"), "topics_at", count, constant("TOPICS"))

    @property
    def queues(self) -> Array:
        """Queue entries, including free ones. Row i belongs to queue i, here and in the two columns
        below."""
        count = self.read("queues_committed")
        return self._array(dtype("entry"), "queues_at", count, constant("QUEUES"))

    @property
    def next_deadline(self) -> Array:
        """Per queue: lower bound of its earliest in-flight deadline, CLOCK_MONOTONIC ns."""
        count = self.read("queues_committed")
        return self._array(np.dtype("<i8"), "deadline_at", count, constant("QUEUES"))

    @property
    def next_due(self) -> Array:
        """Per queue: lower bound of its earliest deferred due time, CLOCK_REALTIME ns."""
        count = self.read("queues_committed")
        return self._array(np.dtype("<i8"), "due_at", count, constant("QUEUES"))

    def topic_settings(self, index: int) -> Settings | None:
        """The settings of the queues that a topic gets later; None if they cannot be right."""
        return _settings(self.topics[index])

    @property
    def data_path(self) -> str:
        """The absolute path where the supervisor keeps its files; "" if it did not say."""
        return os.fsdecode(bytes(self.header["data_path"]).partition(b"\0")[0])

    @property
    def identity(self) -> str:
        """The identity of the instance's memory, which fresh memory has anew."""
        made = self.header["segment"]["instance"]
        return f"{int(made[0]):016x}@{int(made[1]):016x}"

    @property
    def seal_key(self) -> bytes:
        """The key of the instance's seals, which only who may attach can know."""
        return bytes(self.header["seal_key"])

    @property
    def disk_trouble(self) -> tuple[int, int]:
        """(errno, since) of writes that the data path refuses, `since` in seconds since 1970; (0,
        0) if it refuses none. Not valid while the supervisor is dead."""
        word = self.read("disk_trouble")
        return word & 0xFFFF, word >> 16

    @property
    def is_foreign(self) -> bool:
        """Whether its processes are in another PID namespace. Their pids mean nothing here then,
        and no process here can attach."""
        theirs = self.read("pid_namespace")
        return theirs not in (0, procfs.pid_namespace() or theirs)

    @property
    def free_clients(self) -> int:
        """How many more clients could attach: the value that the attach semaphore should have."""
        return constant("CLIENTS") - int(np.count_nonzero(self.clients["state"]))

    def live_topics(self) -> list[TopicEntry]:
        """The live topics, by index."""
        table = self.topics
        found = []
        for index in np.flatnonzero(table["state"] == EntryState.LIVE).tolist():
            row = table[index]
            found.append(
                TopicEntry(
                    index,
                    int(row["generation"]),
                    text(row["name"]),
                    bool(row["paused"]),
                    bool(row["flags"] & FLAG_EPHEMERAL),
                    int(row["messages"]),
                    int(row["bytes"]),
                )
            )
        return found

    @staticmethod
    def topic_marks(table: Array) -> npt.NDArray[np.int64]:
        """A number for each row of `topics`, another one whenever it becomes another topic; 0: it
        is free."""
        live = table["state"] == EntryState.LIVE
        marks: npt.NDArray[np.int64] = np.where(live, table["generation"].astype(np.int64) + 1, 0)
        return marks

    @staticmethod
    def topic_name(table: Array, index: int) -> str | None:
        """The name of the live topic in a row of `topics`; None: it is free."""
        row = table[index]
        return text(row["name"]) if int(row["state"]) == EntryState.LIVE else None

    def live_queues(self) -> list[QueueEntry]:
        """The live queues, by index."""
        return self.queues_in(EntryState.LIVE)

    def queues_in(self, state: EntryState) -> list[QueueEntry]:
        """The queues whose entries have this state, by index."""
        table = self.queues
        return [
            self._queue_entry(table, index)
            for index in np.flatnonzero(table["state"] == state).tolist()
        ]

    def live_stores(self) -> list[StoreEntry]:
        """The live results stores, by index."""
        table = self._array(
            dtype("store_entry"), "stores_at", constant("STORES"), constant("STORES")
        )
        found = []
        for index in np.flatnonzero(table["state"] == EntryState.LIVE).tolist():
            row = table[index]
            found.append(
                StoreEntry(
                    index,
                    int(row["serial"]),
                    text(row["name"]),
                    int(row["max_keys"]),
                    int(row["max_bytes"]),
                )
            )
        return found

    def find_topic(self, name: str) -> TopicEntry | None:
        """The live topic of this name; None if there is none."""
        return next((topic for topic in self.live_topics() if topic.name == name), None)

    def find_queue(self, topic: int, channel: str | None) -> QueueEntry | None:
        """The live queue of a channel, or (channel None) of the topic's backlog; None if there is
        none. topic: its index."""
        table = self.queues
        mine = (table["state"] == EntryState.LIVE) & (table["topic"] == topic)
        for index in np.flatnonzero(mine).tolist():
            entry = self._queue_entry(table, index)
            if entry.channel == channel:
                return entry
        return None

    def _queue_entry(self, table: Array, index: int) -> QueueEntry:
        row = table[index]
        is_channel = int(row["role"]) == Role.CHANNEL
        return QueueEntry(
            index,
            int(row["serial"]),
            int(row["topic"]),
            text(row["name"]) if is_channel else None,
            bool(row["flags"] & FLAG_EPHEMERAL),
        )


def _settings(record: Array) -> Settings | None:
    """The settings that hold, of a topic's entry or a queue's header. The two copies take turns, so
    one that is being read is written only when two changes come at once."""
    for _ in range(_TRIES):
        before = int(record["policy"])
        row = record["settings"][before & constant("POLICY_SECOND")].copy()
        if int(record["policy"]) == before:
            break
    fields = "max_messages max_bytes message_ttl retry_first retry_most max_attempts overflow flags"
    numbers = [int(row[name]) for name in fields.split()]
    try:
        return Settings.from_native((*numbers, text(row["dead_letter"])))  # type: ignore[arg-type]
    except (BadArgument, BadName, IndexError):
        return None


# ---- results store ----


class StoreView(_View):
    """The segment of a results store; its header has the counts."""

    KIND = SegmentKind.STORE
    STRUCTURE = "store"


# ---- queue ----


class QueueView(_View):
    """One queue segment."""

    KIND = SegmentKind.QUEUE
    STRUCTURE = "queue"
    _REGIONS: Final = {
        name: place
        for place, name in enumerate(
            (
                "slots_at",
                "ready_at",
                "defer_at",
                "requeue_at",
                "free_at",
                "in_flight_when_at",
                "deferred_when_at",
                "in_flight_slot_at",
                "deferred_slot_at",
                "sessions_at",
                "leases_at",
                "lease_holders_at",
                "latency_at",
                "arena_at",
            )
        )
    }

    def __init__(self, buffer: Any, what: str = "queue segment") -> None:
        super().__init__(buffer, what)
        self._slots_max = self.read("slots_max")
        self._ring_max = 1 << max(self._slots_max - 1, 0).bit_length()
        regions = {"slots_at": dtype("slot").itemsize * self._slots_max}
        regions |= dict.fromkeys(
            ("ready_at", "defer_at", "requeue_at", "free_at"), 4 * self._ring_max
        )
        regions |= dict.fromkeys(("in_flight_when_at", "deferred_when_at"), 8 * self._slots_max)
        regions |= dict.fromkeys(("in_flight_slot_at", "deferred_slot_at"), 4 * self._slots_max)
        regions["sessions_at"] = dtype("session").itemsize * constant("SESSIONS")
        regions["leases_at"] = dtype("lease").itemsize * constant("LEASES")
        regions["lease_holders_at"] = dtype("lease_holder").itemsize * constant("LEASE_HOLDERS")
        regions["latency_at"] = dtype("latency").itemsize
        regions["arena_at"] = self.read("arena_max")
        _check_regions(self.header, regions, what)
        # read once: the header may be damaged later; a process may have ten thousand of these
        self._places = array("Q", [self.read(name) for name in self._REGIONS])

    def _place(self, at: str) -> int:
        return self._places[self._REGIONS[at]]

    @property
    def slots(self) -> Array:
        """The slots, as far as their pages exist."""
        count = self.read("slots_committed")
        return self._array(dtype("slot"), "slots_at", count, self._slots_max)

    @property
    def sessions(self) -> Array:
        """Consumer sessions, including free ones."""
        count = self.read("sessions_committed")
        return self._array(dtype("session"), "sessions_at", count, constant("SESSIONS"))

    @property
    def leases(self) -> Array:
        """Lease entries, including free ones; empty before the channel's first lease."""
        most = constant("LEASES")
        return self._array(dtype("lease"), "leases_at", most * self.read("leases_committed"), most)

    @property
    def lease_holders(self) -> Array:
        """Entries of lease holders, including free ones."""
        most = constant("LEASE_HOLDERS")
        count = most * self.read("leases_committed")
        return self._array(dtype("lease_holder"), "lease_holders_at", count, most)

    @property
    def latency(self) -> Array:
        """Histograms of the time from publish to finish, as one structured scalar."""
        scalar: Array = self._array(dtype("latency"), "latency_at", 1, 1)[0]
        return scalar

    @property
    def arena(self) -> Array:
        """The bytes of the message bodies, as far as their pages exist."""
        count = self.read("arena_committed")
        return self._array(np.dtype("u1"), "arena_at", count, self.read("arena_max"))

    @property
    def settings(self) -> Settings | None:
        """The settings of the queue; None if they cannot be right."""
        return _settings(self.header)

    @property
    def base(self) -> str:
        """Base name of its files on disk."""
        return text(self.header["base"])

    @property
    def ready(self) -> Array:
        """Slots in the ready ring, oldest first."""
        return self._ring("ready")

    @property
    def defer(self) -> Array:
        """Slots published deferred and not yet in the heap, oldest first."""
        return self._ring("defer")

    @property
    def requeue(self) -> Array:
        """Slots in the requeue ring, next to be delivered first."""
        return self._ring("requeue")

    @property
    def free(self) -> Array:
        """Slots in the free ring, next to be used first."""
        return self._ring("free")

    @property
    def in_flight(self) -> tuple[Array, Array]:
        """The in-flight heap: deadlines (CLOCK_MONOTONIC ns) and slots. The earliest is first, the
        others are in heap order."""
        return self._heap("in_flight")

    @property
    def deferred(self) -> tuple[Array, Array]:
        """The deferred heap: due times (CLOCK_REALTIME ns) and slots. The earliest is first, the
        others are in heap order."""
        return self._heap("deferred")

    def ring_length(self, ring: str) -> int:
        """Number of entries of the ring `ready`, `defer`, `requeue` or `free`."""
        return self._ring_bounds(ring)[1]

    def _ring_bounds(self, ring: str) -> tuple[int, int, int]:
        """(head, length, mask) of the ring, read until they are consistent, a few times at most."""
        header = self.header
        for _ in range(4):
            head, tail = int(header[f"{ring}_head"]), int(header[f"{ring}_tail"])
            mask = int(header["ring_mask"])
            length = (tail - head) & NONE
            if length <= mask + 1 <= self._ring_max and int(header[f"{ring}_head"]) == head:
                return head, length, mask
        mask = min(mask, self._ring_max - 1)
        return head, (length if length <= mask + 1 else 0), mask

    def front(self, ring: str, most: int) -> Array:
        """Slots of the first entries of a ring, at most `most`."""
        return self._ring(ring, most)

    def _ring(self, ring: str, most: int = NONE) -> Array:
        head, length, mask = self._ring_bounds(ring)
        length = min(length, most)
        cells = self._array(np.dtype("<u4"), f"{ring}_at", mask + 1, self._ring_max)
        first = head & mask
        rest = length - (mask + 1 - first)
        if rest <= 0:
            order = cells[first : first + length].copy()
        else:
            order = np.concatenate((cells[first:], cells[:rest]))
        return self._existing(order)

    def _heap(self, heap: str) -> tuple[Array, Array]:
        count = min(self.read(f"{heap}_len"), self.read("slots_committed"))
        when = self._array(np.dtype("<i8"), f"{heap}_when_at", count, self._slots_max)
        slot = self._array(np.dtype("<u4"), f"{heap}_slot_at", count, self._slots_max)
        return when, slot

    def _existing(self, slots: Array) -> Array:
        """Drop entries that cannot be slots: the ring was changing."""
        good = slots < min(self.read("slots_committed"), self._slots_max)
        return slots if good.all() else slots[good]
