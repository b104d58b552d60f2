"""The segments as numpy sees them: dtypes and read-only views of what layout.h declares.

Nothing is copied and no lock is taken. A view never reaches beyond the `..._committed` words,
because on tmpfs even reading a hole allocates a page. What is read may be in the middle of a
change: counts can be off by what is moving, and ring entries are checked before they are used.
Who needs to be sure of a slot compares its state word before and after (see `peek`).

A view is taken from an attachment (`_native.Broker.view`) or, without a client entry and also
while no supervisor lives, from `open_readonly`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import os
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from shmq import _native, segments
from shmq.errors import Gone, LayoutMismatch, ShmqError

Array = npt.NDArray[Any]

MAGIC: Final = 0x0A0D31716D68731A
NONE: Final = 0xFFFFFFFF

LAYOUT_VERSION: Final = _native.LAYOUT_VERSION
VERSION: Final = _native.__version__

#: Of this build: segments of another one are refused.
FINGERPRINT: Final = _native.fingerprint()


class State(enum.IntEnum):
    """Low byte of a slot's state word; docs/protocol.md has the table."""

    FREE = 0
    LOANED = 1
    PREPARED = 2
    READY = 3
    INFLIGHT = 4
    DONE = 5
    DEFERRED = 6
    BACK = 7
    SPILLING = 8
    RESTORED = 9
    MOVING = 10
    LEASED = 11


class Role(enum.IntEnum):
    """What a queue is."""

    BACKLOG = 0
    CHANNEL = 1


class Kind(enum.IntEnum):
    """What a client is."""

    CLIENT = 0
    SUPERVISOR = 1
    GATEWAY = 2


class ClientState(enum.IntEnum):
    """Of a client entry."""

    FREE = 0
    LIVE = 1


class EntryState(enum.IntEnum):
    """Of a topic's or a queue's entry."""

    FREE = 0
    LIVE = 1
    DELETING = 2


class Ready(enum.IntEnum):
    """Of a segment."""

    RAW = 0
    READY = 1
    CLOSED = 2


FLAG_EPHEMERAL: Final = 1

_KIND_DIRECTORY: Final = 1
_KIND_QUEUE: Final = 2


# ---- dtypes ----

_dtypes: dict[str, np.dtype[Any]] = {}


def dtype(structure: str) -> np.dtype[Any]:
    """The numpy type of a structure of layout.h, by its name there without `shmq_` and `_desc`."""
    made = _dtypes.get(structure)
    if made is None:
        names, formats, offsets = [], [], []
        for name, (kind, offset, _size, count) in _native.LAYOUT[structure].items():
            item: Any = dtype(kind) if kind in _native.LAYOUT else np.dtype(kind)
            names.append(name)
            formats.append(item if count == 1 else (item, (count,)))
            offsets.append(offset)
        size = _native.SIZES[structure]
        made = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
        _dtypes[structure] = made
    return made


def constant(name: str) -> int:
    """A SHMQ_ number of layout.h or shmq.h, by its name there without `SHMQ_`."""
    return _native.CONSTANTS[name]


def has_pages(segment: Any, at: int, nbytes: int) -> bool:
    """Whether this part of a mapped segment can be read; its pages are made if there is room."""
    return _native.has_pages(segment, at, nbytes)


def state(words: Any) -> Any:
    """State of state words (one or a column)."""
    return words & np.uint64(0xFF)


def owner(words: Any) -> Any:
    """Client index in state words."""
    return (words >> np.uint64(8)) & np.uint64(0xFFFF)


def generation(words: Any) -> Any:
    """How often the slots were taken, from state words."""
    return words >> np.uint64(24)


def text(raw: Any) -> str:
    """A name field as text."""
    return bytes(raw).rstrip(b"\0").decode("ascii", "replace")


def names(column: Array) -> list[str]:
    """A column of name fields as text."""
    return [text(raw) for raw in column.tolist()]


# ---- checks ----


def check_segment(buffer: Any, kind: int, what: str) -> None:
    """Is this a segment of ours, whole and ready? What the core checks too, for who reads without
    it. LayoutMismatch; Gone if it is closed."""
    raw = memoryview(buffer)
    head_type = dtype("segment")
    if raw.nbytes < head_type.itemsize:
        raise LayoutMismatch(f"{what}: only {raw.nbytes} bytes, its making was not finished")
    head = np.ndarray((), head_type, raw)
    magic, version = int(head["magic"]), int(head["layout_version"])
    if int(head["ready"]) == Ready.RAW and magic == 0:
        raise LayoutMismatch(f"{what}: not ready, its making was not finished; try again")
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
    if int(head["fingerprint"]) != _native.fingerprint():
        raise LayoutMismatch(
            f"{what}: made by another build of shmq (compiler, C library or page size differ): "
            "run both sides from the same installation"
        )
    if int(head["ready"]) == Ready.CLOSED:
        raise Gone(f"{what}: closed")
    if int(head["ready"]) != Ready.READY:
        raise LayoutMismatch(f"{what}: not ready, its making was not finished; try again")
    if not 0 < int(head["size"]) <= raw.nbytes:
        raise LayoutMismatch(f"{what}: says {int(head['size'])} bytes but has {raw.nbytes}")


def _check_regions(header: Array, regions: dict[str, int], what: str) -> None:
    """Every region within the segment, behind the header, aligned."""
    size = int(header["segment"]["size"])
    for name, nbytes in regions.items():
        at = int(header[name])
        if at < header.dtype.itemsize or at % 8 or at + nbytes > size:
            raise LayoutMismatch(
                f"{what}: {name} is {at} (+ {nbytes} bytes) in a segment of {size}: damaged"
            )


class _View:
    """What both kinds of view have. `buffer` stays mapped as long as any array lives."""

    KIND: int
    STRUCTURE: str

    def __init__(self, buffer: Any, what: str) -> None:
        check_segment(buffer, self.KIND, what)
        if memoryview(buffer).nbytes < dtype(self.STRUCTURE).itemsize:
            raise LayoutMismatch(f"{what}: shorter than its header")
        self._buffer = memoryview(buffer).toreadonly()
        self.what = what
        self._places: dict[str, int] = {}  # of regions that do not move, whatever is there later
        self._backed: dict[str, int] = {}  # entries of them that have pages
        self.header: Array = np.ndarray((), dtype(self.STRUCTURE), self._buffer)
        """The segment's header, a record array of no dimensions: `int(view.header["epoch"])`."""

    @property
    def nbytes(self) -> int:
        """How many bytes are mapped; nothing of them is looked at."""
        return self._buffer.nbytes

    def read(self, field: str) -> int:
        """One number of the header, as it is now."""
        return int(self.header[field])

    @property
    def closed(self) -> bool:
        """Whether the segment was removed: nothing in it is of use any more."""
        return int(self.header["segment"]["ready"]) != Ready.READY

    def _array(self, kind: Any, at: str, count: int, most: int) -> Array:
        place = self._places[at] if at in self._places else self.read(at)
        count, backed = min(count, most), self._backed.get(at, 0)
        if count > backed:
            if has_pages(self._buffer, place, count * kind.itemsize):
                self._backed[at] = count
            else:
                count = backed  # something has overwritten the count
        return np.ndarray((count,), kind, self._buffer, place)


# ---- directory ----


@dataclass(frozen=True)
class TopicEntry:
    """A live topic as found in the directory."""

    index: int
    generation: int
    name: str
    paused: bool
    ephemeral: bool
    messages: int
    bytes: int


@dataclass(frozen=True)
class QueueEntry:
    """A live queue as found in the directory. channel is None for a topic's backlog."""

    index: int
    serial: int
    topic: int
    channel: str | None
    ephemeral: bool


class DirectoryView(_View):
    """The directory segment."""

    KIND = _KIND_DIRECTORY
    STRUCTURE = "directory"

    def __init__(self, buffer: Any, what: str = "directory segment") -> None:
        super().__init__(buffer, what)
        _check_regions(
            self.header,
            {
                "clients_at": _native.SIZES["client"] * constant("CLIENTS"),
                "waiters_at": _native.SIZES["waiter"] * constant("WAITERS"),
                "requests_at": _native.SIZES["request"] * constant("REQUESTS"),
                "topics_at": _native.SIZES["topic"] * constant("TOPICS"),
                "queues_at": _native.SIZES["entry"] * constant("QUEUES"),
                "deadline_at": 8 * constant("QUEUES"),
                "due_at": 8 * constant("QUEUES"),
                "writers_at": _native.SIZES["writer"] * constant("WRITERS"),
            },
            what,
        )

    @property
    def limits(self) -> Array:
        """What the data path was told: nanoseconds, bytes, counts."""
        limits: Array = self.header["limits"]
        return limits

    @property
    def clients(self) -> Array:
        """Client entries, free ones too."""
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
        """Topic entries, free ones too."""
        count = self.read("topics_committed")
        return self._array(dtype("topic"), "topics_at", count, constant("TOPICS"))

    @property
    def queues(self) -> Array:
        """Queue entries, free ones too. Row i belongs to queue i, as in the two columns."""
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

    @property
    def data_path(self) -> str:
        """Where the supervisor keeps its files, absolute; "" if it was not told."""
        return os.fsdecode(bytes(self.header["data_path"]).partition(b"\0")[0])

    @property
    def disk_trouble(self) -> tuple[int, int]:
        """What the data path refuses: errno, and since when (seconds since 1970); (0, 0): nothing.
        Means nothing while the supervisor is dead."""
        word = self.read("disk_trouble")
        return word & 0xFFFF, word >> 16

    @property
    def is_foreign(self) -> bool:
        """Whether its processes are in another PID namespace, so that their pids mean nothing here
        and nobody here can attach."""
        theirs = self.read("pid_namespace")
        return theirs not in (0, pid_namespace() or theirs)

    @property
    def free_clients(self) -> int:
        """How many more clients could attach: what the attach semaphore should say."""
        return constant("CLIENTS") - int(np.count_nonzero(self.clients["state"]))

    def live_topics(self) -> list[TopicEntry]:
        """The topics there are now, by index."""
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

    def live_queues(self) -> list[QueueEntry]:
        """The queues there are now, by index."""
        table = self.queues
        return [
            self._queue_entry(table, index)
            for index in np.flatnonzero(table["state"] == EntryState.LIVE).tolist()
        ]

    def find_topic(self, name: str) -> TopicEntry | None:
        """The live topic of this name."""
        return next((topic for topic in self.live_topics() if topic.name == name), None)

    def find_queue(self, topic: int, channel: str | None) -> QueueEntry | None:
        """The live queue of a channel, or (None) of the topic's backlog."""
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


# ---- queue ----


class QueueView(_View):
    """One queue segment."""

    KIND = _KIND_QUEUE
    STRUCTURE = "queue"

    def __init__(self, buffer: Any, what: str = "queue segment") -> None:
        super().__init__(buffer, what)
        self._slots_max = self.read("slots_max")
        self._ring_max = 1 << max(self._slots_max - 1, 0).bit_length()
        regions = {"slots_at": _native.SIZES["slot"] * self._slots_max}
        regions |= dict.fromkeys(
            ("ready_at", "defer_at", "requeue_at", "free_at"), 4 * self._ring_max
        )
        regions |= dict.fromkeys(("inflight_when_at", "deferred_when_at"), 8 * self._slots_max)
        regions |= dict.fromkeys(("inflight_slot_at", "deferred_slot_at"), 4 * self._slots_max)
        regions["sessions_at"] = _native.SIZES["session"] * constant("SESSIONS")
        regions["leases_at"] = _native.SIZES["lease"] * constant("LEASES")
        regions["lessees_at"] = _native.SIZES["lessee"] * constant("LESSEES")
        regions["latency_at"] = _native.SIZES["latency"]
        regions["arena_at"] = self.read("arena_max")
        _check_regions(self.header, regions, what)
        self._places |= {name: self.read(name) for name in regions}

    @property
    def slots(self) -> Array:
        """The slots whose pages exist."""
        count = self.read("slots_committed")
        return self._array(dtype("slot"), "slots_at", count, self._slots_max)

    @property
    def sessions(self) -> Array:
        """Consumer sessions, free ones too."""
        count = self.read("sessions_committed")
        return self._array(dtype("session"), "sessions_at", count, constant("SESSIONS"))

    @property
    def leases(self) -> Array:
        """Lease entries, free ones too; none before the channel's first."""
        most = constant("LEASES")
        return self._array(dtype("lease"), "leases_at", most * self.read("leases_committed"), most)

    @property
    def lessees(self) -> Array:
        """Who leases, free entries too."""
        most = constant("LESSEES")
        count = most * self.read("leases_committed")
        return self._array(dtype("lessee"), "lessees_at", count, most)

    @property
    def latency(self) -> Array:
        """Histograms of the time from publish to finish (one structured scalar)."""
        scalar: Array = self._array(dtype("latency"), "latency_at", 1, 1)[0]
        return scalar

    @property
    def arena(self) -> Array:
        """Bytes of message bodies, as far as their pages exist."""
        count = self.read("arena_committed")
        return self._array(np.dtype("u1"), "arena_at", count, self.read("arena_max"))

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
        """Slots in the requeue ring, first to go first."""
        return self._ring("requeue")

    @property
    def free(self) -> Array:
        """Slots in the free ring, next to be used first."""
        return self._ring("free")

    @property
    def in_flight(self) -> tuple[Array, Array]:
        """The in-flight heap: deadlines (CLOCK_MONOTONIC ns) and slots, the earliest first, the
        others in heap order."""
        return self._heap("inflight")

    @property
    def deferred(self) -> tuple[Array, Array]:
        """The deferred heap: due times (CLOCK_REALTIME ns) and slots, the earliest first, the
        others in heap order."""
        return self._heap("deferred")

    def ring_length(self, ring: str) -> int:
        """Entries of the ring `ready`, `defer`, `requeue` or `free`."""
        return self._ring_bounds(ring)[1]

    def _ring_bounds(self, ring: str) -> tuple[int, int, int]:
        """(head, length, mask) that were true together, or nearly."""
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
        """Slots of its first entries."""
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
        """Without entries that cannot be slots: the ring was being changed."""
        good = slots < min(self.read("slots_committed"), self._slots_max)
        return slots if good.all() else slots[good]


_NEVER = np.iinfo(np.int64).max

# ---- looking at leases ----


@dataclass(frozen=True)
class LeaseEntry:
    """An open lease, as found in a queue."""

    id: int
    parent: int
    lessee: str
    count: int
    on_disk: int
    """Of `count`."""
    bytes: int
    parts: int
    replays: int
    since: int
    """CLOCK_REALTIME ns."""
    pid: int
    """Of the process that has the name now; 0: nobody has."""
    deadline: int | None
    """When it goes back unless there is a sign of life, CLOCK_MONOTONIC ns; None: never."""


def run_length(header: Array) -> int:
    """How many messages are leased where they lie on disk, by a queue's header."""
    run = header["run"]
    in_force = int(run["lease"]) and int(run["from"]) == int(header["disk_read"])
    return int(run["count"]) if in_force else 0


def open_leases(view: QueueView) -> list[LeaseEntry]:
    """The open leases of a queue, the oldest first."""
    table, lessees = view.leases.copy(), view.lessees.copy()
    words = table["word"]
    held = np.flatnonzero((words & np.uint64(0xFF)) == constant("LEASE_HELD"))
    found = []
    for index in held[np.argsort(words[held])].tolist():
        row = table[index]
        lessee = lessees[int(row["lessee"]) % len(lessees)]
        deadline = int(lessee["deadline"])
        found.append(
            LeaseEntry(
                id=int(row["word"]) >> 8,
                parent=int(row["parent"]),
                lessee=text(lessee["name"]),
                count=int(row["count"]) + int(row["on_disk"]),
                on_disk=int(row["on_disk"]),
                bytes=int(row["bytes"]),
                parts=int(row["parts"]),
                replays=int(row["replays"]),
                since=int(row["since"]),
                pid=int(lessee["pid"]) if lessee["client"] else 0,
                deadline=None if deadline == _NEVER else deadline,
            )
        )
    return found


# ---- looking at messages ----


@dataclass(frozen=True)
class Peeked:
    """A message somebody else may be taking right now. Nothing was changed by looking at it.

    timestamp: publish time, ns since 1970. attempts: deliveries so far. due: when a deferred
    message becomes ready (ns since 1970), else None. Of one in flight, else None: deadline, when it
    times out (CLOCK_MONOTONIC ns, None: never); client, index of the consumer's client entry; pid,
    of that process, if it is still attached; since and until, when it was taken and when it times
    out (ns since 1970; until None: never).
    """

    id: str
    timestamp: int
    attempts: int
    body: bytes
    state: str
    due: int | None = None
    deadline: int | None = None
    client: int | None = None
    pid: int | None = None
    since: int | None = None
    until: int | None = None


#: What a message can be peeked at as, and the states of the slots that are shown then.
PEEK_STATES: Final[dict[str, tuple[State, ...]]] = {
    "ready": (State.READY, State.BACK),
    "in_flight": (State.INFLIGHT,),
    "deferred": (State.DEFERRED,),
}

#: What `peek` can be asked for: also for a part of "ready".
PEEK_NAMES: Final = {**PEEK_STATES, "back": (State.BACK,)}


def peek(
    view: QueueView, state: str = "ready", n: int = 10, clients: Array | None = None
) -> list[Peeked]:
    """Up to n messages in memory, without taking them; disk is not looked at.

    "ready" in the order of delivery, "back" those of them that were handed out before or come from
    disk, "in_flight" (or "inflight") by deadline, "deferred" by due time. A message that moves
    while it is read is left out. clients: the directory's client entries, to know pids from.
    ValueError for another state.
    """
    state = "in_flight" if state == "inflight" else state
    if state not in PEEK_NAMES:
        raise ValueError(f"state must be one of {', '.join(PEEK_NAMES)}, not {state!r}")
    if state == "ready":
        candidates = np.concatenate((view.requeue, view.ready))
    elif state == "back":
        candidates = view.requeue
    elif state == "in_flight":
        candidates = _by_time(view, *view.in_flight)
    else:
        due, heap = view.deferred
        ring = view.defer
        when = np.concatenate((due, view.slots["deadline"][ring]))
        candidates = _by_time(view, when, np.concatenate((heap, ring)))
    slots = view.slots
    found: list[Peeked] = []
    for index in candidates.tolist():
        if len(found) >= n:
            break
        if index < len(slots):
            message = _copy(view, slots[index : index + 1], PEEK_NAMES[state], clients)
            if message is not None:
                found.append(message)
    return found


def _by_time(view: QueueView, when: Array, slots: Array) -> Array:
    order: Array = slots[np.argsort(when, kind="stable")]
    return order


def _copy(
    view: QueueView, slot: Array, states: tuple[State, ...], clients: Array | None
) -> Peeked | None:
    """The message in a slot, or None if it is in another state or changed meanwhile."""
    before = slot.copy()[0]
    now = State(int(state(before["word"]))) if int(state(before["word"])) in _KNOWN else State.FREE
    if now not in states:
        return None
    at, length = int(before["body"]), int(before["length"])
    arena = view.arena
    if at + length > len(arena):
        return None
    body = arena[at : at + length].tobytes() if length else b""
    after = slot.copy()[0]
    if any(after[field] != before[field] for field in ("word", "id", "body", "length")):
        return None
    when = int(before["deadline"])
    in_flight = now is State.INFLIGHT
    has_end = in_flight and when != _NEVER
    holder = int(owner(before["word"]))
    return Peeked(
        id=f"{int(before['id']):016x}",
        timestamp=int(before["timestamp"]),
        attempts=int(before["attempts"]),
        body=body,
        state={State.INFLIGHT: "in_flight", State.DEFERRED: "deferred"}.get(now, "ready"),
        due=when if now is State.DEFERRED else None,
        deadline=when if has_end else None,
        client=holder if in_flight else None,
        pid=_pid_of(clients, holder) if in_flight else None,
        since=_real(int(before["delivered"])) if in_flight else None,
        until=_real(when) if has_end else None,
    )


def _pid_of(clients: Array | None, index: int) -> int | None:
    if clients is None or index >= len(clients) or clients[index]["state"] != ClientState.LIVE:
        return None
    return int(clients[index]["pid"])


def _real(monotonic: int) -> int:
    """A time of CLOCK_MONOTONIC as one of CLOCK_REALTIME, by how far off it is now (ns)."""
    return time.time_ns() + monotonic - time.clock_gettime_ns(time.CLOCK_MONOTONIC)


_KNOWN = frozenset(State)


# ---- where views come from ----


class Source(Protocol):
    """A directory and its queues, however they were mapped."""

    @property
    def instance(self) -> str:
        """Its name."""

    @property
    def directory(self) -> DirectoryView:
        """The directory segment."""

    def queue(self, entry: QueueEntry) -> QueueView:
        """A queue's segment. Gone if it was deleted meanwhile."""


class NativeSource:
    """Views through an attachment: what is mapped already costs nothing more."""

    def __init__(self, instance: str, native: _native.Broker) -> None:
        self.instance = instance
        self._native = native
        self.directory = DirectoryView(native.view(), f"instance {instance!r}")

    def queue(self, entry: QueueEntry) -> QueueView:
        """A queue's segment. Gone if it was deleted meanwhile."""
        view = QueueView(self._native.view(entry.index), f"queue {entry.serial}")
        if int(view.header["segment"]["serial"]) != entry.serial:
            raise Gone(f"queue {entry.serial} of instance {self.instance!r} was deleted")
        return view


class ReadOnlySource:
    """An instance's segments mapped read-only, without a client entry: `shmq stat`, `shmq peek`.

    Works while the supervisor is dead. A context manager; arrays taken from its views stay valid
    after it is closed.
    """

    def __init__(
        self, instance: str, buffer: mmap.mmap, owners: Collection[int] | None = None
    ) -> None:
        """owners: uids that may have made its queues; None: as `segments.open_segment`."""
        self.instance = instance
        self._owners = owners
        self.directory = DirectoryView(buffer, f"instance {instance!r}")
        self._queues: dict[int, QueueView] = {}

    def queue(self, entry: QueueEntry) -> QueueView:
        """A queue's segment, mapped once. Gone if it was deleted meanwhile."""
        view = self._queues.get(entry.serial)
        if view is None or view.closed:
            self._queues.pop(entry.serial, None)
            what = f"queue {entry.serial} of instance {self.instance!r}"
            try:
                fd = segments.open_queue(
                    self.instance, entry.serial, read_only=True, owners=self._owners
                )
            except FileNotFoundError:
                raise Gone(f"{what} was deleted") from None
            view = self._queues[entry.serial] = QueueView(_map(fd, what), what)
        return view

    def close(self) -> None:
        """Forget the views; pages are unmapped when nobody holds an array of them."""
        self._queues.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_readonly(instance: str | None = None, owner: str | int | None = None) -> ReadOnlySource:
    """Map an instance's directory read-only. NotRunning if there is none, LayoutMismatch;
    ShmqError if it belongs to neither this user nor root nor `owner` (None: SHMQ_OWNER)."""
    instance = instance or segments.default_instance()
    fd = segments.open_directory(instance, read_only=True, owner=owner)
    owners = frozenset({os.fstat(fd).st_uid})
    return ReadOnlySource(instance, _map(fd, f"instance {instance!r}"), owners)


def _map(fd: int, what: str) -> mmap.mmap:
    """The whole segment behind `fd`, which is closed."""
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            raise LayoutMismatch(f"{what}: empty, its making was not finished; try again")
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    except OSError as exc:
        if exc.errno != errno.ENOMEM:
            raise
        raise ShmqError(
            f"{what}: mapping {size} bytes was refused: raise the address space limit of this "
            "process (RLIMIT_AS, `ulimit -v`)"
        ) from exc
    finally:
        os.close(fd)


def data_path_left(instance: str) -> str:
    """Where an instance whose supervisor is dead has its files; "" if there is none, or that is not
    known or not ours to read.

    Whoever may attach can have written there: only a directory of this user is believed, so that
    nobody has us write through links of his own.
    """
    with contextlib.suppress(ShmqError, OSError), open_readonly(instance) as source:
        path = source.directory.data_path
        if path and not supervisor_alive(source.directory):
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), 0):
                return path
    return ""


def half_made(instance: str) -> bool:
    """Whether the directory segment is there but its making has not come to its end (yet)."""
    try:
        fd = segments.open_directory(instance, read_only=True)
    except ShmqError:
        return False
    try:
        kind = dtype("segment")
        head = np.frombuffer(os.pread(fd, kind.itemsize, 0).ljust(kind.itemsize, b"\0"), kind)[0]
    finally:
        os.close(fd)
    return int(head["magic"]) in (0, MAGIC) and int(head["ready"]) == Ready.RAW


# ---- processes ----

_SILENT_NS = 5 * 10**9  # a supervisor's heartbeat comes four times a second


def process_start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it is not there or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def pid_namespace() -> int:
    """This process's PID namespace, by its inode; 0: it cannot be told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def supervisor_alive(directory: DirectoryView) -> bool:
    """Does the supervisor's process live, by pid and start time? (An attachment knows exactly.) In
    another PID namespace: did it show that it runs, lately? Nothing may be taken from it by that.
    """
    if directory.is_foreign:
        silent = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - directory.read("heartbeat")
        return silent < _SILENT_NS and not directory.closed
    pid = directory.read("supervisor_pid")
    return pid > 0 and process_start_time(pid) == directory.read("supervisor_start_time")


def live_queues(source: Source) -> Iterator[tuple[QueueEntry, QueueView]]:
    """Every queue with its segment, without those deleted meanwhile."""
    for entry in source.directory.live_queues():
        with contextlib.suppress(Gone, LayoutMismatch):
            yield entry, source.queue(entry)
