"""An independent recount of a queue: every slot, ring, heap and body, by numpy over the segment.

None of the library's counters is believed: everything is counted from the slots' state words and
compared with what is derived from them. For a queue at rest; `recount` looks again for a while, so
that a supervisor's work in between does no harm, and raises the last difference if it stays.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from shmq import layout
from shmq.layout import ClientState, DirectoryView, QueueView, ReadOnlySource, State

UNIT, HEAD = 64, 16  # of the arena: block granularity, bytes before a body
IN_USE = 1


@dataclass
class Recount:
    """What is in a queue. ids by state: of every slot that holds a message."""

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
        return self.ids[State.READY] + self.ids[State.BACK] + self.ids[State.DEFERRED]


def recount(
    instance: str,
    topic: str,
    channel: str | None,
    patience: float = 10.0,
    undecided: bool = False,
) -> Recount:
    """Count one queue; AssertionError with every difference if they do not go away.

    undecided: its supervisor is dead and may have left a spill, restore or D to be repaired; then
    only the messages are looked at.
    """
    deadline = time.monotonic() + patience
    while True:
        with layout.open_readonly(instance) as source:
            entry = source.directory.find_topic(topic)
            assert entry is not None, f"no topic {topic}"
            queue = source.directory.find_queue(entry.index, channel)
            assert queue is not None, f"no queue {topic}/{channel}"
            result = _count(source, source.queue(queue), entry.index)
        if undecided or not result.problems:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"{topic}/{channel}: " + "; ".join(result.problems))
        time.sleep(0.01)


def is_empty(instance: str, topic: str, channel: str | None) -> bool:
    """Nothing to deliver in memory or on disk, nothing on the way, nothing in flight."""
    with layout.open_readonly(instance) as source:
        entry = source.directory.find_topic(topic)
        assert entry is not None
        queue = source.directory.find_queue(entry.index, channel)
        assert queue is not None
        view = source.queue(queue)
        if view.read("disk_read") != view.read("disk_write") or view.read("deferred_depth"):
            return False
        states = layout.state(view.slots["word"]).astype(int)
        return bool(np.isin(states, (State.FREE, State.DONE, State.LOANED)).all())


def recount_all(instance: str) -> dict[tuple[str, str | None], Recount]:
    """Every queue of the instance by topic and channel."""
    with layout.open_readonly(instance) as source:
        topics = {topic.index: topic.name for topic in source.directory.live_topics()}
        names = [(topics[queue.topic], queue.channel) for queue in source.directory.live_queues()]
    return {name: recount(instance, *name) for name in names}


def _count(source: ReadOnlySource, view: QueueView, topic: int) -> Recount:
    result = Recount()
    slots = view.slots.copy()
    states = layout.state(slots["word"]).astype(int)
    of = {state: np.flatnonzero(states == state) for state in State}
    ids = [f"{int(number):016x}" for number in slots["id"]]
    result.ids = {state: [ids[slot] for slot in of[state]] for state in State}
    result.on_disk = view.read("disk_read") != view.read("disk_write")

    check = result.check
    check("dirty", view.read("dirty") == 0)
    check("unknown states", bool((states < len(State)).all()), set(states.tolist()))
    for state in (State.PREPARED, State.RESTORED, State.MOVING, State.LEASED):
        check(f"undecided {state.name}", of[state].size == 0, of[state])
    spilling = of[State.SPILLING].size
    check("spilling", bool(spilling) <= bool(view.read("spilling")), spilling)
    check("spilling_count", view.read("spilling_count") == spilling, view.read("spilling_count"))
    _check_rings(result, view, slots, of)
    _check_heaps(result, view, slots, of)
    _check_sums(result, view, slots, of, source.directory)
    _check_pins(result, view, slots, of, source.directory)
    _check_arena(result, view, slots, states)
    committed = int(source.directory.topics[topic]["committed"])
    order = slots["order"][of[State.READY]]
    check("READY beyond the commit word", bool((order <= committed).all()), order, committed)
    held = [name for name, count in Counter(_held_ids(result)).items() if count > 1]
    check("one message in two slots", not held, held)
    return result


def _held_ids(result: Recount) -> list[str]:
    states = (State.READY, State.BACK, State.INFLIGHT, State.DEFERRED)
    return [name for state in states for name in result.ids[state]]


def _check_rings(result: Recount, view: QueueView, slots: layout.Array, of: dict) -> None:
    for ring, state in (
        (view.ready, State.READY), (view.requeue, State.BACK), (view.free, State.FREE),
    ):  # fmt: skip
        _same(result, f"ring of {state.name}", ring, of[state])
    for ring, name in ((view.ready, "ready"), (view.requeue, "requeue")):
        order = slots["order"][ring]
        result.check(f"{name} ring not in order", bool((np.diff(order.astype(int)) > 0).all()))
    for ring, length in (("ready", len(view.ready)), ("requeue", len(view.requeue)),
                         ("free", len(view.free)), ("defer", len(view.defer))):  # fmt: skip
        result.check(f"{ring} ring has foreign entries", view.ring_length(ring) == length)
    _same(result, "deferred", np.concatenate((view.deferred[1], view.defer)), of[State.DEFERRED])


def _check_heaps(result: Recount, view: QueueView, slots: layout.Array, of: dict) -> None:
    _same(result, "in-flight heap", view.in_flight[1], of[State.INFLIGHT])
    for name, (when, slot) in (("in-flight", view.in_flight), ("deferred", view.deferred)):
        parents = (np.arange(1, len(when)) - 1) // 2
        result.check(f"{name} heap order", bool((when[parents] <= when[1:]).all()), when)
        result.check(f"{name} heap times", bool((slots["deadline"][slot] == when).all()))
        positions = slots["heap"][slot]
        result.check(f"{name} heap positions", bool((positions == np.arange(len(slot))).all()))


def _check_sums(
    result: Recount, view: QueueView, slots: layout.Array, of: dict, directory: DirectoryView
) -> None:
    in_flight = of[State.INFLIGHT]
    holding = np.concatenate(
        (in_flight, of[State.BACK], of[State.DONE], of[State.LEASED], view.deferred[1])
    )
    result.check("held", view.read("held") == len(holding), view.read("held"), len(holding))
    nbytes = int(slots["capacity"][holding].astype(int).sum()) + HEAD * len(holding)
    result.check("held_bytes", view.read("held_bytes") == nbytes, view.read("held_bytes"), nbytes)
    live = set(np.flatnonzero(directory.clients["state"] == ClientState.LIVE).tolist())
    owners = set(layout.owner(slots["word"][in_flight]).tolist())
    result.check("in flight to the dead", owners <= live, owners - live)
    lent = set(layout.owner(slots["word"][of[State.LOANED]]).tolist())
    result.check("lent to the dead", lent <= live, lent - live)
    per_session = Counter(slots["session"][in_flight].tolist())
    for index, session in enumerate(view.sessions):
        client = int(session["client"])
        if client:
            entry = directory.clients[client - 1]
            result.check(f"session {index} of the dead", client - 1 in live)
            same = int(entry["generation"]) == int(session["generation"])
            result.check(f"session {index} of a former client", same)
            count = int(session["in_flight"])
            result.check(f"session {index}", count == per_session[index], count, per_session[index])
        else:
            result.check(f"in flight to free session {index}", not per_session[index])


def _check_pins(
    result: Recount, view: QueueView, slots: layout.Array, of: dict, directory: DirectoryView
) -> None:
    serial = int(view.header["segment"]["serial"])
    pins = directory.clients["pins"].ravel()
    mine = pins[(pins >> np.uint64(24)) == serial] & np.uint64(0xFFFFFF)
    counted = np.bincount(mine.astype(int), minlength=len(slots))[: len(slots)]
    result.check("pins", bool((slots["pins"] == counted).all()), slots["pins"], counted)
    result.check("DONE without a pin", bool((counted[of[State.DONE]] > 0).all()), of[State.DONE])


def _check_arena(
    result: Recount, view: QueueView, slots: layout.Array, states: layout.Array
) -> None:
    """Walk the blocks: each is a body of one slot or free, no two free ones side by side."""
    committed, arena = view.read("arena_committed"), view.arena
    words = arena[: committed // 8 * 8].view("<u8")
    blocks, free, at, before, last_free = {}, 0, 0, 0, False
    while at < committed - UNIT:
        flags, previous = int(words[at // 8]), int(words[at // 8 + 1])
        size, used = flags & ~(UNIT - 1), bool(flags & IN_USE)
        if size < UNIT or at + size > committed - UNIT:
            return result.check("arena block", False, at, flags)
        result.check("arena tag", previous == before, at, previous, before)
        result.check("two free blocks side by side", used or not last_free, at)
        if used:
            blocks[at] = size
        else:
            free += size
        at, before, last_free = at + size, size, not used
    counted = int(view.header["arena"]["free_bytes"])
    result.check("arena free_bytes", counted == free, counted, free)
    owned = np.flatnonzero(slots["capacity"] > 0)
    bodies = {}
    for index in owned.tolist():
        start = int(slots[index]["body"]) - HEAD
        result.check("two slots with one body", start not in bodies, index, bodies.get(start))
        bodies[start] = index
        size = int(slots[index]["capacity"]) + HEAD
        result.check("body without its block", blocks.get(start) == size, index, start, size)
    lost = blocks.keys() - bodies.keys()
    result.check("blocks of nobody", not lost, len(lost))
    full = states != State.FREE
    fits = slots["length"][full] <= slots["capacity"][full]
    result.check("body longer than its block", bool(fits.all()))
    return None


def _same(result: Recount, what: str, found: layout.Array, expected: layout.Array) -> None:
    """Both hold the same slots, each once."""
    result.check(
        what, sorted(found.tolist()) == sorted(expected.tolist()),
        f"{sorted(set(found.tolist()) ^ set(expected.tolist()))[:10]} in one only,"
        f" {len(found)} entries for {len(expected)} slots",
    )  # fmt: skip
