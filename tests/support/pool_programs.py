"""Programs that use pools, run as `python -m support.pool_programs PROGRAM METHOD ARGS...`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any, NoReturn

import shmq
from shmq.queues import tree
from support import pool_tasks as tasks


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def vanish() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Vanishing:
    """An object whose pickling ends this process."""

    def __reduce__(self) -> NoReturn:
        vanish()


def begin(method: str, **options: Any) -> shmq.Executor:
    """A pool of two workers, after it has named its broker and its workers."""
    executor = shmq.Executor(2, multiprocessing.get_context(method), **options)
    pids = set()
    while len(pids) < 2:
        pids.add(executor.submit(tasks.pid).result())
    say("broker", tree.broker().instance)
    say("workers", *pids)
    return executor


def idle(method: str) -> None:
    """Wait for the kill with idle workers."""
    executor = begin(method)
    say("ready")
    signal.pause()
    executor.shutdown()


def busy(method: str) -> None:
    """Wait for the kill while the workers work."""
    executor = begin(method)
    futures = [executor.submit(tasks.square_slowly, number) for number in range(200_000)]
    say("ready")
    for future in futures:
        future.result()


def pickling(method: str) -> None:
    """Die while a task is pickled."""
    begin(method).submit(tasks.same, Vanishing())


def between(method: str) -> None:
    """Die between the pickling of a task and its publish."""
    executor = begin(method)
    executor._send = lambda task: vanish()  # type: ignore[assignment]
    executor.submit(tasks.same, 1)


def callback(method: str) -> None:
    """Die in the callback of a future."""
    future = begin(method).submit(tasks.same, 1)
    future.add_done_callback(lambda future: vanish())
    signal.pause()


def starting(method: str) -> None:
    """Die while the workers are in their initializers."""
    executor = shmq.Executor(2, multiprocessing.get_context(method), signal.pause)
    executor.submit(tasks.pid)
    say("broker", tree.broker().instance)
    assert executor._crew is not None
    while not executor._crew.pids():
        pass
    say("workers", *executor._crew.pids())
    vanish()


def unfinished(method: str) -> None:
    """End while tasks wait, without a shutdown."""
    executor = begin(method)
    for number in range(200):
        executor.submit(tasks.noted, sys.argv[3], number)


def nested(method: str) -> None:
    """A task of a forked worker that uses its parent's pool, and one that has a pool of its own."""
    executor = begin(method)
    say("said", executor.submit(own_pool).result())


def own_pool() -> int:
    with shmq.Executor(1) as executor:
        return executor.submit(tasks.same, 7).result()


def threads(method: str) -> None:
    """Several threads submit and collect."""
    executor = begin(method)

    def work(start: int) -> None:
        numbers = range(start, start + 500)
        assert list(executor.map(tasks.same, numbers)) == list(numbers)

    workers = [threading.Thread(target=work, args=(start,)) for start in range(0, 2000, 500)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    say("done")


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
