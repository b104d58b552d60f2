"""The first steps of new users: messages and loans as context managers, loops that end with their
broker, exceptions of the kinds that they catch, and texts that say what to do."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Child, eventually, say, wait_ended

import shmq
from shmq import Consumer, Producer


@pytest.fixture
def producer(broker: shmq.Broker) -> Producer:
    return broker.producer("t")


@pytest.fixture
def consumer(broker: shmq.Broker) -> Consumer:
    return broker.consumer("t", "c")


def fail_after(call: Callable[[], object]) -> None:
    call()
    raise ZeroDivisionError


# ---- with message ----


@pytest.mark.parametrize("size", [1, 5000])
def test_a_message_is_finished_at_the_end_of_its_block(
    broker: shmq.Broker, producer: Producer, consumer: Consumer, size: int
) -> None:
    producer.publish(bytes(size))
    with consumer.take() as message:
        assert len(message.body) == size
        assert consumer.in_flight == 1
    assert consumer.in_flight == 0
    assert broker.channel_stats("t", "c").finished == 1
    with pytest.raises(shmq.NotInFlight):
        message.finish()


def test_a_message_is_requeued_when_its_block_raises(
    producer: Producer, consumer: Consumer
) -> None:
    producer.publish(b"x")
    with pytest.raises(ZeroDivisionError), consumer.take():
        raise ZeroDivisionError
    message = consumer.take(0)
    assert message is not None
    assert message.attempts == 2


def test_what_was_settled_in_the_block_stays_so(
    broker: shmq.Broker, producer: Producer, consumer: Consumer
) -> None:
    producer.publish_many([b"a", b"b", b"c"])
    with consumer.take() as message:
        message.finish()
    with consumer.take() as message:
        message.requeue(delay=60)
    with pytest.raises(ZeroDivisionError), consumer.take() as message:
        fail_after(message.finish)
    found = broker.channel_stats("t", "c")
    assert (found.finished, found.deferred, found.requeue_count) == (2, 1, 1)


def test_a_touch_does_not_settle(
    broker: shmq.Broker, producer: Producer, consumer: Consumer
) -> None:
    producer.publish(b"x")
    with consumer.take() as message:
        message.touch()
    assert broker.channel_stats("t", "c").finished == 1


def test_messages_of_a_batch_settle_alone_and_with_it(
    broker: shmq.Broker, producer: Producer, consumer: Consumer
) -> None:
    producer.publish_many([b"a", b"b", b"c"])
    with consumer.take_many(3) as batch:
        with batch[0]:
            pass
        with pytest.raises(ZeroDivisionError), batch[1]:
            raise ZeroDivisionError
    found = broker.channel_stats("t", "c")
    assert (found.finished, found.requeue_count) == (2, 1)


def test_an_error_of_the_block_is_not_hidden_by_a_message_that_is_lost(
    broker: shmq.Broker, producer: Producer, consumer: Consumer
) -> None:
    producer.publish(b"x")
    with pytest.raises(ZeroDivisionError), consumer.take():
        fail_after(lambda: broker.empty_channel("t", "c"))
    producer.publish(b"y")
    with pytest.raises(shmq.NotInFlight), consumer.take():
        broker.empty_channel("t", "c")


# ---- loans ----


@pytest.fixture
def used(open_broker: Callable[..., shmq.Broker]) -> Callable[[int], tuple[Producer, Consumer]]:
    """`used(n)`: bodies of n bytes lay wherever the next loan may get its memory, finished."""
    broker = open_broker(arena_size=4 << 20, max_msg_size=1 << 20)
    producer, consumer = broker.producer("t"), broker.consumer("t", "c", max_in_flight=1000)

    def use(size: int) -> tuple[Producer, Consumer]:
        many = max(min((2 << 20) // size, 1000), 1)
        for _ in range(max((8 << 20) // (many * size), 1) if size > 10 else 200):
            producer.publish_many([b"\xaa" * size] * many)
            with consumer.take_many(many) as batch:
                assert len(batch) == many
        return producer, consumer

    return use


@pytest.mark.parametrize("size", [100, 5000, 70_000, 1 << 20])
def test_a_loan_shows_nothing_old_unless_asked(
    used: Callable[[int], tuple[Producer, Consumer]], size: int
) -> None:
    producer, consumer = used(size)
    with producer.loan(size, zero=False) as buffer:  # so the rest could fail
        assert b"\xaa" * 50 in bytes(buffer)
        buffer[:] = b"\xbb" * size
    for _ in range(20):
        with producer.loan(size) as buffer:
            assert bytes(buffer) == bytes(size)
            buffer[:1] = b"x"
        with consumer.take() as message:
            assert message.body in (b"x" + bytes(size - 1), b"\xbb" * size)


@pytest.mark.parametrize("size", [10, 100, 70_000, 1 << 20])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_loan_is_shortened(broker: shmq.Broker, size: int, channels: int) -> None:
    producer = broker.producer("t")
    consumers = [broker.consumer("t", f"c{k}") for k in range(channels)]
    with (loan := producer.loan(size)) as buffer:
        buffer[:4] = b"\x89PNG"
        loan.truncate(size)
        loan.truncate(2)
        loan.truncate(4)  # may grow again, as long as it was lent
    producer.publish(b"next")
    for consumer in consumers:
        with consumer.take() as message:
            assert (message.id, message.body) == (loan.id, b"\x89PNG")
        with consumer.take() as message:
            assert message.body == b"next"
    assert broker.stats().topic("t").message_bytes == 8


def test_a_shortened_loan_of_a_backlog_and_on_disk(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker(mem_queue_size=0)
    producer = broker.producer("t")
    for k in range(1000):
        with (loan := producer.loan(5000)) as buffer:
            text = b"%d" % k
            buffer[: len(text)] = text
            loan.truncate(len(text))
    backlog = broker.stats().topic("t").backlog
    assert backlog is not None
    assert backlog.spilled > 0
    consumer = broker.consumer("t", "c", max_in_flight=1000)
    for k in range(1000):
        with consumer.take() as message:
            assert message.body == b"%d" % k


def test_a_channel_that_came_since_gets_the_shortened_body(broker: shmq.Broker) -> None:
    producer = broker.producer("t")
    broker.create_channel("t", "a")
    with (loan := producer.loan(100_000)) as buffer:
        buffer[:2] = b"ab"
        loan.truncate(2)
        broker.create_channel("t", "b")
    for name in ("a", "b"):
        with broker.consumer("t", name).take() as message:
            assert message.body == b"ab"


@pytest.mark.parametrize("size", [0, 11, -1, "4", 2**70])
def test_a_loan_cannot_be_cut_to(producer: Producer, consumer: Consumer, size: Any) -> None:
    with (
        (loan := producer.loan(10)) as buffer,
        pytest.raises((ValueError, TypeError)),
    ):
        loan.truncate(size)
    del buffer
    with consumer.take() as message:
        assert len(message.body) == 10
    with pytest.raises(RuntimeError, match="inside"):
        loan.truncate(1)


def test_memory_of_shortened_loans_comes_back(open_broker: Callable[..., shmq.Broker]) -> None:
    broker = open_broker(arena_size=1 << 20, max_msg_size=256 << 10)
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    for _ in range(50):
        with (loan := producer.loan(200_000, timeout=30)) as buffer:
            buffer[:1] = b"x"
            loan.truncate(1)
        with consumer.take() as message:
            assert message.body == b"x"


# ---- the end of a broker ----


@pytest.mark.parametrize("how", ["server", "broker", "consumer"])
def test_loops_end_when_their_broker_does(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str, how: str
) -> None:
    server = serve()
    broker = attach()
    producer = broker.producer("t")
    consumers = [broker.consumer("t", "c") for _ in range(2)]
    bodies: list[bytes] = []
    ended: list[str] = []

    def loop(consumer: Consumer) -> None:
        for message in consumer:
            bodies.append(message.body)
            message.finish()
        ended.append("loop")

    async def aloop(consumer: Consumer) -> None:
        async for message in consumer:
            bodies.append(message.body)
            message.finish()
        ended.append("aloop")

    threads = [
        threading.Thread(target=loop, args=(consumers[0],)),
        threading.Thread(target=lambda: asyncio.run(aloop(consumers[1]))),
    ]
    for thread in threads:
        thread.start()
    producer.publish_many([b"%d" % k for k in range(100)])
    eventually(lambda: len(bodies) == 100, what="all are taken")
    if how == "server":
        server.process.terminate()
        assert server.wait() == 0
    elif how == "broker":
        broker.close()
    else:
        for consumer in consumers:
            consumer.close()
    for thread in threads:
        thread.join(30)
    assert sorted(ended) == ["aloop", "loop"]
    if how == "server":
        words = "the broker was stopped; attach again when it runs"
        for call in (
            lambda: consumers[0].take(0),
            lambda: consumers[0].take(),
            lambda: producer.publish(b"x"),
            lambda: consumers[0].take_many(5),
            lambda: producer.publish_many([b"x"]),
            lambda: producer.loan(5).__enter__(),
            lambda: asyncio.run(consumers[1].take_async()),
        ):
            with pytest.raises(shmq.Gone, match=words):
                call()
        assert list(consumers[0]) == []


def test_a_worker_in_another_process_ends_with_an_embedded_broker(
    open_broker: Callable[..., shmq.Broker], child: Callable[..., Child]
) -> None:
    def work(instance: str) -> None:
        with shmq.attach(instance) as broker:
            consumer = broker.consumer("t", "c")
            say("ready")
            for message in consumer:
                say("took", message.body.decode())
                message.finish()
        say("over")

    broker = open_broker()
    worker = child(work, broker.instance)
    worker.said("ready")
    broker.producer("t").publish(b"x")
    worker.said("took x")
    broker.close()
    worker.said("over")
    assert worker.wait() == 0


def test_a_message_whose_broker_was_stopped_says_so(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker]
) -> None:
    server = serve()
    broker = attach()
    broker.producer("t").publish_many([b"x", b"y"])
    consumer = broker.consumer("t", "c")
    message, batch = consumer.take(), consumer.take_many(5)
    server.process.terminate()
    server.wait()
    for held in (message, batch):
        with pytest.raises(shmq.Gone, match=r"the broker was stopped.*handed out then"):
            held.finish()


def test_a_loop_goes_on_while_a_killed_supervisor_is_away(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], data_path: Path
) -> None:
    server = serve()
    broker = attach()
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    os.kill(server.pid, signal.SIGKILL)
    wait_ended(server.pid)
    producer.publish(b"x")
    message = next(iter(consumer))
    assert message.body == b"x"
    message.finish()
    with pytest.raises(
        shmq.NotRunning, match=f"instance {broker.instance} --data-path {data_path}`"
    ):
        broker.create_topic("new")
    with pytest.raises(
        shmq.NotRunning, match=f"instance {broker.instance} --data-path {data_path}`"
    ):
        broker.results("new")


def test_a_loop_over_a_deleted_channel_raises(broker: shmq.Broker) -> None:
    consumer = broker.consumer("t", "c")
    broker.delete_channel("t", "c")
    with pytest.raises(shmq.Gone, match="deleted; create it again"):
        next(iter(consumer))


def test_a_broker_is_closed_without_the_loop(open_broker: Callable[..., shmq.Broker]) -> None:
    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        async with open_broker() as broker:
            producer, consumer = broker.producer("t"), broker.consumer("t", "c")
            producer.publish(b"x", timeout=0)
            with await consumer.take_async() as message:
                assert message.body == b"x"
            ticking = asyncio.create_task(tick())
        assert broker.closed
        assert ticks > 0  # the end of a supervisor takes some of them
        ticking.cancel()

    asyncio.run(main())


# ---- kinds and texts of errors ----


def test_exceptions_are_those_that_others_catch(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker(mem_queue_size=16, in_flight_slots=16)
    producer = broker.producer("t")
    with pytest.raises(ValueError, match="empty"):
        producer.publish(b"")
    with pytest.raises(shmq.BadArgument, match="empty"):
        producer.publish_many([b"x", b""])
    with pytest.raises(ValueError, match="raise that option"):
        producer.publish(b"x", defer=3601)
    producer.publish_many([b"x"] * 16, defer=60, timeout=0)
    with pytest.raises(queue.Full):
        producer.publish(b"x", defer=60, timeout=0)
    assert issubclass(shmq.Full, shmq.ShmqError)
    for missing in (
        lambda: broker.stats().topic("nothing"),
        lambda: broker.stats().channel("t", "nothing"),
    ):
        for kind in (KeyError, shmq.Gone):
            with pytest.raises(kind, match=r"there is no .*nothing"):
                missing()
    with pytest.raises(shmq.Gone):
        broker.channel_stats("t", "nothing")


MISTAKES = [
    ("producer.publish({'a': 1})", TypeError, "pickle.dumps.*json.dumps"),
    ("producer.publish_many([{'a': 1}])", TypeError, "body 0 .*pickle.dumps"),
    ("producer.publish('a')", TypeError, r"text.encode\(\)"),
    ("producer.publish_many([b'x'] * 20_000)", shmq.MessageTooBig, "raise mem_queue_size"),
    ("producer.publish_many([b'x'] * 20_000, defer=1)", shmq.MessageTooBig, "raise in_flight"),
    ("producer.publish(bytes(2 << 20))", shmq.MessageTooBig, "raise that option"),
    ("producer.loan('5')", TypeError, "nbytes must be a whole number"),
    ("producer.loan(5.0)", TypeError, "nbytes must be a whole number"),
    ("producer.loan(0)", ValueError, "nbytes must be 1 or more"),
    ("consumer.take_many('5')", TypeError, "n must be a whole number"),
    ("consumer.take('5')", TypeError, "timeout must be None or a number"),
    ("shmq.attach(5)", TypeError, "instance must be a name, not 5"),
    ("shmq.attach('x', timeout='1')", TypeError, "timeout must be a number of seconds.*'1'"),
    ("shmq.attach('x', timeout=-1)", ValueError, "timeout must be a number of seconds.*-1"),
    ("broker.consumer('t', 'c', max_in_flight='5')", TypeError, "max_in_flight.*'5'"),
    ("broker.consumer('t', 'c', msg_timeout=[])", TypeError, "msg_timeout.*\\[\\]"),
    ("broker.lease_holder('t', 'c', 'n', ttl='5')", TypeError, "ttl must be.*'5'"),
    ("shmq.Broker(mode='rw')", shmq.OptionError, "^mode must be an octal number"),
    ("shmq.Broker(maxsize=5)", TypeError, "mem_queue_size"),
    ("shmq.Broker(mem_queue_sise=5)", TypeError, "did you mean mem_queue_size"),
    ("shmq.Broker(msg_timeout='5')", shmq.OptionError, "^msg_timeout"),
    ("shmq.Broker(instance=5)", TypeError, "instance must be a name, not 5"),
]


def test_a_mistake_is_told_by_the_name_of_its_argument(
    broker: shmq.Broker, producer: Producer, consumer: Consumer
) -> None:
    names = {"shmq": shmq, "broker": broker, "producer": producer, "consumer": consumer}
    for mistake, kind, words in MISTAKES:
        with pytest.raises(kind) as caught:
            eval(mistake, names)
        assert re.search(words, str(caught.value)), (mistake, str(caught.value))


def test_numbers_of_numpy_are_numbers(producer: Producer, consumer: Consumer) -> None:
    with producer.loan(np.int64(5)) as buffer:  # type: ignore[arg-type]
        buffer[:] = b"12345"
    assert len(consumer.take_many(np.uint8(3), timeout=np.float32(1))) == 1  # type: ignore[arg-type]


# ---- what is shown ----


def test_reprs_name_what_they_are(
    broker: shmq.Broker, producer: Producer, consumer: Consumer
) -> None:
    producer.publish(b"x")
    consumer.take()
    assert repr(producer) == f"<shmq.Producer of 't' on {broker.instance!r}>"
    assert (
        repr(consumer)
        == f"<shmq.Consumer of 't/c' on {broker.instance!r}: 1 of at most 200 in flight>"
    )
    consumer.close()
    producer.close()
    assert repr(producer).endswith(", closed>")
    assert repr(consumer).endswith(", closed>")
    assert len(repr(broker.channel_stats("t", "c"))) < 1500


def test_help_shows_what_is_for_users() -> None:
    assert {"instance"} <= set(dir(shmq.Broker))
    shown = {name for name in dir(shmq.Producer) if not name.startswith("_")}
    waiting = {"publish_async", "publish_many_async"}
    assert shown == {"close", "closed", "loan", "publish", "publish_many", "topic"} | waiting
