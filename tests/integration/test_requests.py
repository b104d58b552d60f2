"""Requests and replies between processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import pytest
from support.processes import Child, eventually, say

import shmq
from shmq.client import requests

Spawn = Callable[..., Child]


def serve_requests(instance, limit):
    with shmq.attach(instance) as broker, broker.consumer("questions", "workers") as consumer:
        say("ready")
        for _ in range(limit):
            with consumer.take() as message:
                message.reply(message.body.upper())
    say("done")


def test_another_process_replies(instance: str, serve: Spawn, child: Spawn) -> None:
    serve()
    with shmq.attach(instance, timeout=30) as broker:
        worker = child(serve_requests, instance, 130)
        worker.said("ready")
        for number in range(100):
            assert broker.request("questions", b"abc %d" % number) == b"ABC %d" % number

        async def main() -> None:
            asked = [broker.request_async("questions", b"x %d" % n, timeout=60) for n in range(30)]
            assert await asyncio.gather(*asked) == [b"X %d" % n for n in range(30)]

        asyncio.run(main())
        worker.said("done")
        assert list(broker.results(requests.STORE)) == []
        eventually(lambda: all(t.name != "shmq-results" for t in threading.enumerate()))


def test_a_request_that_times_out_leaves_nothing(broker: shmq.Broker) -> None:
    consumer = broker.consumer("t", "c")
    with pytest.raises(TimeoutError, match="no reply in time"):
        broker.request("t", b"q", timeout=0.01)
    store = broker.results(requests.STORE)
    message = consumer.take(10)
    assert message is not None
    assert message.body == b"q"
    message.reply(b"late")
    ((_, _, ttl),) = store._scan(False)
    assert ttl is not None  # it goes by itself
    assert 0 < ttl < 61e9

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await broker.request_async("t", b"q", timeout=0.01)

    asyncio.run(main())
    with pytest.raises(ValueError, match="timeout"):
        broker.request("t", b"q", timeout=-1)
    eventually(lambda: all(t.name != "shmq-results" for t in threading.enumerate()))


def test_a_message_that_asks_for_nothing_cannot_be_replied_to(broker: shmq.Broker) -> None:
    consumer = broker.consumer("t", "c")
    broker.producer("t").publish(b"plain")
    with consumer.take() as message:
        assert message.body == b"plain"
        with pytest.raises(shmq.BadArgument, match="nobody waits for a reply"):
            message.reply(b"x")


def test_the_store_and_the_topic_may_be_deleted_in_between(broker: shmq.Broker) -> None:
    def work() -> None:
        while len(served) < 3:
            with contextlib.suppress(shmq.Gone), broker.consumer("t", "c") as consumer:
                for message in consumer:
                    question = message.body
                    message.finish()
                    served.append(message.id)
                    message.reply(question)
                    if len(served) == 3:
                        return

    served: list[str] = []
    broker.create_channel("t", "c")
    worker = threading.Thread(target=work)
    worker.start()
    assert broker.request("t", b"1", timeout=30) == b"1"
    broker.delete_results(requests.STORE)
    assert broker.request("t", b"2", timeout=30) == b"2"
    broker.delete_topic("t")
    assert broker.request("t", b"3", timeout=30) == b"3"
    worker.join()
