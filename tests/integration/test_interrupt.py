"""Ctrl-C ends every wait with KeyboardInterrupt, and everything works on afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
from support.deliveries import take_all
from support.in_process_broker import SECOND, World
from support.processes import WATCHDOG, Child, eventually, say

import shmq
from shmq import _native

Spawn = Callable[..., Child]


def interrupted(instance, what):
    broker = shmq.attach(instance)
    if what != "create":
        producer = broker.producer("t")
        consumer = broker.consumer("t", "c")

    def create():
        broker.create_topic("new")

    def publish():
        while True:
            producer.publish(bytes(1000))

    def iterate():
        for message in consumer:
            message.finish()

    def take_async():
        import asyncio

        asyncio.run(consumer.take_async())

    def limited():
        producer.publish(b"x")
        with broker.consumer("t", "c", max_in_flight=1) as one:
            one.take()
            one.take()

    waits = {
        "take": lambda: consumer.take(),
        "take with a timeout": lambda: consumer.take(timeout=600),
        "take_many": lambda: consumer.take_many(10),
        "iterate": iterate,
        "take_async": take_async,
        "max_in_flight": limited,
        "publish": publish,
        "create": create,
    }
    say("waits")
    try:
        waits[what]()
    except KeyboardInterrupt:
        say("interrupted")
    sys.stdin.readline()  # noqa: F821
    broker.create_topic("works")
    if what not in ("create", "publish"):
        broker.producer("t").publish(b"works")
        message = consumer.take(10)
        message.finish()
        say(message.body.decode())
    broker.close()
    say("closed")


def blocked(waiter: Child) -> bool:
    """Every thread of it sleeps, and goes on sleeping."""
    before = waiter.cpu_seconds()
    return waiter.is_asleep() and waiter.cpu_seconds() == before


@pytest.mark.parametrize(
    "what",
    [
        "take",
        "take with a timeout",
        "take_many",
        "iterate",
        "take_async",
        "max_in_flight",
        "publish",
        "create",
    ],
)
def test_ctrl_c_ends_every_wait(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    child: Spawn,
    instance: str,
    what: str,
) -> None:
    server = serve(mem_queue_size=256)
    broker = attach()
    broker.create_channel("t", "c")
    waiter = None
    if what in ("create", "publish"):  # what waits for the supervisor waits for ever
        server.stop()
    waiter = child(interrupted, instance, what)
    waiter.said("waits")
    eventually(lambda: blocked(waiter), what="the child waits")
    waiter.process.send_signal(signal.SIGINT)
    waiter.said("interrupted")
    server.go_on()
    waiter.tell()
    lines = waiter.succeed()
    assert lines[-1] == "closed"
    take_all(broker, "t", "c")
    broker.producer("t").publish(b"x")
    assert take_all(broker, "t", "c").bodies == [b"x"]


def publish_for_ever(instance, name):
    producer = shmq.attach(instance).producer("t")
    try:
        for i in itertools.count():  # noqa: F821
            producer.publish_many([b"x" * 50] * 2000)
            say(name, i)
    except KeyboardInterrupt:
        say("interrupted")


def test_ctrl_c_ends_the_wait_for_a_lock_whose_holder_is_stopped(
    broker: shmq.Broker, child: Spawn
) -> None:
    broker.create_channel("t", "c#ephemeral")
    consumer = broker.consumer("t", "c#ephemeral")
    holder = child(publish_for_ever, broker.instance, "holder")
    other = child(publish_for_ever, broker.instance, "other")
    holder.said("holder")
    other.said("other")

    def stopped_with_the_lock() -> bool:
        holder.stop()
        count = len(other.lines)
        if all(_quiet(other, count) for _ in range(20)):
            return True
        holder.go_on()
        return False

    def _quiet(waiter: Child, count: int) -> bool:
        return waiter.is_asleep() and len(waiter.lines) == count

    eventually(stopped_with_the_lock, 4 * WATCHDOG)
    other.process.send_signal(signal.SIGINT)
    other.said("interrupted")
    count = len(holder.lines)
    holder.go_on()
    other.succeed()
    eventually(lambda: len(holder.lines) > count + 3)
    holder.kill()
    consumer.close()
    broker.create_channel("t", "d")
    broker.producer("t").publish(b"works")
    assert take_all(broker, "t", "d").bodies[-1] == b"works"


def test_a_signal_ends_the_wait_of_the_supervisor() -> None:
    """So a stop does not wait for the next heartbeat."""
    woken = threading.Event()

    def send() -> None:
        while not woken.wait(0.01):  # one that comes before the wait begins does not end it
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    sender = threading.Thread(target=send)
    try:
        with World() as world:
            world.supervisor.supervisor_wait(0)  # what a new instance has rung
            sender.start()
            assert world.supervisor.supervisor_wait(_native.now() + 3600 * SECOND) == 0
    finally:
        woken.set()
        if sender.ident is not None:
            sender.join()
        signal.signal(signal.SIGUSR1, before)
