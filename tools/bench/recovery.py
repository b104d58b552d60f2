"""How long a death is felt: until what a killed consumer held is with another, until a queue is
put right again.

    tools/dev bench recovery [--load 2] [--json FILE]

Redelivery is measured from the kill to the last message in the hands of a consumer that waits for
it, so with the kernel's end of the process, the reaper's look and the takes. The repairs are
measured alone, as single calls, while the supervisor is stopped. With --load N, N processes do
nothing but count meanwhile."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import shmq

TOPIC, CHANNEL = "t", "c"
MIB = 1 << 20
PATIENCE = 60.0

HOLD = """
import sys, numpy, shmq
instance, count, ballast = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
memory = numpy.ones(ballast, numpy.uint8)
consumer = shmq.attach(instance).consumer("t", "c", max_in_flight=max(count, 1), msg_timeout=None)
held = []
while sum(map(len, held)) < count:
    held.append(consumer.take_many(count - sum(map(len, held)), 60))
print("holds", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def instance(**options: object) -> Iterator[shmq.Broker]:
    with (
        tempfile.TemporaryDirectory(prefix="shmq-bench-") as data,
        shmq.Broker(
            data_path=data,
            instance=f"bench-{os.getpid()}-{time.time_ns():x}",
            tcp_address="",
            http_address="",
            **options,
        ) as broker,
    ):
        broker.create_channel(TOPIC, CHANNEL)
        yield broker


@contextlib.contextmanager
def holder(broker: shmq.Broker, count: int, ballast: int = 0) -> Iterator[int]:
    """The pid of a consumer that holds this many messages and this much memory."""
    words = [sys.executable, "-c", HOLD, broker.instance, str(count), str(ballast)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"holds\n"
            yield process.pid
        finally:
            process.kill()


def publish(broker: shmq.Broker, count: int, size: int) -> None:
    producer = broker.producer(TOPIC)
    bodies = [bytes(size)] * max(min(count, MIB // max(size, 1)), 1)
    for done in range(0, count, len(bodies)):
        producer.publish_many(bodies[: count - done], timeout=PATIENCE)


def redelivery(broker: shmq.Broker, count: int, size: int, ballast: int = 0) -> tuple[float, float]:
    """Seconds from the kill to the first and to the last message."""
    publish(broker, count, size)
    with holder(broker, count, ballast) as pid:
        consumer = broker.consumer(TOPIC, CHANNEL, max_in_flight=count, msg_timeout=None)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        first, came, batches = 0.0, 0, []
        while came < count:  # one at first: a batch of all would copy every body before it is here
            batch = consumer.take_many(count - came if came else 1, PATIENCE)
            assert len(batch), "nothing comes"
            assert (batch.attempts == 2).all()
            first = first or time.monotonic() - killed
            came += len(batch)
            batches.append(batch)
        last = time.monotonic() - killed
        for batch in batches:
            batch.finish()
        consumer.close()
    return first, last


def client_of(broker: shmq.Broker, pid: int) -> tuple[int, int]:
    """(client, generation)"""
    clients = broker.views().directory.clients
    (index,) = np.flatnonzero((clients["pid"] == pid) & (clients["state"] != 0))
    return int(index), int(clients["generation"][index])


def repairs(broker: shmq.Broker, count: int) -> tuple[float, float]:
    """The seconds in which a dead client's messages go back, and in which a queue with all of them
    in flight is rebuilt."""
    supervisor, native = broker.supervisor_pid, broker.native()
    directory = broker.views().directory
    topic = directory.find_topic(TOPIC)
    assert topic is not None
    queue = directory.find_queue(topic.index, CHANNEL)
    assert queue is not None
    publish(broker, count, 100)
    with holder(broker, count) as pid:
        client = client_of(broker, pid)
        os.kill(supervisor, signal.SIGSTOP)
        try:
            began = time.perf_counter()
            native.adopt(queue.index)
            rebuilt = time.perf_counter() - began
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            began = time.perf_counter()
            assert native.reap(*client) == count
            reaped = time.perf_counter() - began
        finally:
            os.kill(supervisor, signal.SIGCONT)
    consumer = broker.consumer(TOPIC, CHANNEL, max_in_flight=count)
    consumer.take_many(count, PATIENCE).finish()
    consumer.close()
    return reaped, rebuilt


def shuffle(broker: shmq.Broker, count: int) -> None:
    """Leave this many messages waiting, whose slots and bodies lie in any order: those that were in
    the slots before were finished in any order."""
    publish(broker, count, 100)
    consumer = broker.consumer(TOPIC, CHANNEL, max_in_flight=count, msg_timeout=None)
    held: list[shmq.Message] = []
    while len(held) < count:
        held.extend(consumer.take_many(count - len(held), PATIENCE))
    random.Random(1).shuffle(held)
    for message in held:
        message.finish()
    consumer.close()
    publish(broker, count, 100)


def rebuilds(broker: shmq.Broker, rounds: int) -> list[float]:
    """The seconds in which nobody can publish or take, each time that the queue is rebuilt."""
    directory, native = broker.views().directory, broker.native()
    topic = directory.find_topic(TOPIC)
    assert topic is not None
    queue = directory.find_queue(topic.index, CHANNEL)
    assert queue is not None
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        native.rebuild(queue.index)
        took.append(time.perf_counter() - began)
    return took


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """Start this many processes that only count."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def spread(seconds: list[float]) -> dict[str, float]:
    """In ms."""
    p50, p99, most = (float(np.percentile(seconds, share)) * 1e3 for share in (50, 99, 100))
    return {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(most, 2), "of": len(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--load", type=int, default=0, help="processes that only count meanwhile")
    parser.add_argument("--gib", type=float, default=2, help="held in flight, or as memory besides")
    parser.add_argument("--waiting", type=int, default=1_000_000, help="in the largest queue")
    parser.add_argument("--json", type=Path, help="add the result to this file, an object a line")
    given = parser.parse_args()
    bytes_ = int(given.gib * 1024 * MIB)
    big = {
        "arena_size": bytes_ * 2,
        "mem_queue_size": bytes_ // MIB + 1000,
        "max_msg_size": 2 * MIB,
    }
    found: dict[str, dict[str, float]] = {}
    with load(given.load):
        with instance(mem_queue_size=20_000) as broker:
            found["redelivery of 100 messages"] = spread(
                [redelivery(broker, 100, 100)[1] for _ in range(given.rounds)]
            )
            name = f"redelivery of 100 messages of a process of {given.gib:g} GiB"
            found[name] = spread(
                [redelivery(broker, 100, 100, bytes_)[1] for _ in range(given.rounds // 2)]
            )
            took = [repairs(broker, 10_000) for _ in range(given.rounds)]
            found["10,000 in flight given back"] = spread([reaped for reaped, _ in took])
            found["a queue of 10,000 in flight rebuilt"] = spread([rebuilt for _, rebuilt in took])
        much = {"mem_queue_size": given.waiting, "in_flight_slots": given.waiting}
        with instance(**much, arena_size=given.waiting * 300) as broker:
            shuffle(broker, given.waiting)
            name = f"a queue of {given.waiting:,} shuffled slots rebuilt"
            found[name] = spread(rebuilds(broker, given.rounds))
        with instance(**big) as broker:
            took = [
                redelivery(broker, bytes_ // MIB, MIB) for _ in range(max(given.rounds // 7, 1))
            ]
            name = f"redelivery of {given.gib:g} GiB in flight, the "
            found[name + "first"] = spread([first for first, _ in took])
            found[name + "last"] = spread([last for _, last in took])
    for what, figures in found.items():
        print(f"{what:52}", "  ".join(f"{key} {value}" for key, value in figures.items()), "(ms)")
    if given.json is not None:
        with given.json.open("a") as file:
            file.write(json.dumps({"load": given.load, "gib": given.gib, **found}) + "\n")


if __name__ == "__main__":
    main()
