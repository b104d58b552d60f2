"""A channel that fills for the first time: its slots and bodies have no memory yet.

    tools/dev bench cold [--count 1000000] [--rounds 7] [--json FILE]

Two processes on two cores, if there are two: a producer that never pauses, and a consumer that
reads and finishes each message. Each round makes a new channel for each line; none goes to disk.
"first" is from the first publish until COUNT messages are finished, "later" the next three times
COUNT of the same run. Beside the rate stand, for each process, processor time (s), the times it
gave up its core, and the page faults; "MiB" is the size of the queue in the end. "a take while it
grows" is for a consumer that takes a few messages now and then, while COUNT are published that all
stay in memory. The figures are medians over the rounds, and the ratio is that of each round's own
two rates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import shmq

CHANNEL = "bench"
BODY = b"x" * 100
LIST = 200
FEW = 20
CHUNK = 10_000  # messages between two looks at how far a process is
LATER = 3  # times as many messages as the first ones
PATIENCE = 60.0
#: Line -> messages of a call, and mem_queue_size.
LINES = {f"lists of {LIST}": (LIST, 1_000_000), "one at a time": (1, 100_000)}
PARTS = ("first", "later")
Mark = tuple[float, float, float, float]
Role = Callable[[shmq.Broker, Connection, int, tuple[int, ...]], None]


def mark() -> Mark:
    """Now (s), and this process's processor time (s), voluntary switches, page faults."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    now = time.monotonic()
    return now, used.ru_utime + used.ru_stime, float(used.ru_nvcsw), float(used.ru_minflt)


def marks(step: Callable[[], None], parts: tuple[int, ...]) -> list[Mark]:
    """Before, and after each number of messages. step: moves CHUNK."""
    found = [mark()]
    for part in parts:
        for _ in range(part // CHUNK):
            step()
        found.append(mark())
    return found


def produce(broker: shmq.Broker, pipe: Connection, size: int, parts: tuple[int, ...]) -> None:
    producer = broker.producer("bench")
    bodies = [BODY] * size

    def step() -> None:
        if size == 1:
            for _ in range(CHUNK):
                producer.publish(BODY, timeout=PATIENCE)
        else:
            for _ in range(CHUNK // size):
                producer.publish_many(bodies, timeout=PATIENCE)

    pipe.send(None)
    pipe.recv()
    pipe.send(marks(step, parts))


def consume(broker: shmq.Broker, pipe: Connection, size: int, parts: tuple[int, ...]) -> None:
    consumer = broker.consumer("bench", CHANNEL, max_in_flight=LIST)
    over = 0  # messages taken beyond the chunk

    def step() -> None:
        nonlocal over
        if size == 1:
            for _ in range(CHUNK):
                message = consumer.take(PATIENCE)
                assert message is not None
                assert len(message.body) == len(BODY)
                message.finish()
            return
        while over < CHUNK:
            batch = consumer.take_many(size, PATIENCE)
            over += len(batch.bodies())
            batch.finish()
        over -= CHUNK

    pipe.send(None)
    pipe.recv()
    pipe.send(marks(step, parts))


def sample(broker: shmq.Broker, pipe: Connection, size: int, parts: tuple[int, ...]) -> None:
    """Take FEW messages now and then until told to end. Tell the time of each take, ns."""
    consumer = broker.consumer("bench", CHANNEL, max_in_flight=LIST)
    times = []
    pipe.send(None)
    pipe.recv()
    while not pipe.poll():
        began = time.perf_counter_ns()
        batch = consumer.take_many(FEW, 0)
        times.append(time.perf_counter_ns() - began)
        batch.finish()
        time.sleep(0.0001)
    pipe.send(times)


def child(role: Role, instance: str, pipe: Connection, size: int, parts: tuple[int, ...]) -> None:
    with shmq.attach(instance) as broker:
        role(broker, pipe, size, parts)


@contextlib.contextmanager
def new_channel(memory: int) -> Iterator[shmq.Broker]:
    with (
        tempfile.TemporaryDirectory(prefix="shmq-bench-") as data,
        shmq.Broker(
            instance=f"bench-{os.getpid()}-{time.time_ns():x}",
            data_path=data,
            mem_queue_size=memory,
            arena_size=1 << 29,
        ) as broker,
    ):
        broker.configure("bench", CHANNEL, overflow="block")
        yield broker
        broker.empty_channel("bench", CHANNEL)


def run_both(broker: shmq.Broker, take: Role, size: int, parts: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the reports of the producer and of the process that takes."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for role in (produce, take):
        ours, theirs = context.Pipe()
        process = context.Process(target=child, args=(role, broker.instance, theirs, size, parts))
        process.start()
        theirs.close()
        ours.recv()
        pipes.append(ours)
        processes.append(process)
    for pipe in reversed(pipes):
        pipe.send(None)
    sent = pipes[0].recv()
    if take is sample:
        pipes[1].send(None)
    taken = pipes[1].recv()
    for process in processes:
        process.join()
    return sent, taken


def run(size: int, memory: int, count: int) -> dict[str, float]:
    """One new channel from its first message to its last."""
    parts = (count, LATER * count)
    with new_channel(memory) as broker:
        sent, taken = run_both(broker, consume, size, parts)
        found = {"MiB": broker.stats().channel("bench", CHANNEL).memory_bytes / 2**20}
    began = sent[0][0]
    for number, (name, messages) in enumerate(zip(PARTS, parts, strict=True)):
        ended = taken[number + 1][0]
        found[f"{name}: M/s"] = messages / (ended - began) / 1e6
        began = ended
        for who, there in (("producer", sent), ("consumer", taken)):
            for column, what in enumerate(("s", "switches", "faults"), 1):
                figure = there[number + 1][column] - there[number][column]
                found[f"{name}: {who}, {what}"] = figure
    found["first / later"] = found["first: M/s"] / found["later: M/s"]
    return found


def stalls(count: int) -> dict[str, float]:
    """The times of another process's takes while a queue grows to `count` messages."""
    with new_channel(count) as broker:
        _, times = run_both(broker, sample, LIST, (count,))
    return {
        "mean, us": statistics.fmean(times) / 1e3,
        "longest, ms": max(times) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--count", type=int, default=1_000_000, help=f"a multiple of {CHUNK}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="add the result to this file, an object a line")
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.rounds):
        for line, (size, memory) in LINES.items():
            found.setdefault(line, []).append(run(size, memory, given.count))
        found.setdefault("a take while it grows", []).append(stalls(given.count))
    table = {
        line: {name: statistics.median(round_[name] for round_ in rounds) for name in rounds[0]}
        for line, rounds in found.items()
    }
    for line, row in table.items():
        print(line)
        for name, figure in row.items():
            print(f"    {name:28}{figure:14,.2f}")
    if given.json is not None:
        with given.json.open("a") as file:
            file.write(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
