"""The state machine of test_model without its rules: what it holds, and the comparison."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
)
from support import recount
from support.in_process_broker import LIMITS, SECOND, Client, World
from support.queue_model import Queue, Topic
from support.queue_parts import (
    HEAD,
    RECORD_HEAD,
    Delivery,
    Msg,
    Session,
    block,
)

from shmq import layout
from shmq.client import Producer
from shmq.layout import State
from shmq.views import QueueView

TOPIC = "t"
CHANNELS = ("a", "b", "c", "e#ephemeral")
CLOCK_MONOTONIC_COARSE = 6  # linux/time.h; how far it lags is the machine's affair
ROUNDED_UP = 4_000_000  # by as much, in the core
FILE_BYTES = 4000  # a file on disk ends with the batch that passes this
NEVER = np.iinfo(np.int64).max
SHORT = 0.001  # seconds: the shortest time to live of a channel
REASONS = ("attempts", "rejected", "expired", "overflow")
REASON_SHIFT = layout.constant("SLOT_REASON_SHIFT")

SMALL = st.integers(1, 300)
SIZES = SMALL | st.sampled_from([4096, 4097, 9000, 30000, 65535, 65536, 90000, 150000])
PICK = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Someone:
    """A client of the machine and what it holds."""

    client: Client
    producer: Producer
    sessions: list[Session] = field(default_factory=list)
    loans: list[Lent] = field(default_factory=list)
    views: list[tuple[memoryview, Delivery]] = field(default_factory=list)


@dataclass(eq=False)
class Lent:
    """An open loan."""

    native: Any
    buffer: memoryview
    body: bytes
    targets: list[Queue]
    defer: float | None


@dataclass(eq=False)
class Taken:
    """The result of one take_many, with the messages that were not settled through it."""

    native: Any
    deliveries: list[Delivery]
    open: list[Delivery]


def read_records(data: bytes) -> list[tuple[int, bytes]]:
    """Ids and bodies, as nsqd would read them."""
    records = []
    while data:
        size = int.from_bytes(data[:4], "big") + 4
        records.append((int(data[14:30], 16), data[RECORD_HEAD:size]))
        data = data[size:]
    return records


def dead_topic(channel: str) -> str:
    return f"dead-{channel.removesuffix('#ephemeral')}"


def choose(items: list[Any], number: int) -> Any:
    return items[number % len(items)]


def when(condition: Callable[[Any], Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The rule does nothing without this. Not hypothesis's precondition, because what there is at
    a time may depend on the clock (which of two deadlines comes first), and what is drawn must
    not."""

    def decorate(act: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(act)
        def run(machine: Base, *arguments: Any, **named: Any) -> None:
            machine.idle = not condition(machine)
            if not machine.idle:
                machine.let_lives_end()
                act(machine, *arguments, **named)

        return run

    return decorate


class Base(RuleBasedStateMachine):
    """The rules, which are what somebody may do at any time, come from subclasses; the invariant
    compares."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = dict(LIMITS)
        self.world = World(**self.limits)
        self.topic = Topic(self.limits)
        self.index, self.generation = self.world.create_topic(TOPIC)
        self.graves: dict[str, Queue] = {}  # by channel: where its dead letters go
        self.views: dict[int, QueueView] = {}
        self.people: list[Someone] = []
        self.buried: list[Any] = []  # what dead clients held: not used, but not dropped either
        self.deliveries: list[Delivery] = []
        self.batches: list[Taken] = []
        self.spills: dict[Queue, Any] = {}
        self.files: dict[Queue, dict[int, bytearray]] = {}
        self.made = 0
        self.last_id = 0
        self.idle = False  # the last rule had nothing to do
        self._began = time.time_ns()
        self.words: dict[int, Any] = {}  # generations seen, by serial

    def teardown(self) -> None:
        self.spills.clear()
        self.world.close()

    # ---- helpers ----

    def body(self, size: int) -> bytes:
        self.made += 1
        head = self.made.to_bytes(4, "big")
        return (head * (size // 4 + 1))[:size]

    def view(self, queue: Queue) -> QueueView:
        if queue.serial not in self.views:
            self.views[queue.serial] = self.world.queue_view(queue.index)
        return self.views[queue.serial]

    def add_queue(self, channel: str | None, index: int, serial: int) -> Queue:
        ephemeral = channel is not None and channel.endswith("#ephemeral")
        queue = Queue(self.topic, channel, index, serial, ephemeral)
        self.topic.queues.append(queue)
        self.files[queue] = {0: bytearray()}
        return queue

    def drain(self, queues: list[Queue] | None) -> None:
        """Deferred messages go to the heap, where their bytes count as in use."""
        for queue in queues or ():
            self.world.supervisor.expire(queue.index, 0)

    def due_of(self, queue: Queue, msg: Msg, least: float, most: float) -> int:
        """The due time of a message that was deferred just now."""
        slots = self.view(queue).slots
        states = (int(State.DEFERRED), int(State.REQUEUED))  # it may be due at once
        rows = slots[(slots["id"] == msg.id) & np.isin(layout.state(slots["word"]), states)]
        assert len(rows) == 1
        due, now = int(rows[0]["deadline"]), time.time_ns()
        limit = self.limits["max_req_timeout"]
        assert self.began + min(least, limit) <= due <= now + most
        return due

    @property
    def began(self) -> int:
        """When the last rule began, CLOCK_REALTIME ns."""
        return self._began

    def let_lives_end(self) -> None:
        """The shortest time to live of a channel is over for what waits."""
        self._began = time.time_ns()
        newest = max(
            (
                msg.timestamp
                for queue in self.topic.queues
                if queue.settings.message_ttl == SHORT
                for msg in (*queue.ready, *queue.back, *queue.deferred.values())
            ),
            default=0,
        )
        while time.time_ns() <= newest + SHORT * SECOND + 1000:
            pass

    def grave(self, queue: Queue) -> Queue:
        """Where the dead letters of this channel go; another one of its name shares it."""
        assert queue.channel is not None
        name = dead_topic(queue.channel)
        if queue.channel not in self.graves:
            self.world.create_topic(name)
            topic = Topic(self.limits)
            grave = Queue(topic, name, *self.world.create_queue(name, "dead"))
            topic.queues.append(grave)
            self.graves[queue.channel] = grave
        return self.graves[queue.channel]

    def is_moved(self, queue: Queue, msg: Msg) -> bool:
        """Whether it is in the dead topic, and new there."""
        grave = self.grave(queue)
        slots = self.view(grave).slots
        found = (slots["id"] == msg.id) & (layout.state(slots["word"]) == int(State.READY))
        here = sum(each.id == msg.id for each in grave.ready)
        return int(np.count_nonzero(found)) > here

    def bury(self, queue: Queue, messages: list[Msg]) -> None:
        """These became dead letters."""
        grave = self.grave(queue)
        view = self.view(grave)
        ids = view.slots["id"][view.ready].tolist()[len(grave.ready) :]
        order = {id_: place for place, id_ in enumerate(ids)}
        for msg in sorted(messages, key=lambda msg: order[msg.id]):
            del queue.deferred[msg.id]
            queue.drop(msg)
            queue.counters["dead_lettered"] += 1
            grave.topic.carry(msg, grave)

    def sync_backlog(self) -> None:
        """The producer has asked for a backlog."""
        found = self.world.supervisor.find_queue(self.index, None)
        if found is not None and self.topic.backlog is None:
            self.add_queue(None, *found)

    def slot(self, queue: Queue, state: State, id_: int) -> Any:
        slots = self.view(queue).slots
        rows = slots[(slots["id"] == id_) & (layout.state(slots["word"]) == int(state))]
        assert len(rows) == 1
        return rows[0]

    def may_lack_memory(self, queue: Queue, lengths: list[int]) -> bool:
        """Can the bodies of other messages, by their number or places, keep these out?"""
        slots = self.view(queue).slots
        live = slots[layout.state(slots["word"]) != int(State.FREE)]
        used = int(live["capacity"].sum()) + HEAD * len(live)
        # a body that is kept for the next message may be four times as large as needed
        wanted = sum(5 * block(length) + 1024 for length in lengths)
        if used + wanted > self.limits["arena_size"] - 64:
            return True
        starts = np.sort(live["body"]) - HEAD
        ends = np.sort(live["body"] + live["capacity"])
        gaps = np.append(starts, self.limits["arena_size"] - 64) - np.insert(ends, 0, 0)
        return bool(gaps.max() < max(map(block, lengths)))

    def new_ids(self, ids: list[int]) -> None:
        for id_ in ids:
            assert id_ > self.last_id
            assert id_ & 1023 == self.limits["node_id"]
            self.last_id = id_

    @property
    def sessions(self) -> list[Session]:
        return [session for person in self.people for session in person.sessions]

    # ---- compare ----

    @invariant()
    def core_and_model_agree(self) -> None:
        idle, self.idle = self.idle, False
        if idle:
            return
        for queue in (*self.topic.queues, *self.graves.values()):
            self.compare(queue)
        for grave in self.graves.values():
            topic = self.world.directory.topics[self.view(grave).read("topic")]
            assert int(topic["committed"]) == grave.topic.seq
            assert int(topic["messages"]) == grave.topic.messages
        row = self.world.directory.topics[self.index]
        assert int(row["committed"]) == self.topic.seq
        assert int(row["messages"]) == self.topic.messages
        assert int(row["bytes"]) == self.topic.bytes
        assert bool(row["paused"]) == self.topic.paused
        for person in self.people:
            for view, delivery in person.views:
                assert view == delivery.msg.body

    def compare(self, queue: Queue) -> None:
        view = self.view(queue)
        count = recount.count(self.world.directory, view)
        assert not count.problems, count.problems
        slots = count.slots

        def ids(found: Any) -> list[int]:
            return slots["id"][found].tolist()

        assert ids(view.ready) == [msg.id for msg in queue.ready]
        assert ids(view.requeue) == [msg.id for msg in queue.back]
        assert slots["after"][view.requeue].tolist() == [msg.after for msg in queue.back]
        assert slots["order"][view.ready].tolist() == [msg.seq for msg in queue.ready]
        spilling = [msg for msg, _ in queue.spilling or ()]
        for state, messages in (
            (State.READY, queue.ready),
            (State.REQUEUED, queue.back),
            (State.IN_FLIGHT, queue.in_flight.values()),
            (State.DEFERRED, queue.deferred.values()),
            (State.PINNED, queue.done),
            (State.SPILLING, spilling),
        ):
            self.compare_messages(view, slots[count.of[state]], state, list(messages))
        assert len(count.of[State.LOANED]) == queue.loans

        assert view.read("paused") == queue.paused
        assert view.read("spilling") == queue.spill_flag
        assert view.read("disk_read") == queue.read
        assert view.read("disk_write") == queue.write
        assert view.read("disk_depth") == len(queue.disk)
        counters = {name: view.read(name) for name in queue.counters}
        assert counters == queue.counters
        assert int(layout.generation(slots["word"]).sum()) == queue.counters["delivered"]
        self.compare_sessions(view, queue)
        generations = layout.generation(slots["word"])
        seen = self.words.get(queue.serial)
        if seen is not None:
            assert (generations[: len(seen)] >= seen).all(), "a generation was lowered"
        self.words[queue.serial] = generations

    def compare_messages(
        self, view: QueueView, rows: Any, state: State, messages: list[Msg]
    ) -> None:
        by_id = {msg.id: msg for msg in messages}
        if state is not State.PINNED:
            assert len(by_id) == len(messages)
        assert sorted(rows["id"].tolist()) == sorted(msg.id for msg in messages), state
        arena = view.arena
        for row in rows:
            msg = by_id[int(row["id"])]
            start, length = int(row["body"]), int(row["length"])
            if int(row["flags"]) & layout.constant("SLOT_PROPERTIES"):
                start, length = start + int(row["properties"]), length - int(row["properties"])
            assert arena[start : start + length].tobytes() == msg.body
            msg.block = int(row["capacity"]) + HEAD
            assert int(row["timestamp"]) == msg.timestamp
            assert int(row["attempts"]) == msg.attempts
            if state is not State.PINNED:
                assert int(row["pins"]) == msg.pins
            if state is State.IN_FLIGHT:
                assert msg.holder
                assert int(row["deadline"]) == msg.deadline
                person = msg.holder.session.client
                assert int(layout.owner(row["word"])) == person.client.index
            if state is State.DEFERRED:
                assert int(row["deadline"]) == msg.due
                convicted = int(row["flags"]) & layout.constant("SLOT_CONVICTED")
                assert bool(convicted) == bool(msg.reason)
                if msg.reason:
                    assert REASONS[int(row["flags"]) >> REASON_SHIFT & 3] == msg.reason
            if state is not State.PINNED:
                self.compare_flags(row, msg)

    def compare_flags(self, row: Any, msg: Msg) -> None:
        flags = int(row["flags"])
        failed = bool(flags & layout.constant("SLOT_FAILED"))
        assert failed == msg.failed
        assert not failed or int(row["failures"]) >> 16 == msg.failures
        assert bool(flags & layout.constant("SLOT_SUSPECT")) == msg.suspect
        expires = bool(flags & layout.constant("SLOT_EXPIRES"))
        assert (int(row["expires"]) if expires else None) == msg.expires

    def compare_sessions(self, view: QueueView, queue: Queue) -> None:
        names = ("max_in_flight", "in_flight", "delivered", "finished", "requeued", "timed_out")
        table = view.sessions
        live = table[table["client"] > 0]
        found = sorted((int(s["client"]) - 1, *(int(s[name]) for name in names)) for s in live)
        expected = sorted(
            (session.client.client.index, *(getattr(session, name) for name in names))
            for session in queue.sessions
        )
        assert found == expected
        for session in queue.sessions:
            assert session.native.in_flight == session.in_flight
