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


def keep():
    import multiprocessing

    import numpy as np

    def feed(queue):
        for number in range(100):
            queue.put(np.full(1 << 20, number, np.uint8))

    for kind in (shmq.Queue, shmq.JoinableQueue, shmq.SimpleQueue):
        queue = kind()
        feeder = multiprocessing.get_context("fork").Process(target=feed, args=(queue,))
        feeder.start()
        kept = []
        for _ in range(100):
            kept.append(queue.get())
            if kind is shmq.JoinableQueue:
                queue.task_done()
        say(all((array == number).all() for number, array in enumerate(kept)))
        say(any(array.flags.writeable for array in kept))
        feeder.join()


def test_who_keeps_all_he_gets_waits_for_nothing(child: Spawn) -> None:
    """They are more than there is shared memory."""
    assert small(child, keep).succeed() == ["True", "False"] * 3


def collect():
    import multiprocessing

    import numpy as np

    with shmq.Broker(disk=False, arena_size=1 << 27) as broker:
        pool = shmq.Executor(1, multiprocessing.get_context("fork"), broker=broker, topic="t")
        pool.submit(abs, 1).result()
        broker.configure("t", "pool", max_messages=3, overflow="block")
        futures = [pool.submit(np.full, 1_000_000, number, np.uint8) for number in range(100)]
        say(all((future.result() == number).all() for number, future in enumerate(futures)))
        pool.shutdown()


def test_outcomes_of_a_durable_pool_do_not_stop_their_submitter(child: Spawn) -> None:
    """It holds the futures, and is in `submit`."""
    assert small(child, collect).succeed() == ["True"]


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
