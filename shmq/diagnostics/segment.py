"""Diagnosis of a shared segment: its header, its tables, and the places where they disagree.

The segment is only read. The header is read by `pread`, which allocates no page of a hole. The rest
is mapped after its offsets have been checked, and read only as far as the header says is committed.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import numpy as np

from shmq import layout, names, peek, procfs, shm
from shmq.diagnostics.findings import Damage, Report, Table
from shmq.diagnostics.readable import body_field, moment
from shmq.errors import ShmqError
from shmq.layout import ClientKind, ClientState, EntryState, Ready, Role, State
from shmq.storage.positions import unpack
from shmq.views import DirectoryView, QueueView

_LOOKS = 3  # at a segment in use; a damage counts only if each look finds it
_BETWEEN = 0.02  # seconds
_STRUCTURES = {1: "directory", 2: "queue", 3: "store"}  # by kind
_FIRST_UNKNOWN = len(State)

#: Ring or heap -> the state of all its messages.
_RINGS = {
    "ready": State.READY,
    "requeue": State.REQUEUED,
    "defer": State.DEFERRED,
    "free": State.FREE,
}
_HEAPS = {"in_flight": State.IN_FLIGHT, "deferred": State.DEFERRED}
#: States in which a slot has a body.
_WITH_BODY = (State.READY, State.REQUEUED, State.IN_FLIGHT, State.DEFERRED, State.SPILLING)


def boot_id() -> tuple[int, int]:
    """The id of this boot as segment headers store it; (0, 0) if the kernel does not tell it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            digits = file.read().strip().replace("-", "")
        return int(digits[:16], 16), int(digits[16:32], 16)
    except (OSError, ValueError):
        return 0, 0


def is_other_boot(boot: tuple[int, ...]) -> bool:
    """Returns true if a segment with this boot id was made before the last boot, or on another
    machine."""
    this = boot_id()
    return any(this) and boot != this


def head_of(fd: int) -> Any:
    """The fields that both kinds of segment begin with; zeros after the end of a short file."""
    kind = layout.dtype("segment")
    return np.frombuffer(os.pread(fd, kind.itemsize, 0).ljust(kind.itemsize, b"\0"), kind)[0]


def looks_like(head: bytes) -> bool:
    """Returns true if these first bytes are those of a segment."""
    return int.from_bytes(head[:8], "little") == layout.MAGIC


def read(fd: int, count: int) -> Report:
    """Report on the segment that is open as `fd`. count: rows of each long table."""
    report = _look(fd, count)
    if "supervisor" not in report.facts and "mem queue size" not in report.facts:
        return report
    for _ in range(_LOOKS - 1):
        if not report.damage:
            break
        time.sleep(_BETWEEN)
        again = _look(fd, count)
        texts: set[Damage] = set(again.damage)
        again.damage = [damage for damage in report.damage if damage in texts]
        report = again
    return report


def _look(fd: int, count: int) -> Report:
    report = Report("shared segment")
    size = os.fstat(fd).st_size
    kind = layout.dtype("segment")
    raw = os.pread(fd, kind.itemsize, 0)
    report.facts["size"] = size
    if len(raw) < kind.itemsize:
        report.hurt(0, f"only {len(raw)} bytes: its creation was not finished")
        return report
    head = np.frombuffer(raw, kind)[0]
    if not _head(report, head, size):
        return report
    structure = _STRUCTURES[int(head["kind"])]
    report.kind = f"{structure} segment"
    if size < layout.dtype(structure).itemsize:
        report.hurt(size, f"ends within its header of {layout.dtype(structure).itemsize} bytes")
        return report
    header = _header(fd, structure)
    _FACTS[structure](report, header)
    if not _regions(report, header, size, _REGIONS[structure](header)):
        return report
    state = int(head["ready"])
    if state != Ready.READY or structure == "store":
        return report
    try:
        buffer = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        if structure == "directory":
            directory = DirectoryView(buffer)
            tables = {
                "clients": directory.clients,
                "topics": directory.topics,
                "queues": directory.queues,
            }
            _pages(report, directory, tables)
            _directory(report, directory)
        else:
            queue = QueueView(buffer)
            tables = {"slots": queue.slots, "sessions": queue.sessions, "arena": queue.arena}
            _pages(report, queue, tables)
            _queue(report, queue, buffer, count)
    except (ShmqError, OSError, ValueError) as exc:
        report.hurt(None, f"cannot be read: {exc}")
    return report


def _header(fd: int, structure: str) -> Any:
    kind = layout.dtype(structure)
    return np.frombuffer(os.pread(fd, kind.itemsize, 0), kind)[0]


def _offset(structure: str, field: str) -> int:
    fields = layout.dtype(structure).fields
    assert fields is not None
    return int(fields[field][1])


# ---- the header of both kinds ----


def _head(report: Report, head: Any, size: int) -> bool:
    """Report the first bytes. Returns true if the rest can be understood."""
    at = {field: _offset("segment", field) for field in layout.dtype("segment").names or ()}
    version, state = int(head["layout_version"]), int(head["ready"])
    boot = tuple(int(word) for word in head["boot_id"])
    report.facts |= {
        "layout version": version,
        "fingerprint": f"{int(head['fingerprint']):016x}",
        "state": Ready(state).name if state in set(Ready) else str(state),
        "instance id": "".join(f"{int(word):016x}" for word in head["instance"]),
        "boot": "this" if boot == boot_id() else "another",
        "serial": int(head["serial"]),
    }
    if int(head["magic"]) != layout.MAGIC:
        if not int(head["magic"]) and state == Ready.RAW:
            report.hurt(at["magic"], "no magic number: its creation was not finished")
        else:
            report.hurt(at["magic"], f"magic {int(head['magic']):#x}: not made by shmq")
        return False
    if version != layout.LAYOUT_VERSION:
        report.notes.append(
            f"layout version {version}: this shmq {layout.VERSION} only knows "
            f"{layout.LAYOUT_VERSION}; look at it with the release that made it"
        )
        return False
    if int(head["fingerprint"]) != layout.FINGERPRINT:
        report.notes.append(
            "made by another build of shmq (compiler, C library or page size differ); only its "
            "first bytes can be read"
        )
        return False
    if state not in set(Ready):
        report.hurt(at["ready"], f"state {state} does not exist")
    elif state == Ready.RAW:
        report.hurt(at["ready"], "not ready: its creation was not finished")
    elif state == Ready.CLOSED:
        report.notes.append("closed: it was removed, and its contents are void")
    if int(head["size"]) != size:
        report.hurt(at["size"], f"says {int(head['size'])} bytes but has {size}")
    if report.facts["boot"] == "another":
        report.notes.append("made before the last boot: its locks are void, nobody can use it")
    if int(head["kind"]) not in _STRUCTURES:
        report.hurt(at["kind"], f"kind {int(head['kind'])} does not exist")
        return False
    return True


# ---- regions ----

Region = tuple[int, int]  # bytes of one entry, entries


def _directory_regions(header: Any) -> dict[str, Region]:
    found = {
        field: (layout.dtype(structure).itemsize, layout.constant(table))
        for field, structure, table in (
            ("clients_at", "client", "CLIENTS"),
            ("waiters_at", "waiter", "WAITERS"),
            ("requests_at", "request", "REQUESTS"),
            ("topics_at", "topic", "TOPICS"),
            ("queues_at", "entry", "QUEUES"),
            ("writers_at", "writer", "WRITERS"),
            ("stores_at", "store_entry", "STORES"),
        )
    }
    return found | dict.fromkeys(("deadline_at", "due_at"), (8, layout.constant("QUEUES")))


def _queue_regions(header: Any) -> dict[str, Region]:
    slots = int(header["slots_max"])
    ring = 1 << max(slots - 1, 0).bit_length()
    return {
        "slots_at": (layout.dtype("slot").itemsize, slots),
        **dict.fromkeys(("ready_at", "defer_at", "requeue_at", "free_at"), (4, ring)),
        **dict.fromkeys(("in_flight_when_at", "deferred_when_at"), (8, slots)),
        **dict.fromkeys(("in_flight_slot_at", "deferred_slot_at"), (4, slots)),
        "sessions_at": (layout.dtype("session").itemsize, layout.constant("SESSIONS")),
        "leases_at": (layout.dtype("lease").itemsize, layout.constant("LEASES")),
        "lease_holders_at": (
            layout.dtype("lease_holder").itemsize,
            layout.constant("LEASE_HOLDERS"),
        ),
        "latency_at": (layout.dtype("latency").itemsize, 1),
        "arena_at": (1, int(header["arena_max"])),
    }


def _store_regions(header: Any) -> dict[str, Region]:
    entries = int(header["entries_max"])
    return {
        "buckets_at": (4, 1 << max(entries - 1, 0).bit_length()),
        "entries_at": (layout.dtype("result").itemsize, entries),
        "arena_at": (1, int(header["arena_max"])),
    }


_REGIONS = {"directory": _directory_regions, "queue": _queue_regions, "store": _store_regions}

#: Header field with the committed entries of a table -> its maximum (a field or a constant).
_COMMITTED: dict[str, dict[str, str]] = {
    "directory": {
        "clients_committed": "CLIENTS",
        "waiters_high": "WAITERS",
        "topics_committed": "TOPICS",
        "queues_committed": "QUEUES",
    },
    "queue": {
        "slots_committed": "slots_max",
        "sessions_committed": "SESSIONS",
        "arena_committed": "arena_max",
    },
    "store": {
        "entries_committed": "entries_max",
        "arena_committed": "arena_max",
        "keys": "max_keys",
    },
}


def _regions(report: Report, header: Any, size: int, regions: dict[str, Region]) -> bool:
    """Report regions that do not fit in the segment. Returns true if all fit."""
    structure = report.kind.split()[0]
    before = len(report.damage)
    for name, (width, entries) in regions.items():
        at, nbytes = int(header[name]), width * entries
        if at < header.dtype.itemsize or at % 8 or at + nbytes > size:
            report.hurt(
                _offset(structure, name),
                f"{name} is {at} (+ {nbytes} bytes) in a segment of {size}",
            )
    good = len(report.damage) == before
    for name, most_of in _COMMITTED[structure].items():
        most = int(header[most_of]) if most_of.islower() else layout.constant(most_of)
        if int(header[name]) > most:
            report.hurt(
                _offset(structure, name), f"{name} is {int(header[name])}, more than {most}"
            )
    return good


def _pages(report: Report, view: DirectoryView | QueueView, tables: dict[str, Any]) -> None:
    """Report tables whose committed entries are not all backed by pages."""
    for name, table in tables.items():
        word = f"{name}_committed"
        most_of = _COMMITTED[view.STRUCTURE][word]
        most = view.read(most_of) if most_of.islower() else layout.constant(most_of)
        if len(table) < min(view.read(word), most):
            report.hurt(
                _offset(view.STRUCTURE, word),
                f"{word} is {view.read(word)}, but not all of them have pages",
            )


# ---- directory ----


def _directory_facts(report: Report, header: Any) -> None:
    pid = int(header["supervisor_pid"])
    start = int(header["supervisor_start_time"])
    alive = pid > 0 and procfs.start_time(pid) == start
    age = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - int(header["heartbeat"])
    limits = header["limits"]
    report.facts |= {
        "supervisor": pid,
        "supervisor alive": alive,
        "supervisor since": moment(int(header["supervisor_since"])),
        "heartbeat age": f"{max(age, 0) / 1e9:.3f} s",
        "epoch": int(header["epoch"]),
        "stopping": bool(header["stopping"]),
        "generation": int(header["generation"]),
        "next serial": int(header["next_serial"]),
        "pid namespace": int(header["pid_namespace"]),
        "reaped clients": int(header["reaped"]),
        "rebuilt queues": int(header["rebuilt"]),
        **{f"limit {name}": int(limits[name]) for name in limits.dtype.names or ()},
    }


def _directory(report: Report, view: DirectoryView) -> None:
    topics = _topics(report, view)
    _entries(report, view, topics)
    _clients(report, view)


def _topics(report: Report, view: DirectoryView) -> dict[int, str]:
    """Report the topics. Returns the names of the live ones by index."""
    table, at = view.topics, view.read("topics_at")
    width = table.dtype.itemsize
    _states(report, table["state"], len(EntryState), at, width, "topic")
    shown = report.tables["topics"] = Table(["INDEX", "TOPIC", "PAUSED", "MESSAGES", "BYTES"])
    found: dict[int, str] = {}
    for topic in view.live_topics():
        if not names.valid_name(topic.name):
            offset = at + topic.index * width + _offset("topic", "name")
            report.hurt(offset, f"topic {topic.index} is called {topic.name!r}")
        elif topic.name in found.values():
            report.hurt(at + topic.index * width, f"there is another topic {topic.name!r}")
        found[topic.index] = topic.name
        shown.rows.append([topic.index, topic.name, topic.paused, topic.messages, topic.bytes])
    return found


def _entries(report: Report, view: DirectoryView, topics: dict[int, str]) -> None:
    table, at = view.queues, view.read("queues_at")
    width = table.dtype.itemsize
    _states(report, table["state"], len(EntryState), at, width, "queue")
    shown = report.tables["queues"] = Table(["INDEX", "SERIAL", "TOPIC", "CHANNEL"])
    serials: dict[int, int] = {}
    named: set[tuple[int, str | None]] = set()
    for queue in view.live_queues():
        offset, row = at + queue.index * width, table[queue.index]
        if queue.topic not in topics:
            report.hurt(
                offset + _offset("entry", "topic"),
                f"queue {queue.index} is of topic {queue.topic}, which is not there",
            )
        if int(row["role"]) not in set(Role):
            report.hurt(
                offset + _offset("entry", "role"), f"queue {queue.index}: role {int(row['role'])}"
            )
        elif queue.channel is not None and not names.valid_name(queue.channel):
            report.hurt(
                offset + _offset("entry", "name"),
                f"queue {queue.index} is called {queue.channel!r}",
            )
        if queue.serial in serials:
            report.hurt(
                offset + _offset("entry", "serial"),
                f"queue {queue.index} has the serial {queue.serial} of {serials[queue.serial]}",
            )
        elif shm.serial_number(queue.serial) >= view.read("next_serial"):
            report.hurt(
                offset + _offset("entry", "serial"),
                f"queue {queue.index} has a serial not yet given, {queue.serial}",
            )
        if (queue.topic, queue.channel) in named:
            report.hurt(offset, f"queue {queue.index} is there twice by name")
        serials[queue.serial] = queue.index
        named.add((queue.topic, queue.channel))
        topic, channel = topics.get(queue.topic, "?"), queue.channel or ""
        shown.rows.append([queue.index, queue.serial, topic, channel])


def _clients(report: Report, view: DirectoryView) -> None:
    table, at = view.clients, view.read("clients_at")
    _states(report, table["state"], len(ClientState), at, table.dtype.itemsize, "client")
    shown = report.tables["clients"] = Table(["INDEX", "PID", "KIND", "UID", "ALIVE", "SINCE"])
    kinds = set(ClientKind)
    for index in np.flatnonzero(table["state"] == ClientState.LIVE).tolist():
        row = table[index]
        kind, pid = int(row["kind"]), int(row["pid"])
        alive = procfs.start_time(pid) == int(row["start_time"]) if pid > 0 else False
        shown.rows.append(
            [
                index,
                pid,
                ClientKind(kind).name.lower() if kind in kinds else str(kind),
                int(row["uid"]),
                alive,
                moment(int(row["attached_at"])),
            ]
        )


def _states(report: Report, column: Any, known: int, at: int, width: int, what: str) -> None:
    bad = np.flatnonzero(column >= known).tolist()
    report.hurt_each(
        [at + index * width for index in bad],
        lambda number: (
            f"{what} {bad[number]} has state {int(column[bad[number]])}, which does not exist"
        ),
    )


# ---- queue ----

#: Fields of a queue's header that are shown as they are.
_NUMBERS = """
    index topic mem_queue_size in_flight_slots slots_max slots_committed arena_max arena_committed
    paused dirty spilling overflowed base_pending disk_depth enqueued enqueued_bytes delivered
    finished requeued timed_out returned dropped spilled restored in_use in_use_bytes
"""


def _queue_facts(report: Report, header: Any) -> None:
    base = layout.text(header["base"])
    report.facts["base"] = base
    fields = [name for name in header.dtype.names or () if name.startswith("deferred_")]
    numbers = [*_NUMBERS.split(), *(name for name in fields if not name.endswith("_at"))]
    report.facts |= {name.replace("_", " "): int(header[name]) for name in numbers}
    read, write = int(header["disk_read"]), int(header["disk_write"])
    report.facts["disk read"] = "{},{}".format(*unpack(read))
    report.facts["disk write"] = "{},{}".format(*unpack(write))
    topic, colon, channel = base.partition(":")
    if not names.valid_name(topic) or (colon and not names.valid_name(channel)):
        report.hurt(_offset("queue", "base"), f"its files would be called {base!r}")
    if read > write:
        report.hurt(_offset("queue", "disk_read"), "the read position is beyond the write position")
    elif read == write and int(header["disk_depth"]):
        report.hurt(
            _offset("queue", "disk_depth"), f"{int(header['disk_depth'])} on disk, but all was read"
        )
    if int(header["dirty"]):
        report.notes.append(
            "dirty: a process died inside it; rings and heaps are rebuilt from the slots by the "
            "next one that uses it"
        )


# ---- results store ----


def _store_facts(report: Report, header: Any) -> None:
    words = (
        *("keys", "max_keys", "bytes", "max_bytes", "stored", "removed", "expired", "refused"),
        *("entries_committed", "arena_committed", "dirty"),
    )
    report.facts |= {"name": layout.text(header["name"])}
    report.facts |= {word.replace("_", " "): int(header[word]) for word in words}


_FACTS = {"directory": _directory_facts, "queue": _queue_facts, "store": _store_facts}


def _queue(report: Report, view: QueueView, buffer: mmap.mmap, count: int) -> None:
    slots = view.slots
    words = slots["word"].copy()
    states = layout.state(words).astype(np.int64)
    lengths = slots["length"].astype(np.int64)
    at, width = view.read("slots_at"), slots.dtype.itemsize
    bad = np.flatnonzero(states >= _FIRST_UNKNOWN).tolist()
    report.hurt_each(
        [at + index * width + _offset("slot", "word") for index in bad],
        lambda number: f"slot {bad[number]} has state {states[bad[number]]}, which does not exist",
    )
    census = report.tables["slots"] = Table(["STATE", "SLOTS", "BYTES"])
    for state in State:
        mine = states == state
        if mine.any():
            with_body = int(lengths[mine].sum()) if state in _WITH_BODY else 0
            census.rows.append([state.name, int(mine.sum()), with_body])
    _bodies(report, view, states, lengths)
    rings = report.tables["rings"] = Table(["RING", "LENGTH", "CAPACITY"])
    settled = not view.read("dirty")
    for name in ("ready", "requeue", "defer", "free"):
        _ring(report, view, buffer, name, states if settled else None, rings)
    for name in _HEAPS:
        _heap(report, view, name, states if settled else None, rings)
    unnamed = int((states == State.READY).sum()) - view.ring_length("ready")
    if settled and unnamed > 0:
        report.notes.append(
            f"{unnamed} READY slots are not in the ready ring: a publisher is at work, or died and "
            "the next one repairs it"
        )
    table = report.tables["messages"] = Table(
        ["ID", "PUBLISHED", "ATTEMPTS", "STATE", "BYTES", "BODY"]
    )
    for kind in peek.PEEK_STATES:
        for message in peek.peek(view, kind, count - len(table.rows)):
            table.rows.append(
                [
                    message.id,
                    moment(message.timestamp),
                    message.attempts,
                    message.state,
                    len(message.body),
                    body_field(message.body),
                ]
            )


def _bodies(report: Report, view: QueueView, states: Any, lengths: Any) -> None:
    slots, room = view.slots, len(view.arena)
    bodies = slots["body"].astype(np.uint64)
    ends = bodies + lengths.astype(np.uint64)  # may wrap around: then the end is before the body
    outside = (ends > room) | (ends < bodies)
    bad = np.flatnonzero(outside & np.isin(states, [int(state) for state in _WITH_BODY])).tolist()
    at, width = view.read("slots_at"), slots.dtype.itemsize
    report.hurt_each(
        [at + index * width + _offset("slot", "body") for index in bad],
        lambda number: f"the body of slot {bad[number]} is outside of the {room} bytes there are",
    )


def _ring(
    report: Report, view: QueueView, buffer: mmap.mmap, name: str, states: Any, shown: Table
) -> None:
    header = view.header
    head, tail = int(header[f"{name}_head"]), int(header[f"{name}_tail"])
    mask, at = int(header["ring_mask"]), view.read(f"{name}_at")
    length = (tail - head) & layout.NONE
    shown.rows.append([name, length, mask + 1])
    most = 1 << max(view.read("slots_max") - 1, 0).bit_length()
    if mask & (mask + 1) or mask >= most:
        report.hurt(_offset("queue", "ring_mask"), f"ring mask {mask:#x} is impossible")
        return
    if length > mask + 1:
        report.hurt(
            _offset("queue", f"{name}_tail"), f"{name} ring: {length} entries in {mask + 1} cells"
        )
        return
    if not layout.has_pages(buffer, at, 4 * (mask + 1)):
        report.hurt(_offset("queue", "ring_mask"), f"{name} ring: no pages for {mask + 1} cells")
        return
    cells = np.ndarray((mask + 1,), np.dtype("<u4"), buffer, at)
    where = (head + np.arange(length)) & mask
    _named(report, f"{name} ring", cells[where], at + 4 * where, states, _RINGS.get(name))


def _heap(report: Report, view: QueueView, name: str, states: Any, shown: Table) -> None:
    count, committed = view.read(f"{name}_len"), len(view.slots)
    shown.rows.append([f"{name} heap", count, committed])
    if count > committed:
        report.hurt(_offset("queue", f"{name}_len"), f"{name} heap: {count} of {committed} slots")
        return
    when, slot = view.in_flight if name == "in_flight" else view.deferred
    when, slot = when[:count].copy(), slot[:count].copy()
    at = view.read(f"{name}_slot_at")
    _named(report, f"{name} heap", slot, at + 4 * np.arange(len(slot)), states, _HEAPS[name])
    parents = (np.arange(1, len(when)) - 1) // layout.constant("HEAP_WAYS")
    bad = (np.flatnonzero(when[parents] > when[1:]) + 1).tolist()
    report.hurt_each(
        [view.read(f"{name}_when_at") + 8 * index for index in bad],
        lambda number: f"{name} heap: entry {bad[number]} is earlier than its parent",
    )


def _named(
    report: Report, what: str, slots: Any, offsets: Any, states: Any, wanted: State | None
) -> None:
    """Report entries of a ring or a heap that name no slot, name a slot twice, or (unless `states`
    is None) name a slot that is not in the state `wanted`. offsets: of the entries in the
    segment."""
    numbers = slots.astype(np.int64)
    committed = int(report.facts["slots committed"])
    bad = np.flatnonzero(numbers >= committed)
    report.hurt_each(
        offsets[bad].tolist(),
        lambda number: f"{what}: {numbers[bad[number]]} is no slot",
    )
    good = np.flatnonzero(numbers < committed)
    _, first = np.unique(numbers[good], return_index=True)
    twice = np.delete(good, first)
    report.hurt_each(
        offsets[twice].tolist(),
        lambda number: f"{what}: slot {numbers[twice[number]]} is there twice",
    )
    if states is None or wanted is None:
        return
    good = good[numbers[good] < len(states)]
    wrong = good[states[numbers[good]] != int(wanted)]
    report.hurt_each(
        offsets[wrong].tolist(),
        lambda number: (
            f"{what}: slot {numbers[wrong[number]]} is "
            f"{_state_name(int(states[numbers[wrong[number]]]))} and not {wanted.name}"
        ),
    )


def _state_name(state: int) -> str:
    return State(state).name if state < _FIRST_UNKNOWN else f"in state {state}"
