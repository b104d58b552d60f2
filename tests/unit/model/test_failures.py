"""Failures, suspects and dead letters against a plain model: random operations of clients that
take, answer and die, and of the supervisor. After each, every message has as many failures as the
model says, and is where the model says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import recount
from support.in_process_broker import Client, World

from shmq.layout import State, constant, owner, state
from shmq.settings import Settings

FAILED, SUSPECT = constant("SLOT_FAILED"), constant("SLOT_SUSPECT")
FAR = 1 << 62
CLIENTS = st.integers(0, 2)


@dataclass
class Known:
    """A message: its failures, whether it is a suspect, and where it is: `waiting`, `dead`,
    `finished`, or the number of the client that holds it."""

    failures: int = 0
    suspect: bool = False
    place: str | int = "waiting"


class Failures(RuleBasedStateMachine):
    """Three clients with a consumer each, one channel, its dead topic."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(mem_queue_size=1000, in_flight_slots=1000, arena_size=1 << 20)
        self.known: dict[str, Known] = {}
        self.held: list[dict[str, Any]] = [{}, {}, {}]
        self.kept: list[object] = []  # of the dead, whose destructors would close what others have

    @initialize(most=st.integers(1, 4), count=st.integers(0, 12))
    def begin(self, most: int, count: int) -> None:
        self.most = most
        self.queue, self.serial = self.world.create_channel("t", "c")
        native = Settings(max_attempts=most).to_native()
        self.world.supervisor.configure(self.queue, self.serial, native)
        self.graves, _ = self.world.create_channel("t.c.dead", "dead")
        self.dead_topic = self.world.create_topic("t.c.dead")
        self.clients = [self.world.attach() for _ in range(3)]
        self.consumers = [client.consumer("t", "c") for client in self.clients]
        self.other: Client = self.world.attach()
        self.producer = self.other.producer("t")
        self.taker = self.other.consumer("t.c.dead", "dead")
        if count:
            self.publish(count)

    def teardown(self) -> None:
        self.held.clear()
        self.world.close()

    # ---- clients ----

    @rule(count=st.integers(1, 6))
    def publish(self, count: int) -> None:
        for number in self.producer.publish_many([b"x"] * count, timeout=0):
            self.known[f"{number:016x}"] = Known()

    @rule(client=CLIENTS, count=st.integers(1, 6))
    def take(self, client: int, count: int) -> None:
        mine = self.held[client]
        bound = any(self.known[id].suspect for id in mine)
        batch = self.consumers[client].take_many(count, 0)
        waiting = [known for known in self.known.values() if known.place == "waiting"]
        if bound:
            assert not batch, "a client that holds a suspect takes nothing else"
        elif not batch:
            blocked = bool(mine) and any(known.suspect for known in waiting)
            assert not waiting or blocked
        for message in batch:
            known = self.known[message.id]
            assert known.place == "waiting"
            assert not known.suspect or (len(batch) == 1 and not mine)
            known.place = client
        for message in batch:
            mine[message.id] = message

    def one_of(self, client: int, at: int) -> tuple[Any, Known] | None:
        mine = self.held[client]
        if not mine:
            return None
        message = mine.pop(sorted(mine)[at % len(mine)])
        return message, self.known[message.id]

    def failed(self, known: Known, most: int | None = None) -> None:
        if most is None or known.failures < most:
            known.failures += 1
        known.place = "dead" if known.failures >= self.most and most is None else "waiting"

    @rule(client=CLIENTS, at=st.integers(0, 9))
    def finish(self, client: int, at: int) -> None:
        if (found := self.one_of(client, at)) is not None:
            found[0].finish()
            found[1].place = "finished"

    @rule(client=CLIENTS, at=st.integers(0, 9), is_failure=st.booleans())
    def requeue(self, client: int, at: int, is_failure: bool) -> None:
        if (found := self.one_of(client, at)) is None:
            return
        message, known = found
        message.requeue(failed=is_failure)
        known.place, known.suspect = "waiting", False
        if is_failure:
            self.failed(known)

    @rule(client=CLIENTS, at=st.integers(0, 9))
    def reject(self, client: int, at: int) -> None:
        if (found := self.one_of(client, at)) is not None:
            found[0].reject("because")
            found[1].place, found[1].suspect = "dead", False

    @rule(client=CLIENTS)
    def close(self, client: int) -> None:
        """Its messages come back, and none has failed."""
        self.consumers[client].close()
        for id in self.held[client]:
            self.known[id].place = "waiting"
        self.held[client].clear()
        self.consumers[client] = self.clients[client].consumer("t", "c")

    @rule(client=CLIENTS)
    def die(self, client: int) -> None:
        mine = self.held[client]
        self.clients[client].die()
        self.kept += [self.consumers[client], dict(mine)]
        assert self.world.reap() == {self.clients[client].index: len(mine)}
        for id in mine:
            known = self.known[id]
            known.suspect = True
            self.failed(known, self.most - 1 if len(mine) > 1 else None)
            if known.place == "dead":
                known.suspect = False
        mine.clear()
        self.clients[client] = self.world.attach()
        self.consumers[client] = self.clients[client].consumer("t", "c")

    # ---- the supervisor ----

    @rule()
    def time_passes(self) -> None:
        self.world.supervisor.expire(self.queue, 1000, FAR, 0)
        for mine in self.held:
            for id in mine:
                self.known[id].suspect = False
                self.failed(self.known[id])
            mine.clear()

    @rule()
    def move(self) -> None:
        self.world.supervisor.expire(self.queue, 1000, 0, FAR)
        while self.world.supervisor.dead_move(self.queue, self.serial, *self.dead_topic, 3):
            pass
        assert not self.world.supervisor.dead_waiting(self.queue)

    @rule(most=st.integers(1, 4))
    def configure(self, most: int) -> None:
        """A message that has failed as often as that already is convicted by its next failure."""
        self.most = most
        native = Settings(max_attempts=most).to_native()
        assert self.world.supervisor.configure(self.queue, self.serial, native)

    @rule()
    def rebuild(self) -> None:
        self.world.supervisor.rebuild(self.queue)

    @rule()
    @precondition(lambda self: any(known.place == "dead" for known in self.known.values()))
    def redrive(self) -> None:
        self.move()
        letter = self.taker.take(0)
        self.taker.redrive(letter, self.queue, self.serial)
        known = self.known[letter.id]
        assert known.place == "dead"
        self.known[letter.id] = Known()

    # ---- agreement ----

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "taker"):
            return
        seen: dict[str, str] = {}
        for queue in (self.queue, self.graves):
            view = self.world.queue_view(queue)
            found = recount.count(self.world.directory, view)
            assert not found.problems, found.problems
            for slot in view.slots:
                now = int(state(slot["word"]))
                if now == State.FREE:
                    continue
                id = f"{int(slot['id']):016x}"
                assert id not in seen, "it is there twice"
                seen[id] = "here" if queue == self.queue else "there"
                if queue == self.queue:
                    self.agrees_on(slot, now, self.known[id])
                else:
                    assert self.known[id].place == "dead"
        assert seen.keys() == {id for id, known in self.known.items() if known.place != "finished"}

    def agrees_on(self, slot: Any, now: int, known: Known) -> None:
        flags = int(slot["flags"])
        failures = int(slot["failures"]) >> 16 if flags & FAILED else 0
        if known.place == "dead":
            assert now == State.DEFERRED
            return
        assert failures == known.failures
        assert bool(flags & SUSPECT) == known.suspect
        if known.place == "waiting":
            assert now in (State.READY, State.REQUEUED)
        else:
            assert isinstance(known.place, int)
            assert now == State.IN_FLIGHT
            assert int(owner(slot["word"])) == self.clients[known.place].index


SETTINGS = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


def test_failures_are_those_of_the_model_after_some_operations() -> None:
    run_state_machine_as_test(Failures, settings=settings(SETTINGS, max_examples=25))


@pytest.mark.deep
def test_failures_are_those_of_the_model_after_any_operations() -> None:
    run_state_machine_as_test(Failures, settings=SETTINGS)
