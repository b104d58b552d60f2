"""Messages and leases of a queue, looked at without a lock and without taking anything."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shmq import _native
from shmq.errors import LayoutMismatch
from shmq.layout import NONE, Array, ClientState, State, constant, owner, state, text
from shmq.views import QueueView

_NEVER = np.iinfo(np.int64).max


def oldest_at(view: QueueView, most: int = NONE) -> int | None:
    """When the longest waiting message in memory was published, CLOCK_REALTIME ns; None if none
    waits. most: look at only so many of those that wait for another delivery."""
    waiting = np.concatenate((view.front("requeue", most), view.front("ready", 1)))
    if not len(waiting):
        return None
    slots = view.slots
    oldest = int(slots["timestamp"][waiting[waiting < len(slots)]].min(initial=_NEVER))
    return None if oldest == _NEVER else oldest


# ---- leases ----


@dataclass(frozen=True)
class LeaseEntry:
    """An open lease, read from its queue.

    parent: the lease that its holder named as the one before; 0: none. holder: the name that it
    is held under. count: messages. parts: the number of parts it can be read in. replays: how
    often its holder asked for it again with `replay`.
    """

    id: int
    parent: int
    holder: str
    count: int
    on_disk: int
    """Those of `count` that are leased where they are on disk."""
    bytes: int
    """Bytes of the bodies."""
    parts: int
    replays: int
    since: int
    """When it was taken, CLOCK_REALTIME ns."""
    pid: int
    """The process that has the name now; 0: none has."""
    deadline: int | None
    """When it goes back unless its holder gives a sign of life, CLOCK_MONOTONIC ns; None: never."""


def run_length(header: Array) -> int:
    """The number of messages that are leased where they are on disk, from a queue's header."""
    run = header["run"]
    in_force = int(run["lease"]) and int(run["from"]) == int(header["disk_read"])
    return int(run["count"]) if in_force else 0


def open_leases(view: QueueView) -> list[LeaseEntry]:
    """The open leases of a queue, the oldest first."""
    table, lease_holders = view.leases.copy(), view.lease_holders.copy()
    words = table["word"]
    held = np.flatnonzero((words & np.uint64(0xFF)) == constant("LEASE_HELD"))
    found = []
    for index in held[np.argsort(words[held])].tolist():
        row = table[index]
        holder = lease_holders[int(row["holder"]) % len(lease_holders)]
        deadline = int(holder["deadline"])
        found.append(
            LeaseEntry(
                id=int(row["word"]) >> 8,
                parent=int(row["parent"]),
                holder=text(holder["name"]),
                count=int(row["count"]) + int(row["on_disk"]),
                on_disk=int(row["on_disk"]),
                bytes=int(row["bytes"]),
                parts=int(row["parts"]),
                replays=int(row["replays"]),
                since=int(row["since"]),
                pid=int(holder["pid"]) if holder["client"] else 0,
                deadline=None if deadline == _NEVER else deadline,
            )
        )
    return found


# ---- messages ----


@dataclass(frozen=True)
class Peeked:
    """A message that was looked at and not taken; a consumer may have taken it since.

    id: 16 hex digits. timestamp: publish time, ns since 1970. attempts: deliveries so far.
    properties: names and values beside the body; empty also if something has overwritten them.
    failures: deliveries that failed, in a channel that counts them. length: bytes of the body, of
    which `body` may be the beginning.
    state: "ready", "in_flight" or "deferred". due: when a deferred message becomes ready (ns since
    1970), else None.

    The rest is None but for a message in flight. deadline: when it times out (CLOCK_MONOTONIC ns;
    None: never). client: index of its consumer's client entry. pid: that process, if it is still
    attached. since: when the message was taken, ns since 1970. until: when it times out, ns since
    1970 (None: never).
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
    properties: dict[str, bytes] = field(default_factory=dict, hash=False)
    failures: int = 0
    length: int = 0


#: State of a message as `Peeked.state` has it -> the states of the slots that are shown for it.
PEEK_STATES: Final[dict[str, tuple[State, ...]]] = {
    "ready": (State.READY, State.REQUEUED),
    "in_flight": (State.IN_FLIGHT,),
    "deferred": (State.DEFERRED,),
}

#: The states that `peek` takes: those, and "requeued", which is a part of "ready".
PEEK_NAMES: Final = {**PEEK_STATES, "requeued": (State.REQUEUED,)}


def peek(
    view: QueueView,
    state: str = "ready",
    n: int = 10,
    clients: Array | None = None,
    most: int | None = None,
) -> list[Peeked]:
    """Return up to n messages in memory, without taking them; disk is not looked at.

    "ready" gives them in the order of delivery, "requeued" those of them that were delivered before
    or come from disk, "in_flight" by deadline, "deferred" by due time. A message that moves while
    it is read is left out. clients: the directory's client entries, which have the pids. most: the
    bytes of a body that are copied at most; None: all. Raises ValueError for another state.
    """
    if state not in PEEK_NAMES:
        raise ValueError(f"state must be one of {', '.join(PEEK_NAMES)}, not {state!r}")
    if state == "ready":
        candidates = np.concatenate((view.requeue, view.ready))
    elif state == "requeued":
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
            message = _copy(view, slots[index : index + 1], PEEK_NAMES[state], clients, most)
            if message is not None:
                found.append(message)
    return found


def find(
    view: QueueView, id: int, clients: Array | None = None, most: int | None = None
) -> Peeked | None:
    """The message of this id that `peek` would show in some state; None if there is none. clients,
    most: as for `peek`."""
    slots = view.slots
    for index in np.flatnonzero(slots["id"] == np.uint64(id)).tolist():
        message = _copy(view, slots[index : index + 1], _SHOWN, clients, most)
        if message is not None:
            return message
    return None


def _by_time(view: QueueView, when: Array, slots: Array) -> Array:
    order: Array = slots[np.argsort(when, kind="stable")]
    return order


def _copy(
    view: QueueView,
    slot: Array,
    states: tuple[State, ...],
    clients: Array | None,
    most: int | None,
) -> Peeked | None:
    """The message in a slot with up to `most` bytes of its body; None if its state is another, or
    if it changed while it was read."""
    before = slot.copy()[0]
    now = State(int(state(before["word"]))) if int(state(before["word"])) in _KNOWN else State.FREE
    if now not in states:
        return None
    at, length = int(before["body"]), int(before["length"])
    arena = view.arena
    if at + length > len(arena):
        return None
    properties = _properties_size(before)
    copied = length if most is None else min(length, properties + most)
    content = arena[at : at + copied].tobytes() if length else b""
    after = slot.copy()[0]
    if any(after[field] != before[field] for field in _READ):
        return None
    block, body = content[:properties], content[properties:]
    has_failed = int(before["flags"]) & constant("SLOT_FAILED")
    when = int(before["deadline"])
    in_flight = now is State.IN_FLIGHT
    has_end = in_flight and when != _NEVER
    holder = int(owner(before["word"]))
    return Peeked(
        id=f"{int(before['id']):016x}",
        timestamp=int(before["timestamp"]),
        attempts=int(before["attempts"]),
        body=body,
        state={State.IN_FLIGHT: "in_flight", State.DEFERRED: "deferred"}.get(now, "ready"),
        due=when if now is State.DEFERRED else None,
        deadline=when if has_end else None,
        client=holder if in_flight else None,
        pid=_pid_of(clients, holder) if in_flight else None,
        since=_real(int(before["delivered"])) if in_flight else None,
        until=_real(when) if has_end else None,
        properties=_properties(block),
        failures=int(before["failures"]) >> 16 if has_failed else 0,
        length=length - properties,
    )


_READ: Final = ("word", "id", "body", "length", "flags", "properties")


def _properties_size(slot: Array) -> int:
    """Bytes of the properties in front of the body; 0 also if their size is impossible."""
    size = int(slot["properties"]) if int(slot["flags"]) & constant("SLOT_PROPERTIES") else 0
    return size if size <= int(slot["length"]) else 0


def _properties(block: bytes) -> dict[str, bytes]:
    try:
        return dict(_native.unpack_properties(block)) if block else {}
    except LayoutMismatch:
        return {}


def _pid_of(clients: Array | None, index: int) -> int | None:
    if clients is None or index >= len(clients) or clients[index]["state"] != ClientState.LIVE:
        return None
    return int(clients[index]["pid"])


def _real(monotonic: int) -> int:
    """A time of CLOCK_MONOTONIC (ns) as one of CLOCK_REALTIME, by their present distance."""
    return time.time_ns() + monotonic - time.clock_gettime_ns(time.CLOCK_MONOTONIC)


_KNOWN = frozenset(State)
_SHOWN: Final = tuple(each for states in PEEK_STATES.values() for each in states)
