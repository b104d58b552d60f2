"""Pools of processes: shmq.Executor beside ProcessPoolExecutor and loky (joblib's copy of it).

    tools/dev bench executor [--tasks 100000] [--rounds 5] [--json FILE]

Each round measures all pools one after the other, so that they meet the same machine. The figures
are medians over the rounds, and ratios to shmq's. A restart is the time from a kill of a worker
until the process that replaces it runs its first task."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import shmq

WORKERS = 2
MIB = 1 << 20

Pool = Any
Open = Callable[[], contextlib.AbstractContextManager[Pool]]


def nothing(number: int) -> int:
    return number


def double(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array * 2


def pid() -> int:
    return os.getpid()


@contextlib.contextmanager
def loky() -> Iterator[Pool]:
    from joblib.externals.loky import ProcessPoolExecutor

    pool = ProcessPoolExecutor(WORKERS)
    try:
        yield pool
    finally:
        pool.shutdown()


def pools() -> dict[str, Open]:
    return {
        "shmq": lambda: shmq.Executor(WORKERS),
        "concurrent.futures": lambda: concurrent.futures.ProcessPoolExecutor(WORKERS),
        "loky": loky,
    }


def warm(pool: Pool) -> None:
    """All workers run."""
    for future in [pool.submit(nothing, number) for number in range(200)]:
        future.result()


# ---- measures, in us ----


def submit_all(pool: Pool, tasks: int) -> float:
    """A task of very many that are submitted before the first result is asked for."""
    began = time.perf_counter()
    futures = [pool.submit(nothing, number) for number in range(tasks)]
    assert [future.result() for future in futures] == list(range(tasks))
    return (time.perf_counter() - began) / tasks * 1e6


def map_all(pool: Pool, tasks: int) -> float:
    """A call of a map."""
    began = time.perf_counter()
    assert list(pool.map(nothing, range(tasks))) == list(range(tasks))
    return (time.perf_counter() - began) / tasks * 1e6


def one_by_one(pool: Pool, tasks: int) -> float:
    """The median time of one task until its result."""
    found = []
    for number in range(min(tasks, 2000)):
        began = time.perf_counter()
        pool.submit(nothing, number).result()
        found.append((time.perf_counter() - began) * 1e6)
    return statistics.median(found)


def as_completed(pool: Pool, tasks: int) -> float:
    """A task of many whose results are taken in the order of their ends."""
    began = time.perf_counter()
    futures = [pool.submit(nothing, number) for number in range(tasks)]
    for future in concurrent.futures.as_completed(futures):
        future.result()
    return (time.perf_counter() - began) / tasks * 1e6


def arrays_first(pool: Pool, tasks: int) -> float:
    """An array of 1 MiB there, and another one back, while the memory for them is new."""
    count = 200
    array = np.ones(MIB, np.uint8)
    began = time.perf_counter()
    for result in pool.map(double, (array for _ in range(count))):
        assert result[-1] == 2
    return (time.perf_counter() - began) / count * 1e6


def arrays(pool: Pool, tasks: int) -> float:
    """The same again, in memory that was used before."""
    return arrays_first(pool, tasks)


MEASURES = (submit_all, map_all, one_by_one, as_completed, arrays_first, arrays)


def restarts(count: int) -> list[float]:
    """From the kill of the only worker until another one runs a task, ms."""
    found = []
    with shmq.Executor(1) as pool:
        worker = pool.submit(pid).result()
        for _ in range(count):
            began = time.perf_counter()
            os.kill(worker, signal.SIGKILL)
            before = worker
            while worker == before:
                worker = pool.submit(pid).result()
            found.append((time.perf_counter() - began) * 1e3)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(chosen.rounds):
        for name, opened in pools().items():
            # the others take much longer for as many
            tasks = chosen.tasks if name == "shmq" else max(chosen.tasks // 5, 1)
            with opened() as pool:
                warm(pool)
                for measure in MEASURES:
                    times = found.setdefault(measure.__name__, {}).setdefault(name, [])
                    times.append(measure(pool, tasks))
    result: dict[str, Any] = {}
    for measure_name, by_pool in found.items():
        medians = {name: statistics.median(times) for name, times in by_pool.items()}
        ratios = {name: value / medians["shmq"] for name, value in medians.items()}
        result[measure_name] = {"us": medians, "ratio": ratios}
        shown = "  ".join(f"{n} {medians[n]:.1f} us ({ratios[n]:.2f})" for n in medians)
        print(f"{measure_name:14s} {shown}")
    times = restarts(20 * chosen.rounds)
    result["restart_ms"] = {"p50": times[len(times) // 2], "p99": times[int(len(times) * 0.99)]}
    print(f"{'restart':14s} p50 {times[len(times) // 2]:.1f} ms  p99 {times[-1]:.1f} ms")
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
