"""Consumers in event loops of others, by a file descriptor; consumers of many topics in asyncio."""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import threading
from collections.abc import Callable, Iterator

import pytest
from support.processes import WATCHDOG, Child, eventually, say

import shmq
from shmq.client import aio
from shmq.errors import Gone

Spawn = Callable[..., Child]


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    # the broker of a process tree, which tests of queues and executors start, stays for the process
    before = set(threading.enumerate())
    yield
    gc.collect()

    def left() -> list[str]:
        new = set(threading.enumerate()) - before
        return [thread.name for thread in new if thread.name.startswith("shmq-")]

    eventually(lambda: not left(), what="the threads of this test ended")
    assert not aio._keepers


@pytest.fixture(params=["one topic", "many topics"])
def consumer(
    broker: shmq.Broker, request: pytest.FixtureRequest
) -> Iterator[shmq.Consumer | shmq.MultiConsumer]:
    topics = ["t", "other", "many.*"] if request.param == "many topics" else "t"
    with broker.consumer(topics, "c", max_in_flight=5) as made:
        yield made


def readable(fd: object, seconds: float = 0.0) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def test_the_descriptor_is_readable_until_nothing_is_left(
    broker: shmq.Broker, consumer: shmq.Consumer
) -> None:
    producer = broker.producer("t")
    assert consumer.fileno() == consumer.fileno()
    while consumer.take(0) is not None or readable(consumer):
        pass  # the thread may have looked before
    producer.publish_many([b"1", b"2"])
    assert readable(consumer, WATCHDOG)
    for body in (b"1", b"2"):
        message = consumer.take(0)
        assert message is not None
        assert message.body == body
        message.finish()
        assert readable(consumer)
    assert len(consumer.take_many(5, 0)) == 0
    assert not readable(consumer)
    producer.publish(b"3")
    assert readable(consumer, WATCHDOG)


def test_it_is_readable_if_something_was_there_before(
    broker: shmq.Broker, consumer: shmq.Consumer
) -> None:
    broker.producer("t").publish(b"x")
    assert readable(consumer, WATCHDOG)


def test_a_full_consumer_is_not_readable_before_a_finish(
    broker: shmq.Broker, consumer: shmq.Consumer
) -> None:
    broker.producer("t").publish_many([b"x"] * 6)
    batch = consumer.take_many(5, 0)
    consumer.fileno()
    while consumer.take(0) is not None or readable(consumer):
        pass
    assert not readable(consumer, 0.05)
    batch.finish()
    assert readable(consumer, WATCHDOG)


def test_a_loop_with_a_reader_gets_all(broker: shmq.Broker, consumer: shmq.Consumer) -> None:
    async def main() -> list[bytes]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        bodies: list[bytes] = []

        def read() -> None:
            message = consumer.take(0)
            if message is not None:
                bodies.append(message.body)
                message.finish()
                if len(bodies) == 300:
                    done.set_result(None)

        loop.add_reader(consumer, read)
        for number in range(100):
            producer.publish_many([b"%d.%d" % (number, i) for i in range(3)])
            await asyncio.sleep(0)
        await done
        loop.remove_reader(consumer)
        return bodies

    producer = broker.producer("t")
    expected = [b"%d.%d" % (number, i) for number in range(100) for i in range(3)]
    assert asyncio.run(main()) == expected


def test_a_close_closes_the_descriptor_and_a_stop_makes_it_readable(
    broker: shmq.Broker, consumer: shmq.Consumer
) -> None:
    fd = consumer.fileno()
    os.fstat(fd)
    consumer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(Gone):
        consumer.fileno()
    other = broker.consumer(["t", "u"], "c")
    fd = other.fileno()
    while other.take(0) is not None or readable(fd):
        pass
    broker.close()
    assert readable(fd, WATCHDOG)
    with pytest.raises(Gone):
        other.take(0)


def test_a_consumer_that_is_dropped_drops_its_descriptor(broker: shmq.Broker) -> None:
    for topics in ("t", ["t", "u"]):
        fd = broker.consumer(topics, "c").fileno()

        def is_closed(fd: int = fd) -> bool:
            gc.collect()
            return not os.path.exists(f"/proc/self/fd/{fd}")

        eventually(is_closed)


def test_a_forked_child_has_a_descriptor_of_its_own(
    broker: shmq.Broker, consumer: shmq.Consumer
) -> None:
    fd = consumer.fileno()
    while consumer.take(0) is not None or readable(fd):
        pass
    broker.producer("t").publish(b"x")
    assert readable(fd, WATCHDOG)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            assert consumer.take(0) is not None
            assert consumer.take(0) is None  # and leaves the parent's descriptor alone
            assert consumer.fileno() != fd
            broker.producer("t").publish(b"y")
            status = 0 if readable(consumer, WATCHDOG) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert readable(fd)


def wake_up(instance, count):
    broker = shmq.attach(instance)
    say("ready")
    for number in range(int(count)):
        sys.stdin.readline()  # noqa: F821
        broker.producer(f"many.{number}").publish(b"%d" % number)


def test_a_pattern_makes_it_readable_for_topics_that_come(
    broker: shmq.Broker, child: Spawn
) -> None:
    consumer = broker.consumer("many.*", "c")
    publisher = child(wake_up, broker.instance, 20)
    publisher.said("ready")
    for number in range(20):
        publisher.tell()
        message = None
        while message is None:
            assert readable(consumer, WATCHDOG)
            message = consumer.take(0)
        assert message.topic == f"many.{number}"
        message.finish()
    publisher.succeed()


# ---- consumers of many topics in asyncio ----


def test_tasks_share_a_consumer_of_many_topics(broker: shmq.Broker) -> None:
    async def worker() -> None:
        async for message in consumer:
            taken.append(message.topic)
            message.finish()
            await asyncio.sleep(0)

    async def main() -> None:
        workers = [asyncio.create_task(worker()) for _ in range(5)]
        for number in range(50):
            broker.producer(names[number % len(names)]).publish(b"x")
            if number % 10 == 9:
                while len(taken) <= number:
                    await asyncio.sleep(0.001)
        consumer.close()
        await asyncio.gather(*workers)

    names = [f"t{number}" for number in range(10)]
    taken: list[str] = []
    consumer = broker.consumer(names, "c")
    asyncio.run(main())
    assert sorted(taken) == sorted(names * 5)


def test_a_cancelled_task_takes_nothing_of_many_topics(broker: shmq.Broker) -> None:
    async def main() -> None:
        assert await consumer.take_async(0) is None
        assert await consumer.take_async(0.02) is None
        assert len(await consumer.take_many_async(5, 0.02)) == 0
        tasks = [asyncio.create_task(consumer.take_async()) for _ in range(4)]
        await asyncio.sleep(0.02)
        for task in tasks[:3]:
            task.cancel()
        broker.producer("b.new").publish(b"x")
        assert (await tasks[3]).topic == "b.new"
        many = asyncio.create_task(consumer.take_many_async(10))
        await asyncio.sleep(0)
        broker.producer("a").publish_many([b"1", b"2"])
        assert (await many).bodies() == [b"1", b"2"]

    consumer = broker.consumer(["a", "b.*"], "c")
    asyncio.run(main())
    assert consumer.in_flight == 3
    consumer.close()


def test_two_loops_wait_for_one_consumer_of_many_topics(broker: shmq.Broker) -> None:
    taken: list[str] = []

    async def main() -> None:
        async for message in consumer:
            taken.append(message.topic)
            message.finish()

    consumer = broker.consumer(["a", "b"], "c")
    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(40):
        broker.producer("ab"[number % 2]).publish(b"x")
        if number % 8 == 7:
            eventually(lambda number=number: len(taken) > number)
    consumer.close()
    for thread in threads:
        thread.join()
    assert sorted(taken) == ["a"] * 20 + ["b"] * 20
