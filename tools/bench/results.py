"""Results stores: a set until another process has it, a request until its reply, a million keys.

    tools/dev bench results [--keys 1000000] [--rounds 5] [--json FILE]

Two processes on two cores, if there are two. A round trip of messages is measured in the same
rounds as a request, so the two can be compared. Expiry is the processor time of the supervisor
while keys of a full store expire, beside its time while nothing does."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

import shmq

MIB = 1 << 20
PATIENCE = 60.0

OTHER = """
import os, sys, time, shmq
instance, what, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
broker = shmq.attach(instance)
if what == "wait":
    store = broker.results("bench")
    print("ready", flush=True)
    for number in range(count):
        value = store.wait(f"to {number}", delete=True)
        store.set(f"back {number}", value)
elif what == "echo":
    questions, answers = broker.consumer("questions", "c"), broker.producer("answers")
    print("ready", flush=True)
    for _ in range(count):
        with questions.take() as message:
            answers.publish(message.body)
else:
    consumer = broker.consumer("asked", "c")
    print("ready", flush=True)
    for _ in range(count):
        with consumer.take() as message:
            message.reply(b"x" * 100)
"""


@contextlib.contextmanager
def instance() -> Iterator[shmq.Broker]:
    with (
        tempfile.TemporaryDirectory(prefix="shmq-bench-") as data,
        shmq.Broker(
            data_path=data, instance=f"bench-{os.getpid()}-{time.time_ns():x}", on_stop="flush"
        ) as broker,
    ):
        yield broker
        for name in broker.results_names():
            broker.delete_results(name)


@contextlib.contextmanager
def other(broker: shmq.Broker, what: str, count: int) -> Iterator[None]:
    words = [sys.executable, "-c", OTHER, broker.instance, what, str(count)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
            process.wait(PATIENCE)
        finally:
            process.kill()


def set_and_wait(broker: shmq.Broker, count: int) -> list[float]:
    """Half of the time of a key there and another one back, in us."""
    store, found = broker.results("bench"), []
    with other(broker, "wait", count):
        for number in range(count):
            began = time.perf_counter_ns()
            store.set(f"to {number}", b"x" * 100)
            store.wait(f"back {number}", PATIENCE, delete=True)
            found.append((time.perf_counter_ns() - began) / 2e3)
    return found


def round_trips(broker: shmq.Broker, count: int) -> list[float]:
    """A message there and another one back, in us."""
    producer, found = broker.producer("questions"), []
    consumer = broker.consumer("answers", "c")
    with other(broker, "echo", count):
        for _ in range(count):
            began = time.perf_counter_ns()
            producer.publish(b"x" * 100)
            message = consumer.take()
            found.append((time.perf_counter_ns() - began) / 1e3)
            assert message is not None
            message.finish()
    consumer.close()
    return found


def requests(broker: shmq.Broker, count: int) -> list[float]:
    """A request until its reply, in us."""
    found = []
    with other(broker, "reply", count):
        for _ in range(count):
            began = time.perf_counter_ns()
            broker.request("asked", b"x" * 100, PATIENCE)
            found.append((time.perf_counter_ns() - began) / 1e3)
    return found


def many_keys(broker: shmq.Broker, keys: int) -> dict[str, float]:
    """Rates in million calls a second, seconds, and shares of a core."""
    supervisor = psutil.Process(broker.supervisor_pid)
    store = broker.results("many", max_keys=keys, max_bytes=max(keys * 256, 1 << 20))
    names = [f"task {number}" for number in range(keys)]
    value = b"x" * 100

    def timed(call: object) -> float:
        began = time.perf_counter()
        for name in names:
            call(name)  # type: ignore[operator]
        return time.perf_counter() - began

    found = {
        "set_new": keys / timed(lambda name: store.set(name, value)) / 1e6,
        "set_again": keys / timed(lambda name: store.set(name, value)) / 1e6,
        "get": keys / timed(store.get) / 1e6,
        "memory_mib": store.stats().committed / MIB,
    }
    found["repair_s"] = repair(broker, store)

    def share(seconds: float) -> float:
        before, began = sum(supervisor.cpu_times()[:2]), time.monotonic()
        time.sleep(seconds)
        return (sum(supervisor.cpu_times()[:2]) - before) / (time.monotonic() - began)

    found["idle_share"] = share(10)
    for number, name in enumerate(names):  # they expire over a minute
        store.set(name, value, ttl=5 + 60 * number / keys)
    expired = store.stats().expired
    found["expiring_share"] = share(40)
    found["expired_per_s"] = (store.stats().expired - expired) / 40
    return found


DIE = """
import os, signal, sys, shmq
store = shmq.attach(sys.argv[1]).results("many")
print("ready", flush=True)
while True:
    store.set("task 1", b"x" * 100000)
"""


def repair(broker: shmq.Broker, store: shmq.Results) -> float:
    """The longest of many first gets after a kill: one of them repairs the store, if the kill hit a
    call under the lock. Seconds."""
    worst = 0.0
    for _ in range(20):
        words = [sys.executable, "-c", DIE, broker.instance]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
        began = time.perf_counter()
        store.get("task 2")
        worst = max(worst, time.perf_counter() - began)
    return worst


def quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": cuts[49], "p99": cuts[98]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found: dict[str, list[float]] = {"set and wait": [], "round trip": [], "request": []}
    with instance() as broker:
        for _ in range(chosen.rounds):
            found["set and wait"] += set_and_wait(broker, chosen.count)
            found["round trip"] += round_trips(broker, chosen.count)
            found["request"] += requests(broker, chosen.count)
        result: dict[str, object] = {name: quantiles(times) for name, times in found.items()}
        for name, times in result.items():
            print(f"{name:14s} us  {times}")
        many = many_keys(broker, chosen.keys) if chosen.keys else {}
        for name, number in many.items():
            print(f"{name:14s} {number:.4g}")
    if chosen.json:
        chosen.json.write_text(json.dumps(result | {"many": many}, indent=1) + "\n")


if __name__ == "__main__":
    main()
