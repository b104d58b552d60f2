"""A subscriber in a gateway process hears of each message: of those that its clients publish at
once, of all others through the thread that waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from support.processes import WATCHDOG

import shmq
from shmq import _native
from shmq.gateway import delivery_waiter
from shmq.gateway.delivery_waiter import DeliveryWaiter

Open = Callable[..., shmq.Broker]


def _never(what: Any) -> Any:
    raise AssertionError(what)


class Subscriber:
    """Takes what it is rung for, at most one message at a time, and waits again."""

    def __init__(self, broker: shmq.Broker, waiter: DeliveryWaiter, found: list[bytes]) -> None:
        self.consumer = broker.consumer("t", "c")
        self.gathers = False
        self.rings = 0
        self._waiter = waiter
        self._found = found

    def wait(self) -> None:
        self._waiter.watch(self.consumer, self)

    def ring(self) -> None:
        self.rings += 1
        if self.consumer.closed:
            return
        message = self.consumer.take(0)
        if message is not None:
            self._found.append(bytes(message.body))
            message.finish()
        self.wait()

    def close(self) -> None:
        self._waiter.unwatch(self.consumer)
        self.consumer.close()


class Local:
    """A client of this process that publishes."""

    def __init__(self, broker: shmq.Broker, waiter: DeliveryWaiter) -> None:
        self.sockets = socket.socketpair()
        self._intake = _native.Intake(_never, _never, _never, waiter.waiter, waiter.rung)
        self._room = memoryview(bytearray(100))
        self._intake.begin(
            self.sockets[0].fileno(), self._room, broker.producer("t"), b"MPUB t\n", 50, 50
        )

    def publish(self, body: bytes) -> None:
        command = b"PUB t\n" + len(body).to_bytes(4, "big") + body
        self._room[: len(command)] = command
        assert self._intake.publishes(len(command))
        assert len(self.sockets[1].recv(100)) == 10

    def close(self) -> None:
        self._intake.close()
        for sock in self.sockets:
            sock.close()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(WATCHDOG):
        while not done():
            await asyncio.sleep(0.001)


def test_own_messages_need_no_thread(open_broker: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    rung_by_thread: list[Any] = []

    def ring(subscribers: list[Any]) -> None:
        rung_by_thread.append(subscribers)
        for subscriber in subscribers:
            subscriber.ring()

    monkeypatch.setattr(delivery_waiter, "_ring", ring)
    broker = open_broker()
    found: list[bytes] = []

    async def main() -> None:
        waiter = DeliveryWaiter(broker.native())
        subscriber = Subscriber(broker, waiter, found)
        local = Local(broker, waiter)
        subscriber.wait()
        for number in range(100):
            local.publish(b"%d" % number)
            await until(lambda number=number: len(found) > number)
        waiter.close()
        subscriber.close()
        local.close()

    asyncio.run(main())
    assert found == [b"%d" % number for number in range(100)]
    assert len(rung_by_thread) < 50  # now and then it wakes up by itself, and is first


def test_all_messages_reach_somebody(open_broker: Open) -> None:
    """Own ones and others' ones, while subscribers come and go."""
    broker = open_broker()
    found: list[bytes] = []

    async def main() -> None:
        waiter = DeliveryWaiter(broker.native())
        subscribers = [Subscriber(broker, waiter, found) for _ in range(3)]
        local, other = Local(broker, waiter), broker.producer("t")
        for subscriber in subscribers:
            subscriber.wait()
        sent = 0
        for number in range(150):
            for _ in range(number % 4):
                local.publish(b"%d" % sent)
                sent += 1
            if number % 3:
                other.publish(b"%d" % sent)
                sent += 1
            if number % 5 == 0:
                subscribers.pop(0).close()
                subscribers.append(Subscriber(broker, waiter, found))
                subscribers[-1].wait()
            if number % 2:
                await until(lambda sent=sent: len(found) == sent)
        await until(lambda: len(found) == sent)
        assert sorted(map(int, found)) == list(range(sent))
        waiter.close()
        for subscriber in subscribers:
            subscriber.close()
        local.close()

    asyncio.run(main())


def test_who_gathers_messages_is_not_rung_for_each(open_broker: Open) -> None:
    broker = open_broker()
    found: list[bytes] = []

    async def main() -> None:
        waiter = DeliveryWaiter(broker.native())
        subscriber = Subscriber(broker, waiter, found)
        subscriber.wait()
        queues = [subscriber.consumer.session[0]]
        assert not waiter.rung(queues)
        subscriber.gathers = True
        assert waiter.rung(queues)
        assert not waiter.rung([queues[0] + 1])
        assert subscriber.rings == 2
        waiter.close()
        subscriber.close()

    asyncio.run(main())
