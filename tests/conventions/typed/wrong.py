"""Mistakes that type checkers find: each line marked `# wrong:` with the code of mypy's error, and
no other. Read by tests/conventions/test_typing.py, never run."""

from __future__ import annotations

import numpy as np

import shmq


def embedded() -> None:
    shmq.Broker(mem_queue_sise=3)  # wrong: call-arg
    shmq.Broker(mem_queue_size="3")  # wrong: arg-type
    shmq.Broker(on_stop="flash")  # wrong: arg-type
    shmq.Broker(msg_timeout=[])  # wrong: arg-type
    shmq.Broker(data_path=5)  # wrong: arg-type
    shmq.attach(5)  # wrong: arg-type
    shmq.attach("x", timeout="1")  # wrong: arg-type


def bodies(producer: shmq.Producer) -> None:
    producer.publish("text")  # wrong: arg-type
    producer.publish({"a": 1})  # wrong: arg-type
    producer.publish(5)  # wrong: arg-type
    producer.publish([b"x"])  # wrong: arg-type
    producer.publish(b"x", delay=5)  # wrong: call-arg
    producer.publish(b"x", timeout="1")  # wrong: arg-type
    producer.publish_many(b"x")  # wrong: arg-type
    producer.publish_many("text")  # wrong: arg-type
    producer.publish_many(["a", "b"])  # wrong: list-item
    producer.loan("5")  # wrong: arg-type
    with producer.loan(5) as buffer:
        buffer.truncate(3)  # wrong: attr-defined


def taking(consumer: shmq.Consumer) -> None:
    consumer.take(timeout=1.0).finish()  # wrong: union-attr
    consumer.take(timeout="1")  # wrong: call-overload
    consumer.take_many()  # wrong: call-arg
    consumer.take_many(5).finnish()  # wrong: attr-defined
    consumer.take_many(5).bodies().decode()  # wrong: attr-defined
    print(consumer.take().text)  # wrong: attr-defined
    consumer.take().requeue("5")  # wrong: arg-type


async def asynchronous(consumer: shmq.Consumer) -> None:
    (await consumer.take_async(1.0)).finish()  # wrong: union-attr
    print((await consumer.take_many_async(5)).ids.nothing)  # wrong: attr-defined


def opening(broker: shmq.Broker) -> None:
    broker.consumer("t")  # wrong: call-overload
    broker.consumer("t", "c", max_in_flight="5")  # wrong: call-overload
    broker.consumer("t", "c", msg_timeout="never")  # wrong: call-overload
    broker.consumer(["t", "u"], "c", policy="best")  # wrong: call-overload
    print(broker.consumer(["t", "u"], "c").nothing)  # wrong: attr-defined
    broker.lease_holder("t", "c", "n", ttl="5")  # wrong: arg-type
    print(broker.stats().channel("t", "c").dept)  # wrong: attr-defined
    print(np.zeros(5) + broker.channel_depth("t", "c"))


def queues(broker: shmq.Broker) -> None:
    numbers: shmq.Queue[int] = shmq.Queue()
    numbers.put("x")  # wrong: arg-type
    numbers.get().upper()  # wrong: attr-defined
    numbers.get(ack=True).value.upper()  # wrong: attr-defined
    shmq.JoinableQueue[int]().put(b"x")  # wrong: arg-type
    shmq.Queue("3")  # wrong: arg-type
    broker.configure("t", "c", overflow="blok")  # wrong: arg-type
