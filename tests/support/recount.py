"""An independent recount of a queue: every slot, ring, heap and body, by numpy over the segment.

Nothing that the library counted is believed: all of it is counted from the slots' state words and
compared with what is derived from them. The queue must be at rest: `count` looks once, for who
knows that it is; `recount` looks at a running instance's queue again for a while, so that work
under way does no harm, and raises the last differences if they stay.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmq import layout, peek, sources
from shmq.layout import ClientState, State
from shmq.sources import ReadOnlySource
from shmq.views import DirectoryView, QueueView

UNIT, HEAD = 64, 16  # of the arena: block granularity, bytes before a body
IN_USE = 1

#: A queue at rest has no slot in these.
UNDECIDED = (State.PREPARED, State.RESTORED, State.MOVING)

Array = layout.Array


@dataclass
class Recount:
    """The content of a queue. ids by state, of every slot that holds a message."""

    view: QueueView
    directory: DirectoryView
    slots: Array
    of: dict[State, Array]
    """Slots by state."""
    ids: dict[State, list[str]] = field(default_factory=dict)
    on_disk: bool = False
    problems: list[str] = field(default_factory=list)

    def check(self, what: str, good: bool, *shown: object) -> None:
        """Note a problem unless `good`."""
        if not good:
            self.problems.append(f"{what}: {' '.join(map(str, shown))}")

    @property
    def waiting(self) -> list[str]:
        """Ids of what is to be delivered."""
        return self.ids[State.READY] + self.ids[State.REQUEUED] + self.ids[State.DEFERRED]

    def ids_of(self, slots: Array) -> list[str]:
        """Ids of the messages in these slots, in this order."""
        return [f"{number:016x}" for number in self.slots["id"][slots].tolist()]


def count(directory: DirectoryView, view: QueueView) -> Recount:
    """Count one queue; what does not agree is in `problems`."""
    slots = view.slots.copy()
    states = layout.state(slots["word"]).astype(int)
    of = {state: np.flatnonzero(states == state) for state in State}
    result = Recount(view, directory, slots, of)
    result.ids = {state: result.ids_of(of[state]) for state in State}
    result.on_disk = view.read("disk_read") != view.read("disk_write")

    check = result.check
    check("dirty", view.read("dirty") == 0)
    check("unknown states", bool((states < len(State)).all()), set(states.tolist()))
    for state in UNDECIDED:
        check(f"undecided {state.name}", of[state].size == 0, of[state])
    spilling = of[State.SPILLING].size
    check("spilling", bool(spilling) <= bool(view.read("spilling")), spilling)
    check("spilling_count", view.read("spilling_count") == spilling, view.read("spilling_count"))
    _check_rings(result)
    _check_heaps(result)
    _check_held(result)
    _check_sessions(result)
    _check_columns(result)
    _check_pins(result)
    _check_arena(result, states)
    committed = int(directory.topics[view.read("topic")]["committed"])
    order = slots["order"][of[State.READY]]
    check("READY beyond the commit word", bool((order <= committed).all()), order, committed)
    taken, delivered = int(layout.generation(slots["word"]).sum()), view.read("delivered")
    taken += view.read("delivered_on_disk")
    check("generations", taken >= delivered, taken, delivered)
    check("leased", view.read("leased") == of[State.LEASED].size, view.read("leased"))
    entries = {entry.id: entry.count - entry.on_disk for entry in peek.open_leases(view)}
    leases = {number: messages for number, messages in entries.items() if messages}
    found = Counter(slots["move"][of[State.LEASED]].tolist())
    check("leases", leases == dict(found), leases, found)
    states_with = (
        State.READY,
        State.REQUEUED,
        State.IN_FLIGHT,
        State.DEFERRED,
        State.SPILLING,
        State.LEASED,
    )
    names = Counter(name for state in states_with for name in result.ids[state])
    twice = [name for name, number in names.items() if number > 1]
    check("one message in two slots", not twice, twice)
    return result


def recount(
    instance: str,
    topic: str,
    channel: str | None,
    patience: float = 10.0,
    undecided: bool = False,
) -> Recount:
    """Count one queue of a running instance; AssertionError with every difference that stays.

    undecided: its supervisor is dead and may have left a spill, restore or D to be repaired; then
    only the messages are looked at.
    """
    deadline = time.monotonic() + patience
    while True:
        with sources.open_readonly(instance) as source:
            result = count(source.directory, _view(source, topic, channel))
        if undecided or not result.problems:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"{topic}/{channel}: " + "; ".join(result.problems))
        time.sleep(0.01)


def recount_all(instance: str) -> dict[tuple[str, str | None], Recount]:
    """Every queue of the instance by topic and channel."""
    with sources.open_readonly(instance) as source:
        topics = {topic.index: topic.name for topic in source.directory.live_topics()}
        names = [(topics[queue.topic], queue.channel) for queue in source.directory.live_queues()]
    return {name: recount(instance, *name) for name in names}


def is_empty(instance: str, topic: str, channel: str | None) -> bool:
    """Nothing to deliver in memory or on disk, nothing on the way, nothing in flight."""
    with sources.open_readonly(instance) as source:
        return _holds_nothing(_view(source, topic, channel))


def is_drained(instance: str, topic: str, channel: str) -> bool:
    """The channel is empty, and the topic has no backlog that the supervisor is about to move."""
    with sources.open_readonly(instance) as source:
        entry = source.directory.find_topic(topic)
        assert entry is not None, f"no topic {topic}"
        backlog = source.directory.find_queue(entry.index, None)
        if backlog is not None and not source.directory.topics[entry.index]["paused"]:
            with contextlib.suppress(FileNotFoundError):  # it was removed just now
                if not _holds_nothing(source.queue(backlog)):
                    return False
        return _holds_nothing(_view(source, topic, channel))


def _holds_nothing(view: QueueView) -> bool:
    if view.read("disk_read") != view.read("disk_write") or view.read("deferred_depth"):
        return False
    states = layout.state(view.slots["word"]).astype(int)
    return bool(np.isin(states, (State.FREE, State.PINNED, State.LOANED)).all())


def _view(source: ReadOnlySource, topic: str, channel: str | None) -> QueueView:
    entry = source.directory.find_topic(topic)
    assert entry is not None, f"no topic {topic}"
    queue = source.directory.find_queue(entry.index, channel)
    assert queue is not None, f"no queue {topic}/{channel}"
    return source.queue(queue)


def _check_rings(result: Recount) -> None:
    view, of = result.view, result.of
    for name, ring, state in (
        ("ready", view.ready, State.READY),
        ("requeue", view.requeue, State.REQUEUED),
        ("free", view.free, State.FREE),
    ):
        _same(result, f"{name} ring", ring, of[state])
        if state is not State.FREE:
            order = result.slots["order"][ring].astype(int)
            result.check(f"{name} ring not in order", bool((np.diff(order) > 0).all()), order)
    may_go_first = np.flatnonzero(result.slots["after"][view.requeue] == 0)
    firsts = (view.read("requeue_head_group_end") - view.read("requeue_head")) % 2**32
    expected = int(may_go_first[-1]) + 1 if len(may_go_first) else 0
    result.check("requeue_head_group_end", firsts * (firsts < 2**31) == expected, firsts, expected)
    for name in ("ready", "requeue", "free", "defer"):
        length = len(getattr(view, name))
        result.check(f"{name} ring has foreign entries", view.ring_length(name) == length)
    everywhere = np.concatenate((view.deferred[1], view.defer))
    _same(result, "deferred heap and defer ring", everywhere, of[State.DEFERRED])


def _check_heaps(result: Recount) -> None:
    view, slots = result.view, result.slots
    _same(result, "in-flight heap", view.in_flight[1], result.of[State.IN_FLIGHT])
    for name, (when, slot) in (("in-flight", view.in_flight), ("deferred", view.deferred)):
        parents = (np.arange(1, len(when)) - 1) // layout.constant("HEAP_WAYS")
        result.check(f"{name} heap order", bool((when[parents] <= when[1:]).all()), when)
        result.check(f"{name} heap times", bool((slots["deadline"][slot] == when).all()), when)
        positions = slots["heap"][slot]
        result.check(f"{name} heap positions", bool((positions == np.arange(len(slot))).all()))
    outside = np.ones(len(slots), bool)
    outside[view.in_flight[1]] = outside[view.deferred[1]] = False
    outside[result.of[State.FREE]] = False  # a slot that was never used has 0
    lost = outside & (slots["heap"] != layout.NONE)
    result.check("heap position outside of heaps", not lost.any(), np.flatnonzero(lost))


def _check_held(result: Recount) -> None:
    view, of = result.view, result.of
    kept = [of[state] for state in (State.IN_FLIGHT, State.REQUEUED, State.PINNED, State.LEASED)]
    holding = np.concatenate((*kept, view.deferred[1]))
    result.check("in_use", view.read("in_use") == len(holding), view.read("in_use"), len(holding))
    nbytes = int(result.slots["capacity"][holding].sum()) + HEAD * len(holding)
    result.check(
        "in_use_bytes", view.read("in_use_bytes") == nbytes, view.read("in_use_bytes"), nbytes
    )


def _check_sessions(result: Recount) -> None:
    slots, in_flight = result.slots, result.of[State.IN_FLIGHT]
    clients = result.directory.clients
    live = set(np.flatnonzero(clients["state"] == ClientState.LIVE).tolist())
    owners = set(layout.owner(slots["word"][in_flight]).tolist())
    result.check("in flight to the dead", owners <= live, owners - live)
    lent = set(layout.owner(slots["word"][result.of[State.LOANED]]).tolist())
    result.check("lent to the dead", lent <= live, lent - live)
    taken = Counter(slots["session"][in_flight].tolist())
    table = result.view.sessions
    for index in np.flatnonzero(table["client"]).tolist():
        session, entry = table[index], clients[int(table[index]["client"]) - 1]
        result.check(f"session {index} of the dead", int(session["client"]) - 1 in live)
        same = int(entry["generation"]) == int(session["generation"])
        result.check(f"session {index} of a former client", same)
        number = int(session["in_flight"])
        result.check(f"session {index} in flight", number == taken.pop(index, 0), number)
    result.check("in flight to free sessions", not taken, taken)
    for slot in in_flight.tolist():
        client = int(table[int(slots[slot]["session"])]["client"]) - 1
        mine = int(layout.owner(slots[slot]["word"]))
        result.check("in flight to another client's session", client == mine, client, mine)


def _check_columns(result: Recount) -> None:
    """The directory's columns are lower bounds."""
    view, index = result.view, result.view.read("index")
    for name, column, when in (
        ("next_deadline", result.directory.next_deadline, view.in_flight[0]),
        ("next_due", result.directory.next_due, view.deferred[0]),
        ("next_due", result.directory.next_due, result.slots["deadline"][view.defer]),
    ):
        if len(when):
            bound = int(column[index])
            result.check(name, bound <= int(when.min()), bound, int(when.min()))


def _check_pins(result: Recount) -> None:
    serial = int(result.view.header["segment"]["serial"])
    log = result.directory.clients["pins"].ravel()
    mine = log[(log >> np.uint64(24)) == serial] & np.uint64(0xFFFFFF)
    size = len(result.slots)
    counted = np.bincount(mine.astype(int), minlength=size)[:size]
    pins = result.slots["pins"]
    result.check("pins", bool((pins == counted).all()), pins[pins != counted])
    done = result.of[State.PINNED]
    result.check("PINNED without a pin", bool((counted[done] > 0).all()), done)
    free = result.of[State.FREE]
    result.check("FREE with a pin", not counted[free].any(), free[counted[free] > 0])


def _check_arena(result: Recount, states: Any) -> None:
    """Walk the blocks; every body in one of its own, all others free, none beside another."""
    view, slots = result.view, result.slots
    committed, arena = view.read("arena_committed"), view.arena
    words = arena[: committed // 8 * 8].view("<u8")
    blocks: dict[int, int] = {}
    free, at, before, last_free = 0, 0, 0, False
    while at < committed - UNIT:
        flags, previous = int(words[at // 8]), int(words[at // 8 + 1])
        size, used = flags & ~(UNIT - 1), bool(flags & IN_USE)
        if size < UNIT or at + size > committed - UNIT:
            result.check("arena block", False, at, flags)
            return
        result.check("arena tag", previous == before, at, previous, before)
        result.check("two free blocks side by side", used or not last_free, at)
        if used:
            blocks[at] = size
        else:
            free += size
        at, before, last_free = at + size, size, not used
    counted = int(view.header["arena"]["free_bytes"])
    result.check("arena free_bytes", counted == free, counted, free)
    bodies: dict[int, int] = {}
    for index in np.flatnonzero(slots["capacity"] > 0).tolist():
        start, size = int(slots[index]["body"]) - HEAD, int(slots[index]["capacity"]) + HEAD
        result.check("two slots with one body", start not in bodies, index, bodies.get(start))
        result.check("body without its block", blocks.get(start) == size, index, start, size)
        bodies[start] = index
    lost = blocks.keys() - bodies.keys()
    result.check("blocks of nobody", not lost, len(lost))
    full = states != State.FREE
    fits = slots["length"][full] <= slots["capacity"][full]
    result.check("body longer than its block", bool(fits.all()))


def _same(result: Recount, what: str, found: Array, expected: Array) -> None:
    """Both hold the same slots, each once."""
    result.check(
        what,
        sorted(found.tolist()) == sorted(expected.tolist()),
        f"{sorted(set(found.tolist()) ^ set(expected.tolist()))[:10]} in one only,",
        f"{len(found)} entries for {len(expected)} slots",
    )
