"""The core against a plain model (tests/model.py): random operations of several clients and of the
supervisor in one process; after each, both hold the same messages in the same order, and an
independent recount of the segment (tests/recount.py) finds nothing wrong.

SHMQ_HYPOTHESIS=long runs many more and longer examples.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import recount
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from model import HEAD, RECORD_HEAD, Delivery, Msg, Queue, Record, Session, Topic, block
from world import LIMITS, SECOND, Client, World

from shmq import Full, Gone, MessageTooBig, NotInFlight, ShmqError, layout
from shmq.client import Producer
from shmq.layout import QueueView, State

LONG = os.environ.get("SHMQ_HYPOTHESIS") == "long"
SETTINGS = settings(
    max_examples=10_000 if LONG else 350,
    stateful_step_count=200 if LONG else 100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)

TOPIC = "t"
CHANNELS = ("a", "b", "c", "e#ephemeral")
CLOCK_MONOTONIC_COARSE = 6  # linux/time.h; how far it lags is the machine's affair
ROUNDED_UP = 4_000_000  # by as much, in the core
FILE_BYTES = 4000  # a file on disk ends with the batch that passes this
NEVER = np.iinfo(np.int64).max

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
    """What one take_many returned, with those that were not settled through it."""

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


def choose(items: list[Any], number: int) -> Any:
    return items[number % len(items)]


def when(condition: Callable[[Any], Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The rule does nothing without this. Not hypothesis's precondition, because what there is at
    a time may depend on the clock (which of two deadlines comes first), and what is drawn must
    not."""

    def decorate(act: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(act)
        def run(machine: Machine, *arguments: Any, **named: Any) -> None:
            machine.idle = not condition(machine)
            if not machine.idle:
                act(machine, *arguments, **named)

        return run

    return decorate


class Machine(RuleBasedStateMachine):
    """Rules are what somebody may do at any time; the invariant compares."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = dict(LIMITS)
        self.world = World(**self.limits)
        self.topic = Topic(self.limits)
        self.index, self.generation = self.world.create_topic(TOPIC)
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
        self.words: dict[int, Any] = {}  # generations seen, by serial

    def teardown(self) -> None:
        self.spills.clear()
        self.world.close()

    @initialize(
        channels=st.lists(st.sampled_from(CHANNELS), max_size=3),
        clients=st.integers(1, 3),
        count=st.integers(0, 60),
    )
    def begin(self, channels: list[str], clients: int, count: int) -> None:
        for _ in range(clients):
            self.somebody_attaches()
        for number, channel in enumerate(channels):
            self.consumer_opens(number, channel, 12, 0)
        if count:
            self.publish_batch(0, [20] * count, None)

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
        """What was published deferred goes to the heap, where its bytes count as held."""
        for queue in queues or ():
            self.world.supervisor.expire(queue.index, 0)

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

    # ---- who is there ----

    @rule()
    @when(lambda self: len(self.people) < 3)
    def somebody_attaches(self) -> None:
        client = self.world.attach()
        self.people.append(Someone(client, client.producer(TOPIC)))

    @rule(who=PICK, how=st.sampled_from(["stay", "die", "detach"]))
    @when(lambda self: len(self.people) > 1)
    def somebody_leaves(self, who: int, how: str) -> None:
        person = choose(self.people, who)
        if how == "stay":
            return
        self.people.remove(person)
        if how == "die":
            person.client.die()
            returned = self.world.reap()
            assert list(returned) == [person.client.index]
            assert self.forget(person) == returned[person.client.index]
        else:
            person.client.close()
            self.forget(person)
        assert self.world.reap() == {}

    def forget(self, person: Someone) -> int:
        """What a client held goes back."""
        count = 0
        for loan in person.loans:
            for queue in loan.targets:
                queue.loans -= 1
        for queue in self.topic.queues:
            mine = [session for session in person.sessions if session.queue is queue]
            count += queue.give_back([session for session in mine if session.open])
        for _, delivery in person.views:
            if not delivery.session.queue.gone:
                delivery.session.queue.unpin(delivery.msg)
        # not dropped: its views would give back pins of whoever has the entry next
        gone = set(person.sessions)
        self.buried.append((person, [d for d in self.deliveries if d.session in gone]))
        self.deliveries = [d for d in self.deliveries if d.session not in gone]
        self.batches = [b for b in self.batches if b.deliveries[0].session not in gone]
        return count

    @rule(
        who=PICK,
        channel=st.sampled_from(CHANNELS),
        max_in_flight=st.integers(1, 20),
        timeout=st.sampled_from([0, -1, 5 * SECOND]),
    )
    @when(lambda self: self.people and len(self.sessions) < 6)
    def consumer_opens(self, who: int, channel: str, max_in_flight: int, timeout: int) -> None:
        self.channel_is_made(channel)
        person = choose(self.people, who)
        native = person.client.consumer(TOPIC, channel, max_in_flight, timeout)
        queue = next(queue for queue in self.topic.queues if queue.channel == channel)
        seconds = {0: self.limits["msg_timeout"], -1: None}.get(timeout, timeout)
        session = Session(queue, person, max_in_flight, seconds, native)
        queue.sessions.append(session)
        person.sessions.append(session)

    @rule(who=PICK, really=st.booleans())
    @when(lambda self: self.sessions)
    def consumer_closes(self, who: int, really: bool) -> None:
        session = choose(self.sessions, who)
        if session.open and not really:
            return
        session.native.close()
        if session.open:
            session.queue.give_back([session])
        session.client.sessions.remove(session)
        assert session.native.closed
        with pytest.raises(Gone):
            session.native.take(0)

    # ---- channels ----

    def channel_is_made(self, channel: str) -> None:
        if any(queue.channel == channel for queue in self.topic.queues):
            return
        backlog = self.topic.backlog
        found = self.world.create_channel(TOPIC, channel)
        if backlog is not None and not self.topic.channels and not self.topic.paused:
            assert found == (backlog.index, backlog.serial)
            backlog.channel = channel
            backlog.ephemeral = channel.endswith("#ephemeral")
        else:
            self.add_queue(channel, *found)

    @rule(which=PICK, really=st.integers(0, 3))
    @when(lambda self: len(self.topic.channels) > 1)
    def channel_is_deleted(self, which: int, really: int) -> None:
        queue = choose(self.topic.channels, which)
        if queue in self.spills or really != 3:
            return
        self.world.remove_queue(queue.index, queue.serial)
        self.topic.queues.remove(queue)
        queue.gone = True
        queue.in_flight.clear()
        for session in queue.sessions:
            session.open = False
            with pytest.raises(Gone):
                session.native.take(0)
        for person in self.people:
            for loan in person.loans:
                if queue in loan.targets:
                    loan.targets.remove(queue)

    @rule(which=PICK)
    @when(lambda self: self.topic.channels)
    def channel_is_paused(self, which: int) -> None:
        """Or unpaused, if there is a paused one."""
        paused = [queue for queue in self.topic.channels if queue.paused]
        queue = choose(paused or self.topic.channels, which)
        queue.paused = not paused
        self.world.supervisor.pause_channel(queue.index, queue.serial, queue.paused)

    @rule(paused=st.booleans())
    def topic_is_paused(self, paused: bool) -> None:
        self.world.supervisor.pause_topic(self.index, self.generation, paused)
        self.topic.paused = paused

    @rule(which=PICK, really=st.integers(0, 3))
    @when(lambda self: self.topic.queues)
    def queue_is_emptied(self, which: int, really: int) -> None:
        queue = choose(self.topic.queues, which)
        if really != 3 and queue not in self.spills:
            return
        dropped = self.world.supervisor.empty(queue.index, queue.serial)
        assert dropped == queue.clear()

    # ---- publish ----

    @rule(who=PICK, size=SIZES, defer=st.sampled_from([None, None, 0, 5, 60.5]))
    @when(lambda self: self.people)
    def one_is_published(self, who: int, size: int, defer: float | None) -> None:
        body = self.body(size)
        producer = choose(self.people, who).producer
        self.publish([body], defer, lambda: [int(producer.publish(body, defer, 0), 16)])

    @rule(who=PICK, sizes=st.lists(SIZES, min_size=1, max_size=8), defer=st.sampled_from([0, 30]))
    @when(lambda self: self.people)
    def several_are_published(self, who: int, sizes: list[int], defer: float) -> None:
        self.publish_batch(who, sizes, defer)

    @rule(who=PICK, count=st.integers(20, 150), size=st.sampled_from([8, 8, 100, 700]))
    @when(lambda self: self.people)
    def many_are_published(self, who: int, count: int, size: int) -> None:
        self.publish_batch(who, [size] * count, None)

    def publish_batch(self, who: int, sizes: list[int], defer: float | None) -> None:
        bodies = [self.body(size) for size in sizes]
        producer = choose(self.people, who).producer
        self.publish(bodies, defer, lambda: list(producer.publish_many(bodies, defer, 0)))

    def publish(
        self, bodies: list[bytes], defer: float | None, call: Callable[[], list[int]]
    ) -> None:
        lengths = [len(body) for body in bodies]
        targets = self.topic.targets()
        if defer:
            self.drain(targets)
        expected = {queue: queue.room(lengths, bool(defer)) for queue in targets or ()}
        dropped = {queue: self.view(queue).read("dropped") for queue in targets or ()}
        before = time.time_ns()
        try:
            ids = call()
        except MessageTooBig:
            assert "big" in expected.values() or targets is None
            self.sync_backlog()
            return
        except Full:
            assert targets
            lacking = [queue for queue in targets if not queue.ephemeral]
            assert any(
                expected[queue] == "full" or self.may_lack_memory(queue, lengths)
                for queue in lacking
            ), "Full with room for it"
            return
        after = time.time_ns()
        self.sync_backlog()
        if targets is None:
            targets = self.topic.targets()
            assert targets is not None
        served = self.served(targets, expected, dropped, lengths)
        self.new_ids(ids)
        assert len(ids) == len(bodies)
        self.enter(ids, bodies, defer, served, before, after)

    def served(
        self,
        targets: list[Queue],
        expected: dict[Queue, str],
        dropped: dict[Queue, int],
        lengths: list[int],
    ) -> list[Queue]:
        """All but the full ephemeral ones."""
        served = []
        for queue in targets:
            outcome = expected.get(queue, "ok")
            now = self.view(queue).read("dropped")
            if queue.ephemeral and now != dropped.get(queue, 0):
                assert now == dropped[queue] + len(lengths)
                assert outcome == "full" or self.may_lack_memory(queue, lengths)
                queue.counters["dropped"] = now
            else:
                assert outcome == "ok"
                served.append(queue)
        return served

    def enter(
        self,
        ids: list[int],
        bodies: list[bytes],
        defer: float | None,
        targets: list[Queue],
        before: int,
        after: int,
    ) -> None:
        timestamp = due = 0
        if targets:
            state = State.DEFERRED if defer else State.READY
            row = self.slot(targets[0], state, ids[0])
            timestamp = int(row["timestamp"])
            assert before <= timestamp <= after
            if defer:
                due = int(row["deadline"])
                assert before <= due - int(defer * SECOND) <= after
        self.topic.publish(ids, bodies, timestamp, due, targets)

    @rule(who=PICK, size=SIZES, defer=st.sampled_from([None, None, 20]))
    @when(lambda self: self.people)
    def loan_begins(self, who: int, size: int, defer: float | None) -> None:
        person = choose(self.people, who)
        if len(person.loans) >= 4:
            return
        targets = self.topic.targets()
        expected = {queue: queue.room([size], False) for queue in targets or ()}
        native = person.producer.loan(size, defer, 0)
        try:
            buffer = native.__enter__()
        except Full:
            assert targets
            assert any(
                expected[queue] == "full" or self.may_lack_memory(queue, [size])
                for queue in targets
                if not queue.ephemeral
            )
            return
        self.sync_backlog()
        lent = []
        for queue in targets or self.topic.targets() or ():
            words = self.view(queue).slots["word"]
            if np.count_nonzero(layout.state(words) == int(State.LOANED)) > queue.loans:
                assert expected.get(queue, "ok") == "ok"
                queue.loans += 1
                lent.append(queue)
            else:
                assert queue.ephemeral
                assert expected[queue] == "full" or self.may_lack_memory(queue, [size])
        body = self.body(size)
        buffer[:] = body
        person.loans.append(Lent(native, buffer, body, lent, defer))

    @rule(who=PICK, commit=st.booleans())
    @when(lambda self: any(person.loans for person in self.people))
    def loan_ends(self, who: int, commit: bool) -> None:
        person = choose([person for person in self.people if person.loans], who)
        loan = person.loans.pop(0)
        if not commit:
            loan.native.__exit__(ValueError, ValueError(), None)
            assert loan.native.id is None
            for queue in loan.targets:
                queue.loans -= 1
            return
        targets = self.topic.targets()
        self.drain(targets)
        length, others = [len(loan.body)], [q for q in targets or () if q not in loan.targets]
        expected = {queue: queue.room(length, bool(loan.defer)) for queue in others}
        dropped = {queue: self.view(queue).read("dropped") for queue in targets or ()}
        before = time.time_ns()
        try:
            loan.native.__exit__(None, None, None)
        except Full:
            assert any(
                outcome == "full" or self.may_lack_memory(queue, length)
                for queue, outcome in expected.items()
                if not queue.ephemeral
            )
            for queue in loan.targets:
                queue.loans -= 1
            return
        after = time.time_ns()
        self.sync_backlog()
        for queue in loan.targets:
            queue.loans -= 1
        served = self.served(targets or self.topic.targets() or [], expected, dropped, length)
        ids = [int(loan.native.id, 16)]
        self.new_ids(ids)
        self.enter(ids, [loan.body], loan.defer, served, before, after)

    # ---- take ----

    @rule(who=PICK, n=st.integers(0, 24))
    @when(lambda self: any(session.open for session in self.sessions))
    def some_are_taken(self, who: int, n: int) -> None:
        """n 0: singly."""
        session = choose([session for session in self.sessions if session.open], who)
        self.take(session, n)

    @rule(who=PICK, n=st.integers(0, 12), looks=st.booleans(), what=PICK)
    @when(lambda self: any(session.open for session in self.sessions))
    def somebody_works(self, who: int, n: int, looks: bool, what: int) -> None:
        """Takes, perhaps looks at the messages in place, and settles most of them."""
        session = choose([session for session in self.sessions if session.open], who)
        if looks:  # only what is taken singly is seen in place
            taken = [delivery for _ in range(n % 4) for delivery in self.take(session, 0)]
        else:
            taken = self.take(session, n)
        for number, delivery in enumerate(taken):
            if looks:
                self.look_at(delivery)
            act = choose(["finish", "finish", "requeue", "touch", None], what + number)
            if act:
                self.settle(delivery, act, choose([0, 0, 3], what + number))

    def take(self, session: Session, n: int) -> list[Delivery]:
        queue = session.queue
        expected = queue.take(session, n or 1)
        before = time.clock_gettime_ns(CLOCK_MONOTONIC_COARSE)
        if n:
            batch = session.native.take_many(n, 0)
            got = list(batch)
        else:
            message = session.native.take(0)
            got = [] if message is None else [message]
        after = time.monotonic_ns()
        assert [int(message.id, 16) for message in got] == [msg.id for msg in expected]
        for msg, message in zip(expected, got, strict=True):
            assert message.body == msg.body
            assert (message.timestamp, message.attempts) == (msg.timestamp, msg.attempts)
            assert len(message) == len(msg.body)
            msg.deadline = int(self.slot(queue, State.INFLIGHT, msg.id)["deadline"])
            if session.timeout is None:
                assert msg.deadline == NEVER
            else:
                assert before <= msg.deadline - session.timeout <= after + ROUNDED_UP
            msg.holder = Delivery(msg, session, message, single=not n)
            self.deliveries.append(msg.holder)
        if n and expected:
            held = [msg.holder for msg in expected if msg.holder]
            self.batches.append(Taken(batch, held, list(held)))
            assert batch.bodies() == [msg.body for msg in expected]
            assert batch.ids.tolist() == [msg.id for msg in expected]
        del self.deliveries[:-60]
        del self.batches[:-8]
        return [msg.holder for msg in expected if msg.holder]

    # ---- settle ----

    @rule(
        which=PICK,
        what=st.sampled_from(["finish", "finish", "requeue", "touch"]),
        delay=PICK,
        stale=st.booleans(),
    )
    @when(lambda self: self.deliveries)
    def one_is_settled(self, which: int, what: str, delay: int, stale: bool) -> None:
        """Also those that are in flight no more."""
        same = [item for item in self.deliveries if item.live != stale]
        delivery = choose(same or self.deliveries, which)
        self.settle(delivery, what, choose([0, 0, 3, 5000], delay))

    def settle(self, delivery: Delivery, what: str, seconds: float) -> None:
        seconds = seconds if what == "requeue" else 0
        arguments = (seconds,) if what == "requeue" else ()
        call = getattr(delivery.native, what)
        if delivery.live:
            before = time.time_ns(), time.clock_gettime_ns(CLOCK_MONOTONIC_COARSE)
            call(*arguments)
            self.settled(delivery, what, seconds, *before)
        else:
            with pytest.raises(self.refusal(delivery.session)):
                call(*arguments)
            if self.refusal(delivery.session) is Gone:
                return
        if what != "touch" or not delivery.live:
            for batch in self.batches:
                if delivery in batch.open:
                    batch.open.remove(delivery)

    def refusal(self, session: Session) -> type[ShmqError]:
        """Of what is not in flight to it."""
        return Gone if session.queue.gone and not session.native.closed else NotInFlight

    def settled(
        self, delivery: Delivery, what: str, seconds: float, real: int, monotonic: int
    ) -> None:
        msg, session = delivery.msg, delivery.session
        queue = session.queue
        if what == "finish":
            queue.finish(msg)
        elif what == "touch":
            self.touched(delivery, monotonic)
        elif not seconds:
            queue.requeue(msg, 0)
        else:
            due = int(self.slot(queue, State.DEFERRED, msg.id)["deadline"])
            delay = min(int(seconds * SECOND), self.limits["max_req_timeout"])
            assert real <= due - delay <= time.time_ns()
            queue.requeue(msg, due)

    def touched(self, delivery: Delivery, monotonic: int) -> None:
        row = self.slot(delivery.session.queue, State.INFLIGHT, delivery.msg.id)
        deadline, timeout = int(row["deadline"]), delivery.session.timeout
        if timeout is None:
            assert deadline == NEVER
        else:
            now = time.monotonic_ns()
            assert monotonic <= deadline - timeout <= now + ROUNDED_UP
        delivery.msg.deadline = deadline

    @rule(which=PICK, what=st.sampled_from(["finish", "requeue", "touch"]), delay=st.booleans())
    @when(lambda self: self.batches)
    def batch_is_settled(self, which: int, what: str, delay: bool) -> None:
        """All that are still in flight, whatever became of the others."""
        batch = choose(self.batches, which)
        session = batch.deliveries[0].session
        seconds = 3 if delay and what == "requeue" else 0
        arguments = (seconds,) if what == "requeue" else ()
        live = [delivery for delivery in batch.open if delivery.live]
        before = time.time_ns(), time.clock_gettime_ns(CLOCK_MONOTONIC_COARSE)
        if len(live) == len(batch.open):
            getattr(batch.native, what)(*arguments)
        else:
            with pytest.raises(self.refusal(session)):
                getattr(batch.native, what)(*arguments)
            if self.refusal(session) is Gone:
                return
        for delivery in live:
            self.settled(delivery, what, seconds, *before)
        batch.open = live if what == "touch" else []

    # ---- views ----

    @rule(which=PICK)
    @when(lambda self: any(d.single and d.live for d in self.deliveries))
    def one_is_viewed(self, which: int) -> None:
        self.look_at(choose([d for d in self.deliveries if d.single and d.live], which))

    def look_at(self, delivery: Delivery) -> None:
        person = delivery.session.client
        if any(other is delivery for _, other in person.views):
            return
        person.views.append((delivery.native.view, delivery))
        delivery.msg.pins += 1

    @rule(who=PICK, which=PICK)
    @when(lambda self: any(person.views for person in self.people))
    def view_ends(self, who: int, which: int) -> None:
        person = choose([person for person in self.people if person.views], who)
        view, delivery = person.views.pop(which % len(person.views))
        view.release()
        if not delivery.session.queue.gone:
            delivery.session.queue.unpin(delivery.msg)

    # ---- the supervisor's work ----

    @rule(which=PICK, late=st.integers(0, 12), due=st.integers(0, 6), limit=st.integers(0, 12))
    @when(lambda self: any(q.in_flight or q.deferred for q in self.topic.queues))
    def time_passes(self, which: int, late: int, due: int, limit: int) -> None:
        """Until the late-th deadline and the due-th due time."""
        queue = choose([q for q in self.topic.queues if q.in_flight or q.deferred], which)
        deadlines = sorted(msg.deadline for msg in queue.in_flight.values())
        dues = sorted(msg.due for msg in queue.deferred.values())
        now = min(deadlines[late - 1 : late] or [0], default=0)
        realtime = min(dues[due - 1 : due] or [0], default=0)
        if now == NEVER:
            now -= 1
        expired = [value for value in deadlines if value <= now][:limit]
        came = [value for value in dues if value <= realtime][: limit - len(expired)]
        result = self.world.supervisor.expire(queue.index, limit, now, realtime)
        assert result == (len(expired), len(came))
        view = self.view(queue)
        ids = view.slots["id"][view.requeue].tolist()[len(queue.back) :]
        assert len(ids) == len(expired) + len(came)
        messages = [queue.in_flight[id_] for id_ in ids[: len(expired)]]
        assert [msg.deadline for msg in messages] == expired
        for msg in messages:
            queue.timed_out(msg)
        messages = [queue.deferred[id_] for id_ in ids[len(expired) :]]
        assert [msg.due for msg in messages] == came
        for msg in messages:
            queue.came_due(msg)

    @rule(which=PICK, n=st.integers(0, 20))
    @when(lambda self: any(queue.ready for queue in self.topic.queues))
    def oldest_are_advanced(self, which: int, n: int) -> None:
        queue = choose([queue for queue in self.topic.queues if queue.ready], which)
        assert self.world.supervisor.advance(queue.index, n) == queue.advance(n)

    @rule(
        which=PICK,
        n=st.integers(0, 80),
        max_bytes=st.sampled_from([1, 300, 5000, 1 << 20]),
        everything=st.booleans(),
    )
    @when(lambda self: self.topic.queues)
    def spill_begins(self, which: int, n: int, max_bytes: int, everything: bool) -> None:
        self.spill(choose(self.topic.queues, which), n, max_bytes, everything)

    @rule(which=PICK, n=st.integers(5, 80))
    @when(lambda self: any(queue.ready for queue in self.topic.queues))
    def overflow_is_written(self, which: int, n: int) -> None:
        queue = choose([queue for queue in self.topic.queues if queue.ready], which)
        if queue not in self.spills:
            self.spill(queue, n, 1 << 20, False)
        if queue in self.spills:
            self.end_spill(queue, "ok")

    def spill(self, queue: Queue, n: int, max_bytes: int, everything: bool) -> None:
        if queue in self.spills or queue.spill_flag:
            return
        spill = self.world.supervisor.spill_begin(queue.index, n, max_bytes, everything)
        ids = [] if spill is None else [id_ for id_, _ in read_records(spill.encode())]
        batch = queue.spill_begin(n, max_bytes, everything)
        assert ids == [msg.id for msg, _ in batch]
        if spill is None:
            return
        assert spill.count == len(batch)
        assert list(spill.lengths) == [msg.record_bytes for msg, _ in batch]
        assert spill.bytes == sum(spill.lengths)
        self.spills[queue] = spill

    @rule(which=PICK, how=st.sampled_from(["ok", "ok", "ok", "fail", "drop"]))
    @when(lambda self: self.spills)
    def spill_ends(self, which: int, how: str) -> None:
        self.end_spill(choose(list(self.spills), which), how)

    def end_spill(self, queue: Queue, how: str) -> None:
        spill = self.spills.pop(queue)
        if how == "drop" or how == "fail":
            if how == "fail":
                assert spill.end(0, False)
            del spill
            queue.spill_undo()
            queue.spilling, queue.spill_flag = None, False
            return
        file, offset = queue.write >> 40, queue.write & (1 << 40) - 1
        data = self.files[queue][file]
        del data[offset:]
        records_bytes = spill.encode()
        if queue.spilling:
            expected = [(msg.id, msg.body) for msg, _ in queue.spilling]
            assert read_records(records_bytes) == expected
        data += records_bytes
        positions = [queue.write]
        for length in spill.lengths:
            positions.append(positions[-1] + length)
        for number, position in enumerate(positions[:-1]):
            spill.positions[number] = position
        if len(data) > FILE_BYTES:
            positions[-1] = (file + 1) << 40
        records = []
        if queue.spilling:
            records = [
                Record(replace(msg, pins=0, holder=None), here, there)
                for (msg, _), here, there in zip(
                    queue.spilling, positions[:-1], positions[1:], strict=True
                )
            ]
        assert spill.end(positions[-1], True) == queue.spill_end(records, positions[-1])
        self.files[queue].setdefault(queue.write >> 40, bytearray())

    @rule(which=PICK, n=st.integers(1, 40))
    @when(lambda self: any(queue.disk for queue in self.topic.queues))
    def some_are_restored(self, which: int, n: int) -> None:
        queue = choose([queue for queue in self.topic.queues if queue.disk], which)
        supervisor = self.world.supervisor
        self.drain([queue])
        records = [r for r in queue.disk[:n] if r.position >> 40 == queue.disk[0].position >> 40]
        first, last = records[0].position, records[-1]
        start = first & (1 << 40) - 1
        nbytes = sum(record.msg.record_bytes for record in records)
        data = bytes(self.files[queue][first >> 40][start : start + nbytes])
        elsewhere = supervisor.restore(queue.index, data, first + 1, last.next_position)
        assert elsewhere in (None, (0, 0))  # it may find no room before it looks at the position
        result = supervisor.restore(queue.index, data, first, last.next_position)
        assert result is not None
        count, used = result
        most = queue.restorable(len(records))
        lengths = [len(record.msg.body) for record in records[:most]]
        if count != most:
            assert count < most
            # a block may be up to four times as large as needed
            may = queue.held_bytes() + sum(5 * block(length) + 1024 for length in lengths)
            assert may > self.topic.bytes_budget or self.may_lack_memory(queue, lengths)
        assert used == sum(record.msg.record_bytes for record in records[:count])
        queue.restore(count, records[count - 1].next_position if count else 0)

    @rule(which=PICK)
    @when(lambda self: any(queue.back for queue in self.topic.queues))
    def read_ahead_goes_back(self, which: int) -> None:
        queue = choose([queue for queue in self.topic.queues if queue.back], which)
        assert self.world.supervisor.unrestore(queue.index) == queue.unrestore()

    @rule(which=PICK)
    @when(lambda self: any(queue.disk for queue in self.topic.queues))
    def damage_is_skipped(self, which: int) -> None:
        """The first record on disk is lost."""
        queue = choose([queue for queue in self.topic.queues if queue.disk], which)
        record, depth = queue.disk[0], len(queue.disk) - 1
        supervisor = self.world.supervisor
        assert not supervisor.disk_set(queue.index, queue.read + 1, record.next_position, depth)
        assert supervisor.disk_set(queue.index, queue.read, record.next_position, depth)
        del queue.disk[0]
        queue.read = record.next_position

    @rule(n=st.integers(1, 40))
    @when(lambda self: self.topic.backlog)
    def backlog_is_moved(self, n: int) -> None:
        topic, backlog = self.topic, self.topic.backlog
        assert backlog
        self.drain(topic.channels)
        moved = self.world.supervisor.pump(self.index, self.generation, n)
        if topic.paused or not topic.channels:
            assert moved == 0
            return
        channels = sorted(topic.channels, key=lambda queue: queue.index)
        for _ in range(max(moved, 0)):
            source = topic.next_of_backlog()
            assert source is not None
            if source[1] == "deferred":  # of equal due times any may go first
                left = self.view(backlog).deferred[1]
                still = set(self.view(backlog).slots["id"][left].tolist())
                gone = [msg for msg in backlog.deferred.values() if msg.id not in still]
                chosen = min(gone, key=lambda msg: msg.due)
                assert chosen.due == source[0].due
                backlog.deferred = {chosen.id: chosen} | {
                    key: msg for key, msg in backlog.deferred.items() if msg is not chosen
                }
                source = chosen, "deferred"
            served = []
            for queue in channels:
                outcome = queue.room([len(source[0].body)], source[1] == "deferred")
                if self.got(queue, source[1], source[0]):
                    assert outcome == "ok"
                    served.append(queue)
                    continue
                assert queue.ephemeral
                assert outcome == "full" or self.may_lack_memory(queue, [len(source[0].body)])
                queue.counters["dropped"] += 1
            topic.pump_one(served)
        for queue in channels:
            assert self.view(queue).read("dropped") == queue.counters["dropped"]
        source = topic.next_of_backlog()
        if moved < n and source is not None:
            length, deferred = [len(source[0].body)], source[1] == "deferred"
            assert any(
                queue.room(length, deferred) == "full" or self.may_lack_memory(queue, length)
                for queue in channels
                if not queue.ephemeral
            )
        assert moved != -1 or source is not None

    def got(self, queue: Queue, state: str, msg: Msg) -> bool:
        """Has the backlog's message come to this channel?"""
        slots = self.view(queue).slots
        wanted = State.DEFERRED if state == "deferred" else State.READY
        return bool(np.any(
            (slots["id"] == msg.id) & (layout.state(slots["word"]) == int(wanted))
        ))  # fmt: skip

    @rule(which=PICK, adopting=st.sampled_from([False, False, True]))
    @when(lambda self: self.topic.queues)
    def all_is_rebuilt(self, which: int, adopting: bool) -> None:
        """Changes nothing; a new supervisor gives up what the last one was spilling."""
        queue = choose(self.topic.queues, which)
        if not adopting:
            self.world.supervisor.rebuild(queue.index)
            return
        self.world.supervisor.adopt(queue.index)
        queue.adopt()
        spill = self.spills.pop(queue, None)
        if spill is not None:
            assert not spill.end(queue.write + 1, True)
            queue.spilling = None

    # ---- compare ----

    @invariant()
    def core_and_model_agree(self) -> None:
        idle, self.idle = self.idle, False
        if idle:
            return
        for queue in self.topic.queues:
            self.compare(queue)
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
            (State.BACK, queue.back),
            (State.INFLIGHT, queue.in_flight.values()),
            (State.DEFERRED, queue.deferred.values()),
            (State.DONE, queue.done),
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
        if state is not State.DONE:
            assert len(by_id) == len(messages)
        assert sorted(rows["id"].tolist()) == sorted(msg.id for msg in messages), state
        arena = view.arena
        for row in rows:
            msg = by_id[int(row["id"])]
            start, length = int(row["body"]), int(row["length"])
            assert arena[start : start + length].tobytes() == msg.body
            msg.block = int(row["capacity"]) + HEAD
            assert int(row["timestamp"]) == msg.timestamp
            assert int(row["attempts"]) == msg.attempts
            if state is not State.DONE:
                assert int(row["pins"]) == msg.pins
            if state is State.INFLIGHT:
                assert msg.holder
                assert int(row["deadline"]) == msg.deadline
                person = msg.holder.session.client
                assert int(layout.owner(row["word"])) == person.client.index
            if state is State.DEFERRED:
                assert int(row["deadline"]) == msg.due

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


@pytest.mark.timeout(20_000 if LONG else 900)
def test_core_and_model_agree_after_any_operations() -> None:
    run_state_machine_as_test(Machine, settings=SETTINGS)
