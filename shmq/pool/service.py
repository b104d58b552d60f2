"""Workers of a durable pool from outside: the loop of `shmq worker`."""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from shmq.errors import BadArgument, ShmqError
from shmq.pool.crew import Crew
from shmq.pool.executor import Executor


def load(where: str) -> Executor:
    """The executor of a durable pool at MODULE:NAME. The working directory is searched last.
    Raises BadArgument if there is none, and what importing the module raises."""
    module, _, name = where.partition(":")
    if not module or not name:
        raise BadArgument(f"{where!r} names no executor: use MODULE:NAME, for example tasks:pool")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as exc:
        if exc.name != module:
            raise
        raise BadArgument(
            f"{where!r}: there is no module {module!r} on the module path or in {os.getcwd()}"
        ) from exc
    if not isinstance(found, Executor):
        raise BadArgument(f"{where!r} is not a shmq.Executor, but {found!r}")
    if not found.durable:
        raise BadArgument(
            f"{where!r} is a private pool, which no other process can join: make it with "
            "`instance` or `topic`"
        )
    return found


def serve(executor: Executor, processes: int | None, ready: Callable[[int], None]) -> None:
    """Run workers until SIGTERM or SIGINT, after which they finish the tasks in hand; after a
    second one they give them back. For the main thread. processes: None: the executor's
    `max_workers`, or the number of CPUs. ready: called with the number of workers.

    Raises ShmqError if the workers cannot go on, and what opening the pool raises.
    """
    count = processes or executor.terms.size or len(os.sched_getaffinity(0))
    crew = Crew(executor.durable_site(), None, dataclasses.replace(executor.terms, size=count))
    signals = 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            crew.stop()
        else:
            crew.give_back()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        crew.start()
        ready(count)
        crew.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if crew.broken is not None:
        raise ShmqError(crew.broken)
