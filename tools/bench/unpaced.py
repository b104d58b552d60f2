"""A producer that never pauses: the consumer's rate with overflow to disk, and without.

    tools/dev bench unpaced [--seconds 10] [--rounds 5] [--json FILE]

Two processes: a producer that publishes as fast as it can, and a consumer that comes a moment later
and reads and finishes each message. Each round runs all lines on new channels: "disk" with the
default options, "block" with `overflow` = block, where the producer waits and nothing goes to disk,
and "memory" like that with a `mem_queue_size` of a million. "disk / block" and "disk / memory" are
the ratios of the consumer's rates of one round. Beside the rates stand the processor time of the
consumer, the producer and the supervisor (s of each second), the share of the messages that were
restored from disk, and the longest time that 200 publishes took. The figures are medians over the
rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from cold import BODY, CHANNEL, LIST, PATIENCE

import shmq

LATE = 0.2  # s by which the consumer begins after the producer, so that the queue overflows
#: Line -> messages of a call.
LINES = {f"lists of {LIST}": LIST, "one at a time": 1}
#: Name of a column -> `overflow`, and options beside the defaults.
KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "disk": ("disk", {}),
    "block": ("block", {}),
    "memory": ("block", {"mem_queue_size": 1_000_000, "arena_size": 1 << 29}),
}
REFERENCES = ("block", "memory")
Report = tuple[int, float, float, float]
Step = Callable[[], int]


def rate(pipe: Connection, step: Step) -> None:
    """Repeat `step`, which moves messages, until told to end. Tell how many, in how many seconds,
    with how much processor time (s), and the longest step (s)."""
    count = 0
    longest = 0.0
    pipe.send(None)
    pipe.recv()
    began, used = time.perf_counter(), time.process_time()
    before = began
    while True:
        moved = step()
        now = time.perf_counter()
        if pipe.poll():  # what the last step did, or waited for, counts no more
            break
        count += moved
        longest = max(longest, now - before)
        before = now
    report: Report = (count, before - began, time.process_time() - used, longest)
    pipe.send(report)


def produce(broker: shmq.Broker, size: int) -> Step:
    producer = broker.producer("bench")
    bodies = [BODY] * size

    def lists() -> int:
        producer.publish_many(bodies, timeout=PATIENCE)
        return size

    def singly() -> int:
        for _ in range(LIST):
            producer.publish(BODY, timeout=PATIENCE)
        return LIST

    return lists if size > 1 else singly


def consume(broker: shmq.Broker, size: int) -> Step:
    consumer = broker.consumer("bench", CHANNEL, max_in_flight=LIST)

    def lists() -> int:
        batch = consumer.take_many(size, PATIENCE)
        assert all(len(body) == len(BODY) for body in batch.bodies())
        batch.finish()
        return len(batch)

    def singly() -> int:
        for _ in range(LIST):
            message = consumer.take(PATIENCE)
            assert message is not None
            assert len(message.body) == len(BODY)
            message.finish()
        return LIST

    return lists if size > 1 else singly


def child(
    role: Callable[[shmq.Broker, int], Step], instance: str, pipe: Connection, size: int
) -> None:
    with shmq.attach(instance) as broker:
        rate(pipe, role(broker, size))


@contextlib.contextmanager
def new_channel(kind: str) -> Iterator[shmq.Broker]:
    overflow, options = KINDS[kind]
    with (
        tempfile.TemporaryDirectory(prefix="shmq-bench-") as data,
        shmq.Broker(data, f"bench-{os.getpid()}-{time.time_ns():x}", **options) as broker,
    ):
        broker.configure("bench", CHANNEL, overflow=overflow)
        yield broker


def run(size: int, kind: str, seconds: float) -> dict[str, float]:
    """One new channel for so many seconds."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with new_channel(kind) as broker:
        supervisor = psutil.Process(broker.supervisor_pid)
        for role in (produce, consume):
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(role, broker.instance, theirs, size))
            process.start()
            theirs.close()
            ours.recv()
            pipes.append(ours)
            processes.append(process)
        used = sum(supervisor.cpu_times()[:2])
        for pipe in pipes:
            pipe.send(None)
            time.sleep(LATE)
        time.sleep(seconds)
        used = sum(supervisor.cpu_times()[:2]) - used
        stats = broker.stats().channel("bench", CHANNEL)
        reports: list[Report] = []
        for pipe in reversed(pipes):  # the consumer first, so that it never waits for a message
            pipe.send(None)
            while not pipe.poll(0.1):
                broker.empty_channel("bench", CHANNEL)  # the producer may wait for room
            reports.append(pipe.recv())
        for process in processes:
            process.join()
    consumed, produced = reports
    return {
        "M/s": consumed[0] / consumed[1] / 1e6,
        "published, M/s": produced[0] / produced[1] / 1e6,
        "consumer, s": consumed[2] / consumed[1],
        "producer, s": produced[2] / produced[1],
        "supervisor, s": used / seconds,
        "restored": stats.restored / max(stats.finished, 1),
        "longest publish, ms": produced[3] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="add the result to this file, an object a line")
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(given.rounds):
        for line, size in LINES.items():
            order = sorted(KINDS, reverse=number % 2 == 1)
            figures = {kind: run(size, kind, given.seconds) for kind in order}
            row = {
                f"{kind}: {name}": figure
                for kind in KINDS
                for name, figure in figures[kind].items()
            }
            for kind in REFERENCES:
                row[f"disk / {kind}"] = figures["disk"]["M/s"] / figures[kind]["M/s"]
            found.setdefault(line, []).append(row)
    table = {
        line: {name: statistics.median(round_[name] for round_ in rounds) for name in rounds[0]}
        for line, rounds in found.items()
    }
    for line, row in table.items():
        print(line)
        for name, figure in row.items():
            print(f"    {name:28}{figure:14,.3f}")
    if given.json is not None:
        with given.json.open("a") as file:
            file.write(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
