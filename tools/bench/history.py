"""The cost of the history: what the supervisor of many channels uses with it and without.

    tools/dev bench history [--channels 10000] [--seconds 20] [--rounds 3] [--json FILE]

Two supervisors take turns, one with `history_bytes=0`. "Idle": nothing is published. "Busy":
another process publishes to topics at random. Processor time is that of the supervisor's threads
(schedstat, in ns); the history's share is the difference of the medians. The reader's lines are the
time of one call in this process, after the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import shmq
from shmq import deaths, history, shm
from shmq.storage import metadata
from shmq.storage.metadata import ChannelMeta, TopicMeta

EACH = 10  # channels of a topic
SETTLED = 4.0  # seconds after which what a start leaves to do is done
PAUSE = 0.002  # seconds between two messages
PATIENCE = 120.0


def processor_time(pid: int) -> float:
    """Seconds, of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def publish(instance: str, topics: int, done: Event) -> None:
    """Publish to topics at random until `done` is set."""
    chance = random.Random(1)
    with shmq.attach(instance, timeout=PATIENCE) as broker:
        producers = [broker.producer(f"topic-{number}") for number in range(topics)]
        while not done.wait(PAUSE):
            chance.choice(producers).publish(b"x" * 100)


def share(pid: int, seconds: float) -> float:
    """Percent of a core that the process uses from now on."""
    spent, began = processor_time(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (processor_time(pid) - spent) / (time.monotonic() - began)


def one_round(topics: int, budget: int, seconds: float) -> dict[str, float]:
    """Percent of a core of a new supervisor, idle and busy; and the reader's times (ms)."""
    instance = f"bench-{os.getpid()}"
    data = Path(tempfile.mkdtemp(prefix="shmq-bench-"))
    each = tuple(ChannelMeta(f"channel-{number}") for number in range(EACH))
    metadata.store(data, [TopicMeta(f"topic-{number}", False, each) for number in range(topics)])
    words = [f"--instance={instance}", f"--data-path={data}", f"--history-bytes={budget}"]
    words += ["--log-level=error", "--tcp-address=", "--http-address="]
    found = {}
    with subprocess.Popen([sys.executable, "-m", "shmq", "serve", *words]) as process:
        try:
            with shmq.attach(instance, timeout=PATIENCE):
                time.sleep(SETTLED)
            found["idle"] = share(process.pid, seconds)
            spawn = multiprocessing.get_context("spawn")
            done = spawn.Event()
            publisher = spawn.Process(target=publish, args=(instance, topics, done))
            publisher.start()
            time.sleep(SETTLED)
            found["busy"] = share(process.pid, seconds)
            done.set()
            publisher.join()
            if budget:
                found |= reading(instance)
        finally:
            process.kill()
            process.wait()
            shm.unlink_instance(instance)
            shutil.rmtree(data)
    return found


def reading(instance: str) -> dict[str, float]:
    """Milliseconds of one call."""
    since = time.time_ns() - 2 * 10**9
    calls = {
        "read the hour (ms)": lambda: history.read(instance),
        "read the day (ms)": lambda: history.read(instance, "minute"),
        "read what is new (ms)": lambda: history.read(instance, since=since),
        "read the deaths (ms)": lambda: deaths.read(instance),
    }
    found = {}
    for what, call in calls.items():
        times = []
        for _ in range(20):
            began = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - began))
        found[what] = statistics.median(times)
    return found


def measure(channels: int, seconds: float, rounds: int) -> dict[str, float]:
    """Medians over the rounds."""
    topics = max(channels // EACH, 1)
    runs: dict[int, list[dict[str, float]]] = {0: [], 4 << 20: []}
    for _ in range(rounds):
        for budget, there in runs.items():
            there.append(one_round(topics, budget, seconds))
    without, with_it = (
        {what: statistics.median(each[what] for each in there) for what in there[0]}
        for there in runs.values()
    )
    table = {"channels": float(topics * EACH)}
    for what in ("idle", "busy"):
        table[f"{what}, without (% of a core)"] = without[what]
        table[f"{what}, with (% of a core)"] = with_it[what]
        table[f"{what}, history (% of a core)"] = with_it[what] - without[what]
    return table | {what: figure for what, figure in with_it.items() if what.startswith("read")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--channels", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="add the result to this file, an object a line")
    given = parser.parse_args()
    table = measure(given.channels, given.seconds, given.rounds)
    for what, figure in table.items():
        print(f"{what:34}{figure:10,.3f}")
    if given.json is not None:
        with given.json.open("a") as file:
            file.write(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
