"""Queues beside those of the standard library: small objects, arrays, and round trips.

    tools/dev bench queues [--rounds 7] [--count 100000] [--json FILE]

Two processes on two cores, if there are two. The two kinds of queue take turns in each round, so a
busy machine slows both. A ratio is the median of the one over the median of the other: how many
times more items a second, and which part of the time of a round trip."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shmq

CONTEXT = multiprocessing.get_context("fork")
KINDS: dict[str, Callable[[], Any]] = {"shmq": shmq.Queue, "multiprocessing": CONTEXT.Queue}
SMALL = (17, 2.5, "name", b"x" * 60, None)
ARRAY_BYTES = 1 << 20
#: Arrays that wait at most: both kinds get the same bound, so neither fills the memory.
ARRAYS = 64


def put_all(queue: Any, item: object, count: int) -> None:
    for _ in range(count):
        queue.put(item)


def rate(queue: Any, item: object, count: int) -> float:
    """Items a second from one process to another, from the first that comes to the last."""
    process = CONTEXT.Process(target=put_all, args=(queue, item, count + 1))
    process.start()
    queue.get()
    began = time.perf_counter()
    for _ in range(count):
        queue.get()
    taken = time.perf_counter() - began
    process.join()
    return count / taken


def echo(questions: Any, answers: Any, count: int) -> None:
    for _ in range(count):
        answers.put(questions.get())


def round_trip(make: Callable[[], Any], count: int) -> float:
    """Median of an object there and back, us."""
    questions, answers, times = make(), make(), []
    process = CONTEXT.Process(target=echo, args=(questions, answers, count))
    process.start()
    for _ in range(count):
        began = time.perf_counter_ns()
        questions.put(SMALL)
        answers.get()
        times.append((time.perf_counter_ns() - began) / 1e3)
    process.join()
    return statistics.median(times)


def measures(count: int) -> dict[str, Callable[[str], float]]:
    """Name -> a function that measures one kind of queue."""
    array = np.arange(ARRAY_BYTES // 8, dtype=np.float64)
    bounded = {"shmq": shmq.Queue, "multiprocessing": CONTEXT.Queue}
    return {
        "small tuple, 1/s": lambda kind: rate(KINDS[kind](), SMALL, count),
        "1 MiB array, 1/s": lambda kind: rate(bounded[kind](ARRAYS), array, max(count // 100, 10)),
        "round trip, us": lambda kind: round_trip(KINDS[kind], max(count // 20, 10)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name, measure in measures(chosen.count).items():
        results: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(chosen.rounds):
            for kind, values in results.items():
                values.append(measure(kind))
        row = {kind: statistics.median(values) for kind, values in results.items()}
        row["ratio"] = row["shmq"] / row["multiprocessing"]
        found[name] = row
        print(f"{name:18s}", *(f"{key} {value:.4g}" for key, value in row.items()), sep="  ")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
