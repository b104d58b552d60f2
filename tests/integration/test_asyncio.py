"""Consumers in asyncio: one thread for all of them, and nothing is lost by who stops waiting."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.deliveries import Background, take_all
from support.processes import WATCHDOG, Child, eventually, say

import shmq
from shmq import _native, layout
from shmq.client import aio

Spawn = Callable[..., Child]


def waiter_threads() -> list[threading.Thread]:
    """Those of this process."""
    return [thread for thread in threading.enumerate() if thread.name == "shmq-waiter"]


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """When nobody waits any more the thread goes, and so does what it kept."""
    yield
    eventually(lambda: not waiter_threads(), what="the waiter threads ended")
    assert not aio._keepers


def in_flight(broker: shmq.Broker, topic: str) -> int:
    """Messages that somebody holds, in all channels of the topic."""
    (found,) = (t for t in broker.stats().topics if t.name == topic)
    return sum(channel.in_flight for channel in found.channels)


async def waiting(*tasks: asyncio.Task[object]) -> None:
    """Until each of them has left its future with the thread."""
    futures = {task: getattr(task, "_fut_waiter", None) for task in tasks}
    while not all(futures.values()):
        await asyncio.sleep(0)
        futures = {task: getattr(task, "_fut_waiter", None) for task in tasks}


def one_is_faster(seconds: float, trial: Callable[[], float]) -> bool:
    """Returns true if one of three trials takes less than `seconds`. On a busy machine some take
    longer; if they waited for the thread's look after a second, all would."""
    return any(trial() < seconds for _ in range(3))


# ---- what is there, what comes, what does not ----


def test_what_is_there_is_taken_and_what_comes_is_waited_for(broker: shmq.Broker) -> None:
    async def main() -> None:
        assert (await consumer.take_async()).body == b"there"
        task = asyncio.create_task(consumer.take_async())
        await waiting(task)
        producer.publish(b"comes")
        message = await task
        assert message.body == b"comes"
        message.finish()
        producer.publish_many([b"1", b"2", b"3"])
        assert (await consumer.take_many_async(2)).bodies() == [b"1", b"2"]
        assert (await consumer.take_many_async(2, 5)).bodies() == [b"3"]
        many = asyncio.create_task(consumer.take_many_async(10))
        await waiting(many)
        producer.publish_many([b"4", b"5"])
        assert (await many).bodies() == [b"4", b"5"]

    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    producer.publish(b"there")
    asyncio.run(main())


def test_a_timeout_gives_none_or_an_empty_batch(broker: shmq.Broker) -> None:
    async def main() -> None:
        began = time.monotonic()
        assert await consumer.take_async(0) is None
        assert await consumer.take_async(timeout=0.05) is None
        batch = await consumer.take_many_async(5, timeout=0.05)
        assert isinstance(batch, shmq.Batch)
        assert len(batch) == 0
        assert time.monotonic() - began >= 0.1
        for wrong in (-1, float("nan")):
            with pytest.raises(ValueError):
                await consumer.take_async(wrong)
        with pytest.raises(ValueError):
            await consumer.take_many_async(0)
        broker.producer("t").publish(b"x", defer=0.05)
        assert (await consumer.take_async(timeout=WATCHDOG)).body == b"x"

    consumer = broker.consumer("t", "c")
    asyncio.run(main())


def test_who_has_max_in_flight_waits_for_a_finish(broker: shmq.Broker) -> None:
    async def main() -> float:
        broker.producer("t").publish_many([b"1", b"2"])
        first = await consumer.take_async()
        task = asyncio.create_task(consumer.take_async())
        await waiting(task)
        assert await consumer.take_async(0.05) is None
        began = time.monotonic()
        first.finish()
        second = await task
        took = time.monotonic() - began
        assert second.body == b"2"
        second.finish()
        return took

    consumer = broker.consumer("t", "c", max_in_flight=1)
    assert one_is_faster(0.9, lambda: asyncio.run(main())), "found only by the look after 1 s"


# ---- how many wait, how many are woken ----


def test_two_hundred_consumers_share_one_thread(broker: shmq.Broker) -> None:
    n, rounds = 200, 5

    async def consume(k: int) -> None:
        got[k] = [message.body async for message in limited(consumers[k], rounds)]

    async def limited(consumer, count):  # type: ignore[no-untyped-def]
        async for message in consumer:
            message.finish()
            yield message
            count -= 1
            if not count:
                return

    async def main() -> None:
        tasks = [asyncio.create_task(consume(k)) for k in range(n)]
        await asyncio.sleep(0.2)
        assert len(waiter_threads()) == 1
        for number in range(rounds):
            order = list(range(n))
            random.shuffle(order)
            for k in order:
                producers[k].publish(b"%d:%d" % (k, number))
                if random.random() < 0.1:
                    await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks), WATCHDOG)
        assert len(waiter_threads()) == 1

    consumers = [broker.consumer(f"t{k}", "c") for k in range(n)]
    producers = [broker.producer(f"t{k}") for k in range(n)]
    got: dict[int, list[bytes]] = {}
    began = time.monotonic()
    asyncio.run(main())
    assert got == {k: [b"%d:%d" % (k, number) for number in range(rounds)] for k in range(n)}
    assert time.monotonic() - began < WATCHDOG


def test_as_many_tasks_are_woken_as_there_are_messages(broker: shmq.Broker) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(consumer.take_async()) for _ in range(8)]
        await waiting(*tasks)
        producer.publish_many([b"1", b"2", b"3"])
        await asyncio.wait_for(asyncio.gather(*tasks[:3]), 0.9)  # first come, first served
        assert [task.result().body for task in tasks[:3]] == [b"1", b"2", b"3"]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks[3:])
        producer.publish_many([b"%d" % k for k in range(5)])
        await asyncio.wait_for(asyncio.gather(*tasks[3:]), 0.9)

    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    asyncio.run(main())


def test_tasks_on_one_consumer_take_turns(broker: shmq.Broker) -> None:
    counts = [0] * 5

    async def consume(k: int) -> None:
        async for message in consumer:
            message.finish()
            counts[k] += 1

    async def main() -> None:
        tasks = [asyncio.create_task(consume(k)) for k in range(len(counts))]
        await waiting(*tasks)
        for number in range(1, 51):  # one at a time
            producer.publish(b"x")
            while sum(counts) < number:
                await asyncio.sleep(0)
            await waiting(*tasks)
        assert counts == [10] * 5
        producer.publish_many([b"x"] * 900)  # a stream
        while sum(counts) < 950:
            await asyncio.sleep(0)
        assert min(counts) > 20
        consumer.close()
        await asyncio.wait_for(asyncio.gather(*tasks), WATCHDOG)

    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    asyncio.run(main())


def test_a_channel_that_is_never_empty_leaves_the_loop_to_others(broker: shmq.Broker) -> None:
    async def consume() -> None:
        async for message in consumer:
            message.requeue()

    async def main() -> None:
        task = asyncio.create_task(consume())
        for _ in range(100):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    consumer = broker.consumer("t", "c")
    broker.producer("t").publish_many([b"x"] * 10)
    Background(lambda: asyncio.run(main())).result()
    consumer.close()
    assert len(take_all(broker, "t", "c").bodies) == 10


def test_loops_in_threads_share_consumers_and_the_one_thread(broker: shmq.Broker) -> None:
    total, taken, lock = 3000, [], threading.Lock()

    async def consume(consumer: shmq.Consumer) -> None:
        async for message in consumer:
            message.finish()
            with lock:
                taken.append(message.body)

    async def main() -> None:
        await asyncio.gather(*(consume(consumers[k % 3]) for k in range(6)))

    consumers = [broker.consumer("t", "c") for _ in range(3)]
    loops = [Background(lambda: asyncio.run(main())) for _ in range(4)]
    producer = broker.producer("t")
    sent = 0
    while sent < total:
        count = min(random.randint(1, 20), total - sent)
        producer.publish_many([b"%d" % (sent + k) for k in range(count)])
        sent += count
        if random.random() < 0.3:
            time.sleep(0.002)
    eventually(lambda: len(taken) >= total)
    assert len(waiter_threads()) == 1
    for consumer in consumers:
        consumer.close()
    for loop in loops:
        loop.result()
    assert sorted(map(int, taken)) == list(range(total))


def asks(instance):
    broker = shmq.attach(instance)
    producer, consumer = broker.producer("question"), broker.consumer("answer", "c")
    say("ready")
    for _ in range(200):
        producer.publish(b"x")
        consumer.take(30).finish()
    say("done")


def test_no_message_waits_for_the_look_after_a_second(broker: shmq.Broker, child: Spawn) -> None:
    async def main() -> None:
        async for message in consumer:
            message.finish()
            producer.publish(b"x")

    for topic in ("question", "answer"):
        broker.create_channel(topic, "c")
    producer, consumer = broker.producer("answer"), broker.consumer("question", "c")
    loop = Background(lambda: asyncio.run(main()))
    began = time.monotonic()
    child(asks, broker.instance).succeed()
    assert time.monotonic() - began < 150  # each of 400 messages would wait for up to a second
    consumer.close()
    loop.result()


# ---- cancellation ----


def publish_slowly(instance, total):
    producer = shmq.attach(instance).producer("t")
    sent = 0
    while sent < total:
        count = min(random.choice([1, 1, 1, 2, 5, 30]), total - sent)
        producer.publish_many([b"%d" % (sent + k) for k in range(count)])
        sent += count
        time.sleep(random.random() * 0.003)
    say("done")


@pytest.mark.parametrize("how", ["cancel", "wait_for", "timeout"])
def test_a_storm_of_cancellations_loses_nothing(
    broker: shmq.Broker, child: Spawn, how: str
) -> None:
    total, taken = 4000, []

    async def consume(consumer: shmq.Consumer) -> None:
        """However it ends, what it took it has finished."""
        while True:
            if random.random() < 0.3:
                batch = await consumer.take_many_async(3)
            else:
                batch = [await consumer.take_async()]
            for message in batch:
                message.finish()
                taken.append(int(message.body))

    async def patient(consumer: shmq.Consumer) -> None:
        while True:
            message = None
            if how == "wait_for":
                with contextlib.suppress(TimeoutError):
                    message = await asyncio.wait_for(consumer.take_async(), random.random() * 0.004)
            else:
                message = await consumer.take_async(random.random() * 0.004)
            if message is not None:
                message.finish()
                taken.append(int(message.body))

    async def main() -> None:
        work = consume if how == "cancel" else patient
        tasks = [asyncio.create_task(work(random.choice(consumers))) for _ in range(20)]
        publisher = child(publish_slowly, broker.instance, total)
        deadline = time.monotonic() + 2 * WATCHDOG
        while len(taken) < total:
            assert time.monotonic() < deadline, f"{len(taken)} of {total} came"
            if how == "cancel":
                for k in random.sample(range(20), random.randint(0, 20)):
                    tasks[k].cancel()
                    tasks[k] = asyncio.create_task(work(random.choice(consumers)))
            await asyncio.sleep(random.choice([0, 0, 0.001, 0.003]))
        publisher.succeed()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    consumers = [broker.consumer("t", "c", max_in_flight=5) for _ in range(3)]
    asyncio.run(main())
    assert sorted(taken) == list(range(total))
    assert in_flight(broker, "t") == 0
    assert [consumer.in_flight for consumer in consumers] == [0, 0, 0]


def test_who_is_cancelled_after_he_was_told_passes_it_on(broker: shmq.Broker) -> None:
    """A thread that waits by itself is told at once, not after its second."""

    async def main() -> None:
        for _ in range(30):
            task = asyncio.create_task(mine.take_async())
            await waiting(task)
            other = Background(lambda: theirs.take(WATCHDOG))
            while not other.wait(0) and len(bells(broker)) < 2:
                await asyncio.sleep(0)
            producer.publish(b"x")
            time.sleep(random.random() * 0.002)  # the thread tells the loop, which is busy
            task.cancel()
            began = time.monotonic()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            message = await asyncio.to_thread(other.result)
            slow.append(time.monotonic() - began > 0.5)
            message.finish()

    slow: list[bool] = []
    producer = broker.producer("t")
    mine, theirs = broker.consumer("t", "c"), broker.consumer("t", "c")
    asyncio.run(main())
    assert sum(slow) < len(slow) / 3  # without the bell nearly all are


def bells(broker: shmq.Broker) -> list[int]:
    """The numbers of the waiters for messages of t/c, from the bits that are set."""
    native, queue, _ = broker._existing_queue("t", "c")
    at = _native.LAYOUT["queue"]["takers"][1] + _native.LAYOUT["waitset"]["words"][1]
    words = native.view(queue)[at : at + layout.constant("WAITERS") // 8]
    return [k for k in range(len(words) * 8) if words[k // 8] >> k % 8 & 1]


# ---- ends ----


@pytest.mark.parametrize("later", [False, True])
def test_closing_the_consumer_ends_iterations_and_raises_for_others(
    broker: shmq.Broker, later: bool
) -> None:
    async def iterate(consumer: shmq.Consumer) -> str:
        async for _ in consumer:
            raise AssertionError
        return "over"

    async def main(consumer: shmq.Consumer) -> float:
        ends = [asyncio.create_task(iterate(consumer)) for _ in range(3)]
        raises = [asyncio.create_task(consumer.take_async(WATCHDOG)) for _ in range(3)]
        await waiting(*ends, *raises)
        began = time.monotonic()
        if later:
            await asyncio.to_thread(consumer.close)
        else:
            consumer.close()
        assert await asyncio.gather(*ends) == ["over"] * 3
        for task in raises:
            with pytest.raises(shmq.Gone, match="closed"):
                await task
        took = time.monotonic() - began
        assert await iterate(consumer) == "over"
        return took

    assert one_is_faster(0.9, lambda: asyncio.run(main(broker.consumer("t", "c"))))


@pytest.mark.parametrize("how", ["topic", "channel", "broker", "server"])
def test_what_is_deleted_or_stopped_is_noticed_at_once(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    instance: str,
    how: str,
) -> None:
    async def main(broker: shmq.Broker, other: shmq.Broker) -> float:
        consumer = broker.consumer("t", "c")
        tasks = [asyncio.create_task(consumer.take_async()) for _ in range(3)]
        await waiting(*tasks)
        await asyncio.sleep(0.05)
        if how == "topic":
            await asyncio.to_thread(other.delete_topic, "t")
        elif how == "channel":
            await asyncio.to_thread(other.delete_channel, "t", "c")
        elif how == "broker":
            broker.close()
        else:
            server.process.terminate()
            await asyncio.to_thread(server.wait)
        began = time.monotonic()
        for task in tasks:
            with pytest.raises(shmq.Gone):
                await asyncio.wait_for(task, WATCHDOG)
        took = time.monotonic() - began
        if how == "broker":
            assert [m async for m in consumer] == []
        return took

    def trial() -> float:
        nonlocal server
        if server.process.poll() is not None:
            server = serve()
        return asyncio.run(main(attach(), attach()))

    server = serve()
    assert one_is_faster(0.9, trial)


def test_closing_the_broker_waits_for_no_slice_of_the_thread(broker: shmq.Broker) -> None:
    async def main() -> float:
        joined = shmq.attach(broker.instance)
        consumer = joined.consumer("t", "c")
        task = asyncio.create_task(consumer.take_async())
        await waiting(task)
        await asyncio.sleep(0.02)
        began = time.monotonic()
        joined.close()
        took = time.monotonic() - began
        with pytest.raises(shmq.Gone):
            await task
        return took

    assert one_is_faster(0.6, lambda: asyncio.run(main()))


@pytest.mark.filterwarnings("ignore:.*was never (awaited|retrieved)")
def test_a_loop_that_was_closed_does_not_keep_the_others_waiting(broker: shmq.Broker) -> None:
    async def leave() -> None:
        asyncio.get_running_loop().create_task(consumer.take_async()).set_name("left")
        await asyncio.sleep(0.02)

    async def main() -> None:
        task = asyncio.create_task(consumer.take_async(WATCHDOG))
        await waiting(task)
        producer.publish(b"x")
        assert (await task).body == b"x"

    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    left = []
    for _ in range(2):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave())
        left += asyncio.all_tasks(loop)
        loop.close()
    asyncio.run(main())
    # nobody waits but those whose loop is closed: the thread forgets them
    eventually(lambda: not waiter_threads())
    for task in left:
        task._log_destroy_pending = False
        task.get_coro().close()
    left.clear()


def test_a_loop_that_was_told_and_closed_before_it_looked(broker: shmq.Broker) -> None:
    async def main() -> None:
        task = asyncio.create_task(consumer.take_async(WATCHDOG))
        await waiting(task)
        publish_and_close()
        assert (await task).body == b"x"

    def publish_and_close() -> None:
        producer.publish(b"x")
        time.sleep(0.2)  # the first in line is told, and his loop closed
        loop.close()

    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    loop = asyncio.new_event_loop()
    left = loop.create_task(consumer.take_async())
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0.01))
    asyncio.run(main())
    left._log_destroy_pending = False
    left.get_coro().close()


def test_tasks_that_nobody_has_any_more_leave_their_lines(broker: shmq.Broker) -> None:
    """Their last reference is the thread's, which gives it up in the middle of its work."""

    async def main() -> None:
        task = asyncio.create_task(consumers[0].take_async(WATCHDOG))
        await waiting(task)
        await asyncio.sleep(random.random() * 2)  # the thread finds them closed, or is rung
        producer.publish_many([b"x"] * 3)
        assert (await task).body == b"x"

    producer = broker.producer("t")
    consumers = [broker.consumer("t", "c") for _ in range(3)]
    for k in range(60):
        loop = asyncio.new_event_loop()
        task = loop.create_task(consumers[k % 3].take_async())
        task._log_destroy_pending = False
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        del loop, task
        gc.collect()
    asyncio.run(main())
    eventually(lambda: not waiter_threads())
