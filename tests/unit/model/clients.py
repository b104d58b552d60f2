"""The clients of test_model: they come and go, publish, take, settle and look."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import (
    rule,
)
from support.in_process_broker import SECOND
from support.queue_model import Queue
from support.queue_parts import (
    Delivery,
    Msg,
    Session,
)
from unit.model.base import (
    CHANNELS,
    CLOCK_MONOTONIC_COARSE,
    NEVER,
    PICK,
    ROUNDED_UP,
    SHORT,
    SIZES,
    TOPIC,
    Base,
    Lent,
    Someone,
    Taken,
    choose,
    dead_topic,
    when,
)

from shmq import BadArgument, Full, Gone, MessageTooBig, NotInFlight, ShmqError, layout
from shmq.layout import State
from shmq.settings import Settings

#: How a message may be settled.
ACTS = ("finish", "finish", "requeue", "release", "retry", "reject", "touch")
#: Settings that a channel may be given.
RETRY = (20.0, 300.0)
CHOICES: list[dict[str, Any]] = [
    {},
    {"max_attempts": 1},
    {"max_attempts": 3},
    {"retry_delay": RETRY},
    {"max_attempts": 2, "retry_delay": RETRY, "message_ttl": SHORT},
    {"max_attempts": 2, "message_ttl": SHORT, "expired_to_dead": True},
    {"message_ttl": 3600.0},
    {"overflow": "block"},
    {"overflow": "block", "max_messages": 20},
    {"overflow": "reject", "max_messages": 5, "max_attempts": 2},
    {"overflow": "reject", "max_bytes": 1000},
    {"overflow": "drop-newest", "max_messages": 12, "max_bytes": 50_000},
    {"overflow": "drop-oldest", "max_messages": 1},
    {"overflow": "drop-oldest", "max_messages": 30, "overflow_to_dead": True},
    {"overflow": "drop-oldest", "max_bytes": 3000, "max_attempts": 3},
    {"overflow": "block", "max_messages": 1000},  # more than memory holds
]


class Clients(Base):
    """Rules of clients."""

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
            assert self.forget(person, died=True) == returned[person.client.index]
        else:
            person.client.close()
            self.forget(person)
        assert self.world.reap() == {}

    def forget(self, person: Someone, died: bool = False) -> int:
        """Return all messages that a client held."""
        count = 0
        for loan in person.loans:
            for queue in loan.targets:
                queue.loans -= 1
        for queue in self.topic.queues:
            mine = [session for session in person.sessions if session.queue is queue]
            opened = [session for session in mine if session.open]
            count += queue.give_back(opened, self.due_of, died)
        for _, delivery in person.views:
            if not delivery.session.queue.gone:
                delivery.session.queue.unpin(delivery.msg)
        # kept: views that are dropped would give back pins of the next client with this entry
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
            session.queue.give_back([session], self.due_of)
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
        settings = Settings(dead_letter=dead_topic(channel))
        self.world.supervisor.configure(*found, settings.to_native())
        queue = next(queue for queue in self.topic.queues if queue.channel == channel)
        queue.settings = settings
        self.grave(queue)

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

    @rule(which=PICK, words=st.sampled_from(CHOICES))
    @when(lambda self: self.topic.channels)
    def channel_is_configured(self, which: int, words: dict[str, Any]) -> None:
        queue = choose(self.topic.channels, which)
        settings = Settings(**words, dead_letter=dead_topic(queue.channel))
        supervisor = self.world.supervisor
        if queue.fits(settings):
            supervisor.configure(queue.index, queue.serial, settings.to_native())
            queue.settings = settings
        else:
            with pytest.raises(BadArgument):
                supervisor.configure(queue.index, queue.serial, settings.to_native())

    # ---- publish ----

    @rule(
        who=PICK,
        size=SIZES,
        defer=st.sampled_from([None, None, 0, 5, 60.5]),
        ttl=st.sampled_from([None, None, 1e-6, 3600.0]),
    )
    @when(lambda self: self.people)
    def one_is_published(self, who: int, size: int, defer: float | None, ttl: float | None) -> None:
        body = self.body(size)
        producer = choose(self.people, who).producer
        self.publish(
            [body], defer, lambda: [int(producer.publish(body, defer, 0, ttl=ttl), 16)], ttl
        )

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
        self,
        bodies: list[bytes],
        defer: float | None,
        call: Callable[[], list[int]],
        ttl: float | None = None,
    ) -> None:
        lengths = [len(body) for body in bodies]
        targets = self.topic.targets()
        if defer:
            self.drain(targets)
        expected = {queue: queue.admit(lengths, bool(defer)) for queue in targets or ()}
        dropped = {queue: self.view(queue).read("dropped") for queue in targets or ()}
        lack = self.lacking(targets, lengths, bool(defer))
        before = time.time_ns()
        try:
            ids = call()
        except MessageTooBig:
            assert "big" in expected.values() or targets is None
            self.sync_backlog()
            self.made_room(targets, [], lack)
            return
        except Full:
            assert targets
            self.refused(targets, expected, lengths, lack)
            return
        after = time.time_ns()
        self.sync_backlog()
        if targets is None:
            targets = self.topic.targets()
            assert targets is not None
        served = self.served(targets, expected, dropped, lengths)
        self.new_ids(ids)
        assert len(ids) == len(bodies)
        self.made_room(served, [] if defer else lengths, lack)
        self.enter(ids, bodies, defer, served, before, after, ttl)

    def lacking(
        self, targets: list[Queue] | None, lengths: list[int], deferred: bool
    ) -> set[Queue]:
        """Where memory may not suffice, whatever the limits allow."""
        return {
            queue
            for queue in targets or ()
            if queue.room(lengths, deferred) != "ok" or self.may_lack_memory(queue, lengths)
        }

    def made_room(self, targets: list[Queue] | None, lengths: list[int], lack: set[Queue]) -> None:
        """The oldest were dropped: as many as the limits demand, or more if memory demands it.
        lengths: of what came; none if nothing did."""
        for queue in targets or ():
            count = self.view(queue).read("dropped_oldest") - queue.counters["dropped_oldest"]
            least = queue.surplus(lengths) if queue.makes_room and lengths else 0
            assert count >= least
            assert count == least or queue in lack or not lengths
            assert not count or queue.makes_room
            queue.make_room(count)

    def refused(
        self,
        targets: list[Queue],
        expected: dict[Queue, str],
        lengths: list[int],
        lack: set[Queue],
    ) -> None:
        """One of these said Full; it counts that if it rejects."""
        guilty = [
            queue
            for queue in targets
            if not queue.skips
            and (queue in lack if queue.makes_room else expected[queue] == "full" or queue in lack)
        ]
        assert guilty, "Full with room for it"
        counted = 0
        for queue in targets:
            more = self.view(queue).read("rejected") - queue.counters["rejected"]
            assert not more or (queue in guilty and queue.settings.overflow == "reject")
            queue.counters["rejected"] += more
            counted += more
        assert counted <= 1
        if all(queue.settings.overflow == "reject" for queue in guilty):
            assert counted == 1
        self.made_room(targets, [], lack)

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
            if queue.skips and now != dropped.get(queue, 0):
                assert now == dropped[queue] + len(lengths)
                assert outcome == "full" or self.may_lack_memory(queue, lengths)
                queue.counters["dropped"] = now
            else:
                assert outcome == "ok" or (outcome == "full" and queue.makes_room)
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
        ttl: float | None = None,
    ) -> None:
        timestamp = due = 0
        expires: int | None = None
        if targets:
            state = State.DEFERRED if defer else State.READY
            row = self.slot(targets[0], state, ids[0])
            timestamp = int(row["timestamp"])
            assert before <= timestamp <= after
            if defer:
                due = int(row["deadline"])
                assert before <= due - int(defer * SECOND) <= after
            if ttl:
                expires = int(row["expires"])
                assert before <= expires - int((defer or 0) * SECOND) - int(ttl * SECOND) <= after
        self.topic.publish(ids, bodies, timestamp, due, targets, expires)

    @rule(who=PICK, size=SIZES, defer=st.sampled_from([None, None, 20]))
    @when(lambda self: self.people)
    def loan_begins(self, who: int, size: int, defer: float | None) -> None:
        person = choose(self.people, who)
        if len(person.loans) >= 4:
            return
        targets = self.topic.targets()
        expected = {queue: queue.admit([size], False, lends=True) for queue in targets or ()}
        lack = self.lacking(targets, [size], False)
        native = person.producer.loan(size, defer, 0)
        try:
            buffer = native.__enter__()
        except MessageTooBig:
            assert "big" in expected.values()
            self.made_room(targets, [], lack)
            return
        except Full:
            assert targets
            self.refused(targets, expected, [size], lack)
            return
        self.sync_backlog()
        self.made_room(targets, [], lack)
        lent = []
        for queue in targets or self.topic.targets() or ():
            words = self.view(queue).slots["word"]
            if np.count_nonzero(layout.state(words) == int(State.LOANED)) > queue.loans:
                assert expected.get(queue, "ok") == "ok"
                queue.loans += 1
                lent.append(queue)
            else:
                assert queue.skips
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
        expected = {
            queue: queue.admit(length, bool(loan.defer), lent=queue in loan.targets)
            for queue in targets or ()
        }
        dropped = {queue: self.view(queue).read("dropped") for queue in targets or ()}
        lack = self.lacking(others, length, bool(loan.defer))
        before = time.time_ns()
        try:
            loan.native.__exit__(None, None, None)
        except (Full, MessageTooBig) as exc:
            if isinstance(exc, Full):
                self.refused(targets or [], expected, length, lack)
            else:
                assert "big" in expected.values()
                self.made_room(targets, [], lack)
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
        self.made_room(served, [] if loan.defer else length, lack)
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
            act = choose([*ACTS, None], what + number)
            if act:
                self.settle(delivery, act, choose([0, 0, 3], what + number))

    def take(self, session: Session, n: int) -> list[Delivery]:
        queue = session.queue
        expected = queue.take(session, n or 1, time.time_ns())
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
            msg.deadline = int(self.slot(queue, State.IN_FLIGHT, msg.id)["deadline"])
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
        what=st.sampled_from(ACTS),
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
        call = self.way(delivery.native, what, seconds)
        if delivery.live:
            before = time.clock_gettime_ns(CLOCK_MONOTONIC_COARSE)
            call()
            self.settled([delivery], what, seconds, before)
        else:
            with pytest.raises(self.refusal(delivery.session)):
                call()
            if self.refusal(delivery.session) is Gone:
                return
        if what != "touch" or not delivery.live:
            for batch in self.batches:
                if delivery in batch.open:
                    batch.open.remove(delivery)

    def refusal(self, session: Session) -> type[ShmqError]:
        """Of what is not in flight to it."""
        return Gone if session.queue.gone and not session.native.closed else NotInFlight

    def way(self, native: Any, what: str, seconds: float) -> Callable[[], None]:
        """The call of a message or a batch."""
        if what == "requeue":
            return functools.partial(native.requeue, seconds)
        if what == "release":
            return functools.partial(native.requeue, seconds, failed=False)
        if what == "retry":
            return functools.partial(native.requeue)
        if what == "reject":
            return functools.partial(native.reject, "it is bad")
        return getattr(native, what)  # type: ignore[no-any-return]

    def settled(
        self, deliveries: list[Delivery], what: str, seconds: float, monotonic: int
    ) -> None:
        delay = seconds * SECOND
        for delivery in deliveries:
            msg, queue = delivery.msg, delivery.session.queue
            if what == "finish":
                queue.finish(msg)
            elif what == "touch":
                self.touched(delivery, monotonic)
            elif what == "release":
                queue.release(msg, delay, self.due_of)
            elif what == "reject":
                queue.reject(msg, 0)
            else:
                queue.requeue(msg, None if what == "retry" else delay, self.due_of)
        if what == "reject" and deliveries:
            self.rejected(deliveries[0].session.queue, [delivery.msg for delivery in deliveries])

    def rejected(self, queue: Queue, messages: list[Msg]) -> None:
        """The rejecting process moves them itself, if there is room."""
        self.bury(queue, [msg for msg in messages if self.is_moved(queue, msg)])
        for msg in messages:
            if msg.id in queue.deferred:
                assert self.grave_lacks(queue, msg)
                msg.due = self.due_of(queue, msg, 2 * SECOND, 2 * SECOND)

    def grave_lacks(self, queue: Queue, msg: Msg) -> bool:
        """Whether the dead topic may have no room for it."""
        lengths, grave = [len(msg.body) + 4096], self.grave(queue)
        return grave.room(lengths, False) != "ok" or self.may_lack_memory(grave, lengths)

    def touched(self, delivery: Delivery, monotonic: int) -> None:
        row = self.slot(delivery.session.queue, State.IN_FLIGHT, delivery.msg.id)
        deadline, timeout = int(row["deadline"]), delivery.session.timeout
        if timeout is None:
            assert deadline == NEVER
        else:
            now = time.monotonic_ns()
            assert monotonic <= deadline - timeout <= now + ROUNDED_UP
        delivery.msg.deadline = deadline

    @rule(which=PICK, what=st.sampled_from(ACTS[1:]), delay=st.booleans())
    @when(lambda self: self.batches)
    def batch_is_settled(self, which: int, what: str, delay: bool) -> None:
        """Settle all that are still in flight, even if others are not."""
        batch = choose(self.batches, which)
        session = batch.deliveries[0].session
        seconds = 3 if delay else 0
        call = self.way(batch.native, what, seconds)
        live = [delivery for delivery in batch.open if delivery.live]
        before = time.clock_gettime_ns(CLOCK_MONOTONIC_COARSE)
        if len(live) == len(batch.open):
            call()
        else:
            with pytest.raises(self.refusal(session)):
                call()
            if self.refusal(session) is Gone:
                return
        self.settled(live, what, seconds, before)
        batch.open = live if what == "touch" else []

    # ---- dead letters ----

    @rule(who=PICK, which=PICK)
    @when(lambda self: self.people and any(self.grave(q).ready for q in self.topic.channels))
    def letter_is_sent_back(self, who: int, which: int) -> None:
        """The oldest one; what cannot be sent stays."""
        person = choose(self.people, who)
        target = choose([q for q in self.topic.channels if self.grave(q).ready], which)
        grave = self.grave(target)
        assert grave.channel is not None
        native = person.client.consumer(grave.channel, "dead", 1, -1)
        session = Session(grave, person, 1, None, native)
        grave.sessions.append(session)
        (msg,) = grave.take(session, 1, time.time_ns())
        message = native.take(0)
        assert message is not None
        assert (int(message.id, 16), message.body) == (msg.id, msg.body)
        msg.holder = Delivery(msg, session, message, single=True)
        lengths = [len(msg.body)]
        expected = {target: target.admit(lengths, False)}
        lack = self.lacking([target], lengths, False)
        before = time.time_ns()
        try:
            native.redrive(message, target.index, target.serial)
        except BadArgument:
            assert self.topic.paused
        except MessageTooBig:
            assert expected[target] == "big"
        except Full:
            if target.skips:  # nothing is dropped here
                assert expected[target] == "full" or target in lack
            else:
                self.refused([target], expected, lengths, lack)
        else:
            assert not self.topic.paused
            assert expected[target] == "ok" or (expected[target] == "full" and target.makes_room)
            self.made_room([target], lengths, lack)
            del grave.in_flight[msg.id]
            grave.counters["finished"] += 1
            grave.drop(msg)
            timestamp = int(self.slot(target, State.READY, msg.id)["timestamp"])
            assert before <= timestamp <= time.time_ns()
            self.topic.carry(msg, target, timestamp)
        native.close()
        grave.give_back([session], self.due_of)

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
