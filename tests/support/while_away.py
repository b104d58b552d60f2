"""Things that only a supervisor can make, for processes that find theirs dead."""

from __future__ import annotations

import os

import shmq
from shmq.queues import tree


def make() -> None:
    queue = shmq.Queue()
    queue.put(1)
    with shmq.Executor(1) as executor:
        power = executor.submit(pow, 2, 3).result()
    store = tree.broker().results("store-" + str(os.getpid()))
    store.set("key", b"1")
    os.write(1, f"made {queue.get()} {power} {len(store)}\n".encode())
