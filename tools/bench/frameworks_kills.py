"""Time from the SIGKILL of a worker to its task's next start, for each framework on shmq.

    tools/dev bench frameworks_kills [--kills 60] [--only celery,django,dramatiq,taskiq]

Prints a table. All settings are defaults, but for Celery's `acks_late`, without which it gives no
task back. A worker that has nothing to do stands by. The last column has the defaults of the
packages for Redis that are installed: they are read, and nobody waits for them."""

from __future__ import annotations

import argparse
import inspect
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import frameworks
import frameworks_celery
import frameworks_django
import frameworks_dramatiq
import frameworks_taskiq

#: Seconds to wait for one start.
PATIENCE = 120.0


def celery(count: int) -> list[float]:
    with frameworks_celery.bench(frameworks_celery.Shmq) as made:
        return frameworks_celery.kills(made, count, PATIENCE)


def django(count: int) -> list[float]:
    with tempfile.TemporaryDirectory() as directory:
        made = frameworks_django.Shmq(Path(directory), simple=False)
        try:
            return frameworks_django.kills(made, count, PATIENCE)
        finally:
            made.close()


def on_notes(
    opened: Callable[[str], frameworks.Application], workers: Callable[[int, int], list[str]]
) -> Callable[[int], list[float]]:
    def measure(count: int) -> list[float]:
        bench = frameworks.Bench(frameworks.Shmq(), opened, workers)
        try:
            return bench.kills(count, PATIENCE)
        finally:
            bench.close()

    return measure


MEASURES: dict[str, Callable[[int], list[float]]] = {
    "celery": celery,
    "django": django,
    "dramatiq": on_notes(frameworks_dramatiq.Application, frameworks_dramatiq.workers),
    "taskiq": on_notes(frameworks_taskiq.Application, frameworks_taskiq.workers),
}


def theirs() -> dict[str, str]:
    """The defaults that the packages for Redis have."""
    from dramatiq.brokers.redis import RedisBroker
    from kombu.transport.redis import Channel
    from rq import defaults
    from taskiq_redis import RedisStreamBroker

    beat = inspect.signature(RedisBroker).parameters["heartbeat_timeout"].default
    idle = inspect.signature(RedisStreamBroker).parameters["idle_timeout"].default
    every = defaults.DEFAULT_MAINTENANCE_TASK_INTERVAL
    return {
        "celery": f"Redis: {Channel.visibility_timeout} s, `visibility_timeout`",
        "django": f"RQ: at a cleaning each {every} s the job has failed; it does not start again",
        "dramatiq": f"Redis: {beat / 1e3:.0f} s, `heartbeat_timeout`, then at some later command",
        "taskiq": f"Redis streams: {idle / 1e3:.0f} s, `idle_timeout`; Redis lists: lost",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--only", default=",".join(MEASURES))
    chosen = parser.parse_args()
    print(f"{chosen.kills} kills each, {time.strftime('%Y-%m-%d')}")
    print("| | p50, ms | p99, ms | most, ms | load | beside, read |")
    print("|---|---|---|---|---|---|")
    beside = theirs()
    for name in chosen.only.split(","):
        p50, p99, most = frameworks.quantiles(MEASURES[name](chosen.kills))
        load = f"{os.getloadavg()[0]:.0f}"
        words = (name, f"{p50:.0f}", f"{p99:.0f}", f"{most:.0f}", load, beside[name])
        print("|", " | ".join(words), "|", flush=True)


if __name__ == "__main__":
    main()
