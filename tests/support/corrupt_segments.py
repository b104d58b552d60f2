"""A program: opens and uses segments with garbage in them, each in a forked child, and prints a
line for each child that did not end by itself. An error is fine; so is a wait for a lock.

Run by tests/unit/test_bad_input.py as a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

from shmq import ShmqError, _native
from shmq.client import Batch, Consumer, Producer
from support.in_process_broker import World

VALUES = (0, 1, 2**64 - 1, 0x7FFFFFFF7FFFFFFF, 0x0123456789ABCDEF)
SECONDS = 2  # until a child that waits is given up
LOCKS = ("directory.registry", "queue.deliver")  # which may look held for ever
HEADER = {"directory": _native.SIZES["segment"], "queue": _native.SIZES["segment"]}


def words(structure: str) -> dict[int, str]:
    """Offset of each 8 bytes of the header and what lies there."""
    found: dict[int, str] = {}
    for name, (_, offset, size, count) in _native.LAYOUT[structure].items():
        for at in range(offset & ~7, offset + size * min(count, 2), 8):
            found.setdefault(at, f"{structure}.{name}")
    return found


def garbage(world: World) -> dict[str, int]:
    """Descriptors of the segments: the directory and one queue."""
    (queue,) = world._segments.values()
    return {"directory": world._directory_fd, "queue": queue}


def use(world: World) -> None:
    """The calls of a client and of a supervisor."""
    broker = world.attach_native()

    def publish() -> None:
        producer = Producer(broker, 0, 0, "t", lambda: None, fail)
        producer.publish(b"new", timeout=0)
        producer.publish_many([b"n" * 50] * 150, timeout=0)
        producer.publish(b"late", defer=5, timeout=0)
        producer.publish(b"large" * 20_000, timeout=0)

    def take() -> None:
        queue, serial = broker.find_queue(0, "c") or (0, 1)
        consumer = Consumer(broker, queue, serial, "t", "c", 100, 0, Batch, fail)
        batch = consumer.take_many(50, 0)
        if len(batch) > 3:
            batch[0].requeue()
            batch[1].requeue(5)
            batch.touch()
        batch.finish()
        message = consumer.take(0)
        if message:
            view = message.view
            message.finish()
            view.release()
        consumer.close()

    def spill() -> None:
        batch = broker.spill_begin(0, 50, 1 << 20)
        if batch is not None:
            batch.encode()
            batch.end(0, False)

    steps: list[Callable[[], Any]] = [
        publish,
        take,
        spill,
        lambda: broker.expire(0),
        lambda: broker.stage_oldest(0, 3),
        lambda: broker.evict_read_ahead(0),
        lambda: broker.rebuild(0),
        publish,
        take,
        lambda: world.supervisor.reap_scan(),
        lambda: broker.detach(),
    ]
    for step in steps:
        with contextlib.suppress(ShmqError):
            step()


def fail() -> Any:
    raise AssertionError("nobody forks")


def child(change: Callable[[World], None]) -> int:
    """Wait status of a process that uses a changed segment."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)  # it waits: what the caller sees as SIGALRM
        world = World()
        producer = Producer(world.supervisor, *world.create_topic("t"), "t", fail, fail)
        queue, serial = world.create_channel("t", "c")
        consumer = Consumer(world.supervisor, queue, serial, "t", "c", 100, 0, Batch, fail)
        producer.publish_many([b"x" * 100] * 20)
        consumer.take_many(5, 0)
        change(world)
        with contextlib.suppress(ShmqError):
            use(world)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def cases() -> Iterator[tuple[str, Callable[[World], None]]]:
    for name in ("directory", "queue"):
        for at, what in words(name).items():
            for value in VALUES:
                data = struct.pack("<Q", value)
                yield (
                    f"{what} at {at} = {value:#x}",
                    lambda w, n=name, d=data, at=at: os.pwrite(garbage(w)[n], d, at) and None,
                )
        size = _native.SIZES[name]
        for seed in range(40):
            noise = random.Random(seed).randbytes(size)
            start = 0 if seed % 2 else HEADER[name]
            yield (
                f"{name} with noise {seed} from {start}",
                lambda w, n=name, d=noise, s=start: (
                    os.pwrite(garbage(w)[n], d[s : s + 900], s) and None
                ),
            )
        for length in (0, 1, 127, 128, 4096, 8192, 100_000):
            yield (
                f"{name} cut to {length}",
                lambda w, n=name, to=length: os.ftruncate(garbage(w)[n], to),
            )


def main() -> None:
    number = 0
    for what, change in cases():
        # who has a segment mapped that somebody cuts off can only die; who opens it must not
        status = child(change) if "cut to" not in what else child_that_opens(change)
        number += 1
        waits = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        if status and not (waits and ("noise" in what or what.startswith(LOCKS))):
            print(f"{what}: wait status {status}", flush=True)
    print(f"{number} cases")


def child_that_opens(change: Callable[[World], None]) -> int:
    pid = os.fork()
    if pid == 0:
        world = World()
        world.create_topic("t")
        world.create_channel("t", "c")
        change(world)
        with contextlib.suppress(ShmqError):
            broker = world.attach_native()
            broker.view(0)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


if __name__ == "__main__":
    sys.exit(main())
