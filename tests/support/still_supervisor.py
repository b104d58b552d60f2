"""A supervisor in the process of the test whose loops do not run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from shmq import _native, shm
from shmq.options import Options
from shmq.storage.dirlock import DirLock
from shmq.supervisor import startup
from shmq.supervisor.supervisor import Supervisor


@contextlib.contextmanager
def still_supervisor(
    instance: str, data_path: Path, **options: object
) -> Iterator[tuple[Supervisor, _native.Broker]]:
    """It and a client, for the block; then the instance is gone."""
    chosen = Options.from_keywords(instance=instance, data_path=str(data_path), **options)
    lock = DirLock(data_path)
    lock.acquire()
    supervisor = Supervisor(chosen)
    directory = startup.enter(chosen)
    supervisor._begin_or_undo(directory)
    client = _native.Broker(
        shm.open_directory(instance), lambda serial: shm.open_queue(instance, serial), 0, instance
    )
    yield supervisor, client
    client.detach()
    for queue in supervisor._registry.queues:
        queue.disk.close()
    supervisor._permits.close()
    supervisor._broker.detach()
    directory.close()
    shm.unlink_instance(instance)
    lock.release()


def no_backlog() -> None:
    """For producers of topics that have a channel."""
    raise AssertionError("the topic has a channel")


def no_fork() -> None:
    """For handles of one process."""
    raise AssertionError("nobody forks")
