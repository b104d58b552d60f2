"""The delays of those who guess, without a clock and without sockets."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from typing import Any

import pytest

from shmq.door import brake as module
from shmq.door import seldom
from shmq.door.brake import LONGEST, QUIET, Brake, delay_of
from shmq.door.peer import group_of

WRONG = itertools.count()


class Time:
    """A clock that goes on only when somebody sleeps, in the order of waking."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, len(self._sleepers), future))
        await future

    async def run(self, *work: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run all to their ends."""
        tasks = [asyncio.ensure_future(each) for each in work]
        while not all(task.done() for task in tasks):
            for _ in range(5):
                await asyncio.sleep(0)
            if self._sleepers and not all(task.done() for task in tasks):
                self._sleepers.sort()
                when, _, future = self._sleepers.pop(0)
                self.now = max(self.now, when)
                future.set_result(None)
        return [task.result() for task in tasks]


class Door:
    """A brake whose right proof is `right`, and how long its answers take."""

    def __init__(self) -> None:
        self.time = Time()
        self.brake = Brake(lambda: self.time.now, self.time.sleep)

    async def show(self, address: str, proof: bytes = b"", user: str = "") -> tuple[str, float]:
        """Show a proof (empty: a wrong one that nobody has tried yet). Returns what came of
        it, and after how many seconds."""
        began = self.time.now
        proof = proof or b"wrong %d" % next(WRONG)
        attempt = self.brake.attempt(address, proof, user)
        if not await attempt.turn():
            return "unseen", self.time.now - began
        if proof == b"right":
            attempt.passed()
            return "in", self.time.now - began
        await attempt.failed()
        return "wrong", self.time.now - began

    def run(self, *work: Coroutine[Any, Any, Any]) -> list[Any]:
        return asyncio.run(self.time.run(*work))

    def fail(self, address: str, times: int, user: str = "") -> float:
        """Let an address fail, one attempt after the other. Seconds of the last."""
        seconds = 0.0
        for _ in range(times):
            outcome, seconds = self.run(self.show(address, user=user))[0]
            assert outcome == "wrong"
        return float(seconds)


@pytest.fixture
def door() -> Door:
    return Door()


def test_the_delay_doubles_up_to_the_longest() -> None:
    assert [delay_of(count) for count in range(5)] == [0, 0, 0.1, 0.2, 0.4]
    assert delay_of(10**9) == LONGEST


def test_guesses_of_one_address_take_longer_each_time(door: Door) -> None:
    took = [door.fail("192.0.2.1", 1) for _ in range(14)]
    assert took[:2] == [0, 0]
    assert took[2:5] == pytest.approx([0.1, 0.2, 0.4])
    assert took[-1] == pytest.approx(LONGEST)
    assert door.brake.counts() == {
        "proofs_failed": 14, "proofs_delayed": 12, "proofs_refused": 0
    }  # fmt: skip


def test_a_right_proof_of_the_same_address_waits_too(door: Door) -> None:
    """Else the time of the answer would say which proof is right before the delay is over."""
    door.fail("192.0.2.1", 8)
    [(outcome, seconds)] = door.run(door.show("192.0.2.1", b"right"))
    assert (outcome, seconds > 1) == ("in", True)


def test_many_connections_are_no_faster_than_one(door: Door) -> None:
    door.fail("192.0.2.1", 6)  # 1.6 s each from now on
    before = door.time.now
    outcomes = door.run(*(door.show("192.0.2.1") for _ in range(100)))
    looked_at = [outcome for outcome, _ in outcomes if outcome == "wrong"]
    assert len(looked_at) <= 16
    assert door.time.now - before >= 1.6 * len(looked_at) - 0.01
    assert all(seconds == 0 for outcome, seconds in outcomes if outcome == "unseen")
    assert max(seconds for _, seconds in outcomes) <= LONGEST + 0.01


def test_who_hangs_up_while_waiting_is_no_faster(door: Door) -> None:
    door.fail("192.0.2.1", 8)

    async def impatient() -> None:
        for _ in range(50):
            task = asyncio.ensure_future(door.show("192.0.2.1"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(impatient())
    [(outcome, seconds)] = door.run(door.show("192.0.2.1", b"right"))
    assert outcome == "unseen" or seconds > delay_of(8)


def test_another_address_is_let_in_at_once(door: Door) -> None:
    door.fail("192.0.2.1", 20, "alice")
    for address in ("192.0.2.2", "2001:db8::1", "uid:1000"):
        assert door.run(door.show(address, b"right", "alice")) == [("in", 0)]


def test_the_users_delay_holds_for_all_addresses_that_guess(door: Door) -> None:
    for number in range(12):
        door.fail(f"192.0.2.{number}", 1, "alice")
    assert door.fail("198.51.100.1", 1, "alice") >= 10  # the answer to a stranger's guess
    assert door.fail("198.51.100.1", 1, "alice") >= 10  # and its next one before it is looked at
    assert door.fail("198.51.100.1", 1, "bob") < 1


def test_a_network_of_ipv6_is_one_address(door: Door) -> None:
    for number in range(10):
        door.fail(f"2001:db8:1:2::{number:x}", 1)
    [(_, seconds)] = door.run(door.show("2001:db8:1:2:ffff::1", b"right"))
    assert seconds > 1
    assert door.run(door.show("2001:db8:1:3::1", b"right")) == [("in", 0)]
    assert group_of("::ffff:192.0.2.1") == group_of("192.0.2.1") == "192.0.2.1"
    assert group_of("fe80::1%eth0") == group_of("fe80::2%eth1")
    assert group_of("uid:1000") == "uid:1000"


def test_a_proof_that_is_repeated_is_slowed_and_hurts_nobody_else(door: Door) -> None:
    took = [door.run(door.show("192.0.2.1", b"old password"))[0][1] for _ in range(12)]
    assert took[-1] > 10
    assert door.run(door.show("192.0.2.1", b"right")) == [("in", 0)]


def test_a_quiet_time_forgets(door: Door) -> None:
    door.fail("192.0.2.1", 12, "alice")
    door.time.now += QUIET
    assert door.run(door.show("192.0.2.1", b"right", "alice")) == [("in", 0)]
    assert door.fail("192.0.2.1", 1, "alice") == 0


def test_memory_is_bounded_and_many_addresses_make_nothing_forgotten(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ENTRIES", 64)
    monkeypatch.setattr(module, "_PLACES", 32)
    door.fail("192.0.2.1", 12, "alice")
    for number in range(1000):
        door.brake.fail(f"2001:db8:{number:x}::/64", f"user {number}", f"{number}")
    tables: list[Any] = [door.brake._addresses, door.brake._users, door.brake.repeats]
    for table in tables:
        assert len(table._entries) <= 64
        assert len(table._places) <= 32
    [(_, seconds)] = door.run(door.show("192.0.2.1", b"right"))
    assert seconds > 10


def test_no_guess_passes_for_a_repeated_one(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wrong proofs were forgotten: each counts, and waits for its address."""
    monkeypatch.setattr(module, "_ENTRIES", 64)
    monkeypatch.setattr(module, "_PLACES", 32)
    for number in range(1000):
        door.brake.fail(f"192.0.2.{number % 50}", "", f"{number}")
    for count in range(20, 30):
        [(outcome, seconds)] = door.run(door.show("192.0.2.7"))
        assert (outcome, seconds) == ("wrong", delay_of(count))


def test_the_log_has_the_address_and_few_lines(
    door: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seldom.time, "monotonic", lambda: 1000.0)  # however slow the host is

    def said() -> list[str]:  # asyncio says what earlier tests have left behind, too
        mine = [record for record in caplog.records if record.name == "shmq.door.brake"]
        return [record.getMessage() for record in mine]

    with caplog.at_level(logging.WARNING, "shmq.door.brake"):
        door.fail("192.0.2.1", 2)
        assert not said()
        for _ in range(100):
            door.brake.fail("192.0.2.1", "", f"{next(WRONG)}")
    assert "wrong proofs of 192.0.2.1" in said()[0]
    assert len(said()) == 10
    assert not any("wrong 1" in line for line in said())
