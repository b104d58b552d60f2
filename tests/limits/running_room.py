"""The running limits of memory: a channel that is full, a queue whose items are kept, tasks that
are larger than the memory for them, a /dev/shm without room. The rows are those of `running.py`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from support.processes import WATCHDOG

import shmq
from limits import ways
from limits.machine import Outcome, Sheet, attempt
from limits.running import exceeds, nothing
from limits.site import CHANNEL, MESSAGE, READY, Site

BODY = b"x" * MESSAGE
#: Nothing matches it: the call must return.
NEVER = "(?!)"
#: Seconds that a call waits for room which does not come.
SHORT = 0.05
#: Seconds that a call waits for room which is there, or comes.
LONG = WATCHDOG / 10


def fill(producer: shmq.Producer) -> int:
    """Publish until there is no room. Returns the number of messages."""
    count = 0
    with contextlib.suppress(shmq.Full):
        while True:
            producer.publish(BODY, timeout=0)
            count += 1
    return count


def late(call: Callable[[], Any]) -> Callable[[], Outcome]:
    """Begin a call in a thread. The function that is returned waits for its end."""
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(attempt(call)), daemon=True)
    thread.start()

    def end() -> Outcome:
        thread.join()
        return found[0]

    return end


@exceeds("arena_size")
def a_full_channel(site: Site, sheet: Sheet) -> None:
    """Each way says what is full if it may wait no longer, and goes on when there is room."""
    broker = site.broker
    broker.create_channel("room", CHANNEL)
    broker.configure("room", CHANNEL, overflow="block")
    near = broker.producer("room")
    waiting = fill(near)
    assert READY > waiting > 200, "the bodies are full before the slots"

    def loan() -> None:
        with near.loan(MESSAGE, timeout=SHORT) as buffer:
            buffer[:] = BODY

    with shmq.connect(site.tcp, timeout=WATCHDOG) as remote:
        far = remote.producer("room")
        remote._connections.timeout = 1  # for an answer that does not come
        for way, call in {
            "publish": lambda: near.publish(BODY, timeout=SHORT),
            "publish_many": lambda: near.publish_many([BODY] * 3, timeout=SHORT),
            "deferred": lambda: near.publish(BODY, defer=1, timeout=SHORT),
            "loan": loan,
            "shmq pub": lambda: ways.command(
                site, "pub", "room", BODY.decode(), f"--timeout={SHORT * 1000:.0f}ms"
            ),
            "remote": lambda: far.publish(BODY, timeout=SHORT),
            "remote many": lambda: far.publish_many([BODY] * 3, timeout=SHORT),
        }.items():
            says = "arena_size.*add consumers|channel is full.*add consumers|raise timeout"
            sheet.cell(f"a full channel by {way}", call, says, broker.stats)
    with broker.consumer("room", CHANNEL, max_in_flight=2 * READY) as consumer:
        for way, publish in ways.PUBLISH.items():
            fill(near)
            end = late(partial(publish, site, "room", BODY))
            consumer.take_many(8, WATCHDOG).finish()
            sheet.tried += 1
            if (ended := end()).hung or ended.error is not None:
                sheet.fault(f"room after a wait by {way}", str(ended))
    broker.delete_topic("room")


@exceeds("arena_size")
def kept_items(site: Site, sheet: Sheet) -> None:
    """A program keeps all that it gets, which is more than the queue's memory holds."""
    size, count = 1 << 17, 64
    with shmq.Broker(disk=False, arena_size=size * 16, max_msg_size=size * 2) as broker:
        for kind in (shmq.Queue, shmq.JoinableQueue, shmq.SimpleQueue):
            queue: Any = kind(broker=broker)
            kept: list[Any] = []
            for number in range(count):
                outcome = attempt(partial(_passed, queue, np.full(size, number, np.uint8)))
                sheet.tried += 1
                if outcome.hung or outcome.error is not None:
                    sheet.fault(f"item {number} of {kind.__name__}", str(outcome))
                    return  # a SimpleQueue would wait without an end
                kept.append(outcome.value)
            if [int(each[0]) for each in kept] != list(range(len(kept))):
                sheet.fault(kind.__name__, "an item that is kept has changed")


def _passed(queue: Any, item: Any) -> Any:
    """The item, which was put into the queue and got."""
    if isinstance(queue, shmq.SimpleQueue):
        queue.put(item)
        return queue.get()
    queue.put(item, timeout=LONG)
    got = queue.get(timeout=LONG)
    if isinstance(queue, shmq.JoinableQueue):
        queue.task_done()
    return got


@exceeds("arena_size", "mem_queue_size")
def many_tasks(site: Site, sheet: Sheet) -> None:
    """The arguments of more tasks than memory holds, and their results."""
    size, count = 1 << 17, 64
    with (
        shmq.Broker(disk=False, arena_size=size * 8, max_msg_size=size * 2) as broker,
        shmq.Executor(1, broker=broker) as pool,
    ):
        argument = bytes(size)
        outcome = attempt(lambda: [pool.submit(bytes, argument) for _ in range(count)])
        sheet.tried += 1
        if outcome.hung or outcome.error is not None:
            sheet.fault("tasks", str(outcome))
            return
        for number, future in enumerate(outcome.value):
            sheet.cell(
                f"task {number}",
                partial(future.result, WATCHDOG),
                NEVER,
                nothing,
                may_return=True,
            )
