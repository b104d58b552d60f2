"""A program: headers that promise pages which are not there, where /dev/shm has room for none.

    python promises.py INSTANCE DATA_PATH      with a small /dev/shm of its own
    python promises.py INSTANCE as-client TOPIC

A broker with a channel for each word of a header that says how much of something has pages.
/dev/shm is filled up; then each word is given the highest value that its table could have, and the
channel is used: by processes that had it open, and by one that opens it then. Errors are fine,
SIGBUS is not. A line for each case, with the words of it that `shmq inspect` says are damaged;
last, what came of a channel that was left alone, and whether the supervisor is still the same.

Run by tests/integration/test_no_room.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable

import shmq
from shmq import layout, shm, sources
from shmq.diagnostics import segment

COUNT = 50
TAKEN = 5
SLOTS = 8192
ARENA = 1 << 24
QUEUE: dict[str, dict[str, int]] = {
    "slots": {"slots_committed": SLOTS, "ring_mask": SLOTS - 1},
    "rings": {"ring_mask": SLOTS - 1},
    "heaps": {"in_flight_len": SLOTS, "deferred_len": SLOTS},
    "sessions": {"sessions_committed": layout.constant("SESSIONS")},
    "leases": {"leases_committed": 1},
    "arena": {"arena_committed": ARENA},
}
DIRECTORY: dict[str, dict[str, int]] = {
    "topics": {"topics_committed": layout.constant("TOPICS")},
    "queues": {"queues_committed": layout.constant("QUEUES")},
    "clients": {"clients_committed": layout.constant("CLIENTS")},
}


def use(broker: shmq.Broker, topic: str) -> None:
    """The clients' calls; each may raise an error."""
    consumer: shmq.Consumer | None = None

    def consume() -> None:
        nonlocal consumer
        consumer = broker.consumer(topic, "c", max_in_flight=1000)

    def requeue() -> None:
        if consumer:
            consumer.take_many(3, 0).requeue()

    def finish() -> None:
        if consumer:
            consumer.take_many(300, 0).finish()

    def lease() -> None:
        with broker.lease_holder(topic, "c", "reader") as holder:
            holder.lease(5)

    calls: list[Callable[[], object]] = [
        consume,
        lambda: broker.producer(topic).publish(bytes(3000), timeout=0),
        lambda: broker.producer(topic).publish(b"late", defer=9, timeout=0),
        lambda: broker.producer(topic).publish_many([bytes(900)] * 200, timeout=0),
        requeue,
        finish,
        lease,
        lambda: broker.peek(topic, "c", n=100),
        broker.stats,
        lambda: consumer and consumer.close(),
    ]
    for call in calls:
        with contextlib.suppress(shmq.ShmqError):
            call()


def overwrite(fd: int, structure: str, words: dict[str, int]) -> None:
    """These words of a header; closes the descriptor."""
    fields = layout.dtype(structure).fields
    assert fields is not None
    for name, value in words.items():
        kind, offset = fields[name][:2]
        os.pwrite(fd, value.to_bytes(kind.itemsize, "little"), offset)
    os.close(fd)


def inspected(fd: int) -> str:
    """The damages of a segment that `shmq inspect` reports; closes the descriptor."""
    try:
        return " ".join(str(damage) for damage in segment.read(fd, 5).damage)
    finally:
        os.close(fd)


def main(instance: str, data_path: str) -> None:
    options = {"mem_queue_size": SLOTS // 2, "in_flight_slots": SLOTS // 2, "arena_size": ARENA}
    topics = [*QUEUE, *DIRECTORY, "good"]
    with shmq.Broker(data_path=data_path, instance=instance, **options) as broker:
        for topic in topics:
            broker.create_channel(topic, "c")
            broker.producer(topic).publish_many([b"%d" % i for i in range(COUNT)])
            consumer = broker.consumer(topic, "c", max_in_flight=1000)
            assert len(consumer.take_many(TAKEN, 30)) == TAKEN
        with sources.open_readonly(instance) as source:
            entries = {topic.name: topic.index for topic in source.directory.live_topics()}
            queues = source.directory.live_queues()
            found = {
                topic: next(q for q in queues if q.topic == entries[topic]) for topic in topics
            }
            supervisor = source.directory.read("supervisor_pid")
        ballast = "/dev/shm/ballast"
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        for case, words in {**QUEUE, **DIRECTORY}.items():
            if case in QUEUE:
                again = functools.partial(shm.open_queue, instance, found[case].serial)
            else:
                again = functools.partial(shm.open_directory, instance)
            fd = again()  # kept: the supervisor's audit may replace the queue at any time
            overwrite(os.dup(fd), "queue" if case in QUEUE else "directory", words)
            use(broker, case)
            late = subprocess.run([sys.executable, __file__, instance, "as-client", case])
            damage = inspected(fd)
            told = [word for word in words if word in damage]
            print(case, late.returncode, *told, flush=True)
        came = 0
        while came < COUNT - TAKEN:
            batch = consumer.take_many(100, 30)
            came += len(batch)
            batch.finish()
        with sources.open_readonly(instance) as source:
            same = source.directory.read("supervisor_pid") == supervisor
        print("good", came, "same" if same else "another", flush=True)
        os.unlink(ballast)


if __name__ == "__main__":
    if sys.argv[2] == "as-client":
        with contextlib.suppress(shmq.ShmqError):
            use(shmq.attach(sys.argv[1]), sys.argv[3])
    else:
        main(sys.argv[1], sys.argv[2])
