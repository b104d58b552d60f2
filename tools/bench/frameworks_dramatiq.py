"""Dramatiq on shmq beside Dramatiq on Redis.

    tools/dev bench frameworks_dramatiq [--tasks 20000] [--kills 100] [--redis-kills 1]

Workers: two processes of eight threads for the no-ops, one of four for the starts, two of one for
the kills. All settings are the defaults of both sides. `inf`: the task had not begun again after
`--patience` seconds."""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from typing import Any

import dramatiq
import frameworks


def broker_at(where: str) -> dramatiq.Broker:
    if where.startswith("shmq:"):
        from shmq.integrations.dramatiq import Broker

        return Broker(where.removeprefix("shmq:"))
    from dramatiq.brokers.redis import RedisBroker

    return RedisBroker(url=where)


def actors_of(broker: dramatiq.Broker) -> dict[str, dramatiq.Actor[Any, Any]]:
    dramatiq.set_broker(broker)

    @dramatiq.actor
    def noop(key: int) -> None:
        frameworks.note(key)

    @dramatiq.actor
    def held(key: int) -> None:
        first = frameworks.is_first(key)
        frameworks.note(key)
        if first:
            time.sleep(3600)

    return {"noop": noop, "held": held}


class Application(frameworks.Application):
    def __init__(self, where: str) -> None:
        self._broker = broker_at(where)
        self._actors = actors_of(self._broker)

    def send(self, name: str, key: int) -> None:
        self._actors[name].send(key)

    def send_many(self, count: int) -> list[float]:
        send, clock, found = self._actors["noop"].send, time.perf_counter, []
        for key in range(count):
            began = clock()
            send(key)
            found.append(clock() - began)
        return found

    def close(self) -> None:
        self._broker.close()


def workers(processes: int, tasks: int) -> list[str]:
    return ["dramatiq", "frameworks_dramatiq", "-p", str(processes), "-t", str(tasks)]


if __name__ == "__main__":
    frameworks.main(f"Dramatiq {version('dramatiq')}", Application, workers)
elif "BENCH_WHERE" in os.environ:
    actors_of(broker_at(os.environ["BENCH_WHERE"]))
