"""Threads that use one producer, consumer, batch, message or broker at the same time. They are
for a Python without the GIL, where the extension has a lock of its own (native/binding/guard.h);
they hold with the GIL, too."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from support.processes import WATCHDOG

import shmq
from shmq._native import Consumer

THREADS = 6
EACH = 1000


@pytest.fixture(autouse=True)
def _other_threads_come_soon() -> object:
    """With the GIL they would seldom meet."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*functions: Callable[[], None]) -> None:
    """Run the functions at the same time, each in a thread, to their ends."""
    start = threading.Barrier(len(functions))
    failures: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        start.wait(WATCHDOG)
        try:
            function()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


WITHOUT_GIL = """
import sys, shmq
assert not sys._is_gil_enabled()
broker = shmq.attach(sys.argv[1])
broker.producer("t").publish(b"body")
message = broker.consumer("t", "c").take(timeout=float(sys.argv[2]))
print(message.body, sys._is_gil_enabled(), "posix_ipc" in sys.modules)
message.finish()
broker.close()
"""


def test_the_gil_stays_off_in_a_process_that_publishes_and_takes(broker: shmq.Broker) -> None:
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip(f"Python {sys.version.split()[0]} has the GIL at all times")
    without = {name: text for name, text in os.environ.items() if name != "PYTHON_GIL"}
    command = [sys.executable, "-P", "-W", "error", "-c", WITHOUT_GIL]
    command += [broker.instance, str(WATCHDOG)]
    done = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("b'body' False False\n", "")


def test_threads_share_a_producer_and_a_consumer(broker: shmq.Broker) -> None:
    joined = shmq.attach(broker.instance)
    producer, consumer = joined.producer("t"), joined.consumer("t", "c")
    total = THREADS * EACH * 2
    found: list[bytes] = []

    def publish(thread: int) -> None:
        for number in range(EACH):
            producer.publish(b"one %d %d" % (thread, number))
            producer.publish_many([b"many %d %d" % (thread, number)])

    def take() -> None:
        while len(found) < total:
            with suppress(shmq.NotInFlight), consumer.take_many(7, timeout=0.05) as batch:
                found.extend(batch.bodies())
            message = consumer.take(timeout=0)
            if message is not None:
                found.append(message.body)
                message.finish()

    together(*[lambda n=n: publish(n) for n in range(THREADS)], *[take] * 3)  # type: ignore[misc]
    assert len(found) == total
    assert len(set(found)) == total
    assert consumer.in_flight == 0
    together(joined.close)  # waits for ever if it counts a thread that is inside no more


def test_each_message_of_a_batch_is_settled_by_one_thread(broker: shmq.Broker) -> None:
    producer, consumer = broker.producer("t"), broker.consumer("t", "c", max_in_flight=EACH)
    producer.publish_many([b"%d" % number for number in range(EACH)])
    batch = consumer.take_many(EACH, timeout=WATCHDOG)
    finished: list[int] = []

    def finish() -> None:
        for number, message in enumerate(batch):
            with suppress(shmq.NotInFlight):
                message.finish()
                finished.append(number)
        batch.finish()

    together(*[finish] * THREADS)
    assert sorted(finished) == list(range(EACH))
    assert consumer.in_flight == 0


def test_threads_view_and_read_one_message(broker: shmq.Broker) -> None:
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    body = bytes(range(256)) * 64  # long, so it is read from shared memory
    for _ in range(20):
        producer.publish(body, properties={"a": "b"})
        message = consumer.take(WATCHDOG)
        assert message is not None

        def read(message: shmq.Message = message) -> None:
            for _ in range(20):
                with message.view as view:
                    assert view == body
                assert message.body == body
                assert message.properties == {"a": b"b"}

        together(*[read] * THREADS)
        message.finish()


def test_a_list_may_change_while_it_is_published(broker: shmq.Broker) -> None:
    producer = broker.producer("t")
    bodies = [b"%d" % number for number in range(100)]
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            bodies[:] = [b"%d" % number for number in range(len(bodies) % 100 + 1)]

    def publish() -> None:
        for _ in range(EACH):
            with suppress(RuntimeError):  # it says that the list changed
                producer.publish_many(bodies)
        over.set()

    together(change, publish)


def close_amid_calls(broker: shmq.Broker) -> None:
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    lanes = broker.consumer(["t", "u"], "d")
    working = threading.Semaphore(0)

    def publish() -> None:
        with suppress(shmq.Gone):
            while True:
                producer.publish_many([b"a", b"b"])
                working.release()

    def take() -> None:
        with suppress(shmq.Gone, shmq.NotInFlight):
            while True:
                with consumer.take_many(3, timeout=WATCHDOG) as batch:
                    batch.bodies()

    def take_of_many_topics() -> None:
        with suppress(shmq.Gone, shmq.NotInFlight):
            for message in lanes:
                message.finish()

    def close() -> None:
        for _ in range(50):
            assert working.acquire(timeout=WATCHDOG)
        broker.close()

    together(publish, publish, take, take, take_of_many_topics, close)
    assert broker.closed


def test_a_broker_is_closed_amid_the_calls_of_many_threads(broker: shmq.Broker) -> None:
    for _ in range(5):
        close_amid_calls(shmq.attach(broker.instance))


def test_a_call_from_within_a_call_lets_no_other_thread_in(broker: shmq.Broker) -> None:
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        pytest.skip("the GIL is on, and lets others in wherever Python code runs")
    outer, inner, other = (broker.consumer("t", channel) for channel in "abc")
    entered = 0
    during: list[int] = []
    over = threading.Event()

    def within() -> None:
        before = entered
        for _ in range(20 * EACH):  # the other thread must come to its call meanwhile
            assert inner.in_flight == 0
        during.append(entered - before)

    def call() -> None:
        outer._beacon = within
        for _ in range(5):
            Consumer.take(outer, timeout=0)
        over.set()

    def enter() -> None:
        nonlocal entered
        while not over.is_set():
            assert other.in_flight == 0
            entered += 1

    together(call, enter)
    assert min(during) <= 1, during  # a garbage collection may stop the caller, and let it in
