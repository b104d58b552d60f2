"""A value that can never fit is an error at once, wherever it is put, and nothing waits behind it.

/dev/shm is a small one of the child's own.
"""

from __future__ import annotations

from collections.abc import Callable

from support.processes import HELPERS, Child, say

import shmq

Spawn = Callable[..., Child]

HELP = {"env": HELPERS}


def small(spawn: Spawn, function: Callable[..., object]) -> Child:
    from support.small_memory import mounted

    return spawn(function, before=mounted("64m"), **HELP)


def publish():
    with shmq.Broker(disk=False, max_msg_size=1 << 30, arena_size=1 << 31) as broker:
        producer, store = broker.producer("t"), broker.results("s", max_bytes=1 << 31)
        large = bytes(96 << 20)
        for call in (
            lambda: producer.publish(large),
            lambda: producer.publish_many([large[: 40 << 20]] * 2),
            lambda: producer.loan(96 << 20).__enter__(),
            lambda: store.set("k", large),
            lambda: store.add("k", large),
        ):
            try:
                call()
            except shmq.MessageTooBig as exc:
                say("too big", "/dev/shm" in str(exc) and "--shm-size" in str(exc))
        producer.publish(b"x", timeout=60)
        say("goes on")


def test_messages_and_values(child: Spawn) -> None:
    lines = small(child, publish).succeed()
    assert lines == ["too big True"] * 5 + ["goes on"]


def put():
    import numpy as np

    for queue in (shmq.Queue(), shmq.JoinableQueue(), shmq.SimpleQueue()):
        try:
            queue.put(np.ones(96 << 20, np.uint8))
        except shmq.MessageTooBig:
            say("too big")
        queue.put(1)
        say("got", queue.get())


def test_items(child: Spawn) -> None:
    assert small(child, put).succeed() == ["too big", "got 1"] * 3


def tasks():
    import multiprocessing

    import numpy as np

    with shmq.Executor(1, multiprocessing.get_context("fork")) as executor:
        for call in ((np.ones, 96 << 20, np.uint8), (len, np.ones(96 << 20, np.uint8))):
            future = executor.submit(*call)
            behind = executor.submit(pow, 2, 10)
            say(type(future.exception()).__name__, behind.result())
        # It is smaller than /dev/shm, but nothing else is there that could make room.
        say(type(executor.submit(np.ones, (64 << 20) - 65536, np.uint8).exception()).__name__)
        say(executor.submit(pow, 2, 10).result())


def test_arguments_and_outcomes_of_tasks(child: Spawn) -> None:
    expected = ["MessageTooBig 1024", "MessageTooBig 1024", "MessageTooBig", "1024"]
    assert small(child, tasks).succeed() == expected
