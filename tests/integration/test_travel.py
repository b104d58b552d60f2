"""Brokers and their handles, given to other processes however those are started."""

from __future__ import annotations

import concurrent.futures
import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from support.processes import Child, eventually, say

import shmq

METHODS = ["spawn", "forkserver", "fork"]


def echo(consumer: shmq.Consumer, producer: shmq.Producer) -> None:
    for message in consumer:
        with message:
            producer.publish(b"%d %s" % (os.getpid(), message.body))


@pytest.mark.parametrize("method", METHODS)
def test_a_process_gets_a_consumer_and_a_producer(broker: shmq.Broker, method: str) -> None:
    tasks, results = broker.producer("tasks"), broker.consumer("results", "c")
    consumer = broker.consumer("tasks", "workers", max_in_flight=7, msg_timeout=30)
    started = multiprocessing.get_context(method).Process(
        target=echo, args=(consumer, broker.producer("results"))
    )
    started.start()
    try:
        tasks.publish_many([b"a", b"b", b"c"])
        for body in (b"a", b"b", b"c"):
            with results.take() as message:
                assert message.body == b"%d %s" % (started.pid or 0, body)
        [session] = [
            session
            for session in broker.stats().channel("tasks", "workers").sessions
            if session.client.pid == started.pid
        ]
        assert session.max_in_flight == 7
        eventually(
            lambda: broker.channel_stats("tasks", "workers").finished == 3, what="all are finished"
        )
        assert consumer.in_flight == 0
        broker.close()  # which ends the loop
        started.join(30)
        assert started.exitcode == 0
    finally:
        started.kill()
        started.join()


def square(producer: shmq.Producer, number: int) -> int:
    producer.publish(b"%d" % number**2)
    return os.getpid()


def test_a_pool_gets_a_producer_with_each_task(broker: shmq.Broker) -> None:
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        done = [pool.submit(square, producer, number) for number in range(20)]
        pids = {one.result() for one in done}
    assert os.getpid() not in pids
    found = sorted(int(message.body) for message in consumer.take_many(20, timeout=10))
    assert found == [number**2 for number in range(20)]


def test_copies_keep_the_settings(broker: shmq.Broker) -> None:
    for timeout in ("server", None, 2.5):
        consumer = broker.consumer("t", "c", max_in_flight=3, msg_timeout=timeout)  # type: ignore[arg-type]
        again = pickle.loads(pickle.dumps(consumer))
        assert (again.topic, again.channel, again.max_in_flight) == ("t", "c", 3)
        assert type(again) is shmq.Consumer
        assert again.__reduce__() == consumer.__reduce__()
        assert again is not consumer
        again.close()
        assert not consumer.closed
    producer = broker.producer("t")
    copy.copy(producer).publish(b"x")
    with consumer.take() as message:
        assert message.body == b"x"
    producer.close()


def test_what_the_first_holds_stays_with_it(broker: shmq.Broker) -> None:
    consumer = broker.consumer("t", "c")
    broker.producer("t").publish(b"x")
    message = consumer.take()
    again = pickle.loads(pickle.dumps(consumer))
    assert again.take(0) is None
    again.close()
    message.finish()


def test_handles_share_an_attachment_that_ends_with_the_last(broker: shmq.Broker) -> None:
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")

    def attached() -> int:
        return len(broker.stats().clients)

    before = attached()
    copies = pickle.loads(pickle.dumps([producer, consumer, producer]))
    more = pickle.loads(pickle.dumps(producer))
    assert attached() == before + 1
    copies.clear()
    more.publish(b"x")
    assert attached() == before + 1
    del more
    eventually(lambda: attached() == before, what="nothing of it is left")


def test_an_embedded_broker_travels_as_a_joined_one(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker()
    again = pickle.loads(pickle.dumps(broker))
    assert (again.instance, again.data_path) == (broker.instance, None)
    assert "joined" in repr(again)
    again.close()
    assert broker.supervisor_alive()
    broker.close()
    with pytest.raises(shmq.NotRunning):
        pickle.loads(pickle.dumps(broker))


def test_a_joined_broker_travels(serve: Callable[..., Child], instance: str) -> None:
    serve()
    with shmq.attach(instance) as broker:
        text = pickle.dumps((broker, broker.producer("t")))
    again, producer = pickle.loads(text)
    with again:
        producer.publish(b"x")
        assert again.stats().topic("t").depth == 1


def test_handles_travel_again_after_the_broker_was_started_anew(
    serve: Callable[..., Child], instance: str
) -> None:
    server = serve()
    with shmq.attach(instance) as broker:
        text = pickle.dumps(broker.producer("t"))
    first = pickle.loads(text)
    first.publish(b"x")
    server.process.terminate()
    server.wait()
    serve()
    second = pickle.loads(text)  # not by the attachment of the first, which is gone
    second.publish(b"y")
    with pytest.raises(shmq.Gone, match="stopped"):
        first.publish(b"z")
    with shmq.attach(instance) as broker, broker.consumer("t", "c") as consumer:
        assert consumer.take_many(5).bodies() == [b"x", b"y"]


def read(holder: shmq.LeaseHolder, lease: int, part: int) -> list[bytes]:
    return [body for batch in holder.read_lease(lease, part) for body in batch.bodies()]


def test_a_lease_holder_travels_as_the_same_holder(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"%d" % k for k in range(100)])
    context = multiprocessing.get_context("spawn")
    with broker.lease_holder("t", "c", "name") as holder:
        lease = holder.lease(100, parts=4)
        assert lease is not None
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            done = [pool.submit(read, holder, lease.id, part) for part in range(lease.parts)]
            bodies = [body for one in done for body in one.result()]
        assert sorted(bodies, key=int) == [b"%d" % k for k in range(100)]
        again = pickle.loads(pickle.dumps(holder))
        assert again.leases() == [lease]
        again.touch()
        assert again.finish_lease(lease.id) == 100
        assert holder.leases() == []
        later = broker.lease_holder("t", "c", "name")
        for fenced in (holder, again):
            with pytest.raises(shmq.LeaseFenced):
                fenced.leases()
        later.close()


@pytest.mark.parametrize("size", [1, 5000])
def test_messages_and_batches_stay_where_they_are(broker: shmq.Broker, size: int) -> None:
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    producer.publish_many([bytes(size)] * 3)
    message, batch = consumer.take(), consumer.take_many(2)
    held: list[Any] = [message, batch, batch[0]]
    for one in held:
        with pytest.raises(TypeError, match=r"cannot be pickled.*finish it here"):
            pickle.dumps(one)
        with pytest.raises(TypeError, match="cannot be pickled"):
            copy.copy(one)
    message.finish()
    batch.finish()


def test_a_child_that_is_forked_pickles_its_own(
    broker: shmq.Broker, child: Callable[..., Child]
) -> None:
    def fork(instance: str) -> None:
        import pickle

        broker = shmq.attach(instance)
        producer = pickle.loads(pickle.dumps(broker.producer("t")))
        producer.publish(b"parent")
        pid = os.fork()
        again = pickle.loads(pickle.dumps(producer))
        again.publish(b"child" if pid == 0 else b"again")
        if pid == 0:
            os._exit(0)
        say("ended", os.waitpid(pid, 0)[1])

    assert child(fork, broker.instance).said("ended") == "ended 0"
    found = broker.consumer("t", "c").take_many(5).bodies()
    assert sorted(found) == [b"again", b"child", b"parent"]
