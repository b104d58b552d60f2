"""A task that waits looks, its thread watches, and another process stores a value or publishes.
Here each order of these steps is forced: in none of them does the task sleep through what came."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.processes import WATCHDOG

import shmq
from shmq.client import aio, beacon, results_aio

#: When the value comes, by the steps of the task and of its thread.
COMES = ["before the look", "after the look", "as the thread begins", "as the thread waits"]
#: When the thread begins, by the steps of the task: a thread may get no core for any time.
BEGINS = ["at once", "after the look", "after the value"]
ORDERS = [
    (comes, begins)
    for comes in COMES
    for begins in BEGINS
    if not (begins == "after the value" and comes.startswith("as the thread"))
]


class Steps:
    """Does something at one step, once, and lets the thread begin at another."""

    def __init__(self, comes: str, begins: str, come: Callable[[], object]) -> None:
        self._comes, self._come = comes, come
        self._begins = begins
        self.may_begin = threading.Event()
        self.came = False
        self.at("at once")

    def at(self, step: str) -> None:
        if step == self._begins:
            self.may_begin.set()
        if step == self._comes and not self.came:
            self.came = True
            self._come()
            self.at("after the value")

    def holding(self, run: Callable[..., None]) -> Callable[..., None]:
        """A thread's function that begins when it may."""

        def begin(*words: Any) -> None:
            assert self.may_begin.wait(WATCHDOG)
            self.at("as the thread begins")
            run(*words)

        return begin


class Stepped:
    """An object whose methods tell `Steps` about some of their calls."""

    def __init__(self, of: object, before: dict[str, Callable[[], object]]) -> None:
        self._of, self._before = of, before

    def __getattr__(self, name: str) -> Any:
        if name in self._before:
            self._before[name]()
        return getattr(self._of, name)


@pytest.mark.parametrize(("comes", "begins"), ORDERS)
def test_a_value_wakes_the_task_that_waits_for_it(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch, comes: str, begins: str
) -> None:
    store = broker.results("s")
    steps = Steps(comes, begins, lambda: broker.results("s").set("k", b"v"))
    monkeypatch.setattr(results_aio._Keeper, "_run", steps.holding(results_aio._Keeper._run))
    stepped: Any = Stepped(store, {"wait_news": lambda: steps.at("as the thread waits")})

    def look(*words: Any) -> Any:
        steps.at("before the look")
        found = store.wait_any(*words)
        steps.at("after the look")
        return found

    stepped.wait_any = look

    async def wait() -> Any:
        waiting = results_aio.wait_any(stepped, ["k"], None, False)
        return await asyncio.wait_for(waiting, WATCHDOG)

    assert asyncio.run(wait()) == ("k", b"v")
    steps.may_begin.set()


@pytest.mark.parametrize(("comes", "begins"), ORDERS)
def test_a_message_wakes_the_task_that_takes(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch, comes: str, begins: str
) -> None:
    consumer = broker.consumer("t", "c")
    producer = broker.producer("t")
    steps = Steps(comes, begins, lambda: producer.publish(b"x"))
    monkeypatch.setattr(aio._Keeper, "_run", steps.holding(aio._Keeper._run))
    made = aio._native.Waiter

    def waiter(key: Any) -> Any:
        return Stepped(made(key), {"wait": lambda: steps.at("as the thread waits")})

    monkeypatch.setattr(aio._native, "Waiter", waiter)

    def look() -> Any:
        steps.at("before the look")
        found = consumer.take(0)
        steps.at("after the look")
        return found

    async def wait() -> Any:
        found = look()
        if found is not None:
            return found
        return await asyncio.wait_for(aio.take(consumer, look, None), WATCHDOG)

    message = asyncio.run(wait())
    assert message.body == b"x"
    message.finish()
    steps.may_begin.set()


@pytest.mark.parametrize(("comes", "begins"), ORDERS)
def test_a_message_makes_the_descriptor_readable(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch, comes: str, begins: str
) -> None:
    consumer = broker.consumer("t", "c")
    producer = broker.producer("t")
    steps = Steps(comes, begins, lambda: producer.publish(b"x"))
    monkeypatch.setattr(beacon.Beacon, "_run", steps.holding(beacon.Beacon._run))
    made = beacon._native.Waiter

    def waiter(key: Any) -> Any:
        return Stepped(made(key), {"wait": lambda: steps.at("as the thread waits")})

    monkeypatch.setattr(beacon._native, "Waiter", waiter)
    fd = consumer.fileno()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    steps.at("before the look")
    message = consumer.take(0)
    steps.at("after the look")
    while message is None:  # once too often at most, if the thread lit it before the look
        assert poll.poll(WATCHDOG * 1000)
        message = consumer.take(0)
    assert message.body == b"x"
    message.finish()
    steps.may_begin.set()
