"""Faults that the machine must find: SHMQ_LIFECYCLE_PLANT names one, `planted/sitecustomize.py`
puts it into every process."""

from __future__ import annotations

import multiprocessing.process
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

PLANT = "SHMQ_LIFECYCLE_PLANT"


class Plant(NamedTuple):
    """put: puts the fault in. row, end: a cell that shows it. everywhere: not in holders alone."""

    put: Callable[[], None]
    row: str
    end: str
    everywhere: bool = False


def permit() -> None:
    """A permit is not given back."""
    from shmq import shm

    shm.Permits.give = lambda self: None
    shm.Permits.mend = lambda self, places: 0


def store() -> None:
    """The topics and stores of a dead owner are kept."""
    from shmq.supervisor import requests

    def released(path: object) -> Iterator[object]:
        return iter(())

    requests.released = released


def lock() -> None:
    """A forked child inherits a lock that somebody holds."""
    from shmq import attachment

    locks: weakref.WeakSet[Any] = weakref.WeakSet()

    def its_lock(self: Any) -> Any:
        found = self.__dict__.setdefault("_one", threading.Lock())
        locks.add(found)
        return found

    def take() -> None:
        for each in list(locks):
            each.acquire()

    def give() -> None:
        for each in list(locks):
            each.release()

    attachment.Attachment._lock = its_lock
    os.register_at_fork(before=take, after_in_parent=give)


def mask() -> None:
    """A worker inherits blocked signals."""
    change, start = signal.pthread_sigmask, multiprocessing.process.BaseProcess.start

    def pthread_sigmask(how: Any, signals: Any) -> Any:
        return set() if how == signal.SIG_UNBLOCK else change(how, signals)

    def started(process: multiprocessing.process.BaseProcess) -> None:
        before = change(signal.SIG_BLOCK, {signal.SIGTERM})
        start(process)
        change(signal.SIG_SETMASK, before)

    signal.pthread_sigmask = pthread_sigmask
    multiprocessing.process.BaseProcess.start = started


def name() -> None:
    """A pool has the name of another."""
    from shmq.pool import site

    site.secrets = SimpleNamespace(token_hex=lambda size: "00" * size)


PLANTS = {
    "permit": Plant(permit, "broker", "close", everywhere=True),
    "store": Plant(store, "private_queue_of_a_broker", "sigkill", everywhere=True),
    "lock": Plant(lock, "broker", "fork_closes"),
    "mask": Plant(mask, "executor", "close"),
    "name": Plant(name, "executor", "second"),
}


def plant() -> None:
    """Put in the fault that the environment names, but not into the process that looks."""
    if not os.environ.get(PLANT):
        return
    fault, words = PLANTS[os.environ[PLANT]], sys.orig_argv
    if "lifecycle.holder" in words or (fault.everywhere and "lifecycle.machine" not in words):
        fault.put()


def environment(name: str) -> dict[str, str]:
    """The variables that plant this fault in all processes of the machine."""
    here = Path(__file__).parent
    return {PLANT: name, "PYTHONPATH": os.pathsep.join((str(here / "planted"), str(here.parent)))}
