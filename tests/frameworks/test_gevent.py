"""Queues where gevent has made greenlets of threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import WATCHDOG

PROGRAM = """
from gevent import monkey
monkey.patch_all()
import multiprocessing
import gevent
import shmq

def square(jobs, results):
    for number in iter(jobs.get, None):
        results.put(number * number)

def work(queue):
    while (item := queue.get()) is not None:
        if isinstance(queue, shmq.JoinableQueue):
            queue.task_done()
    return "worked"

if __name__ == "__main__":
    full, joined = shmq.Queue(1), shmq.JoinableQueue()
    greenlets = [gevent.spawn(work, full), gevent.spawn(work, joined)]
    for number in range(20):
        full.put(number)                        # the other greenlet makes room
        joined.put(bytes(number << 12))
    joined.join()
    for queue in (full, joined):
        queue.put(None)
    print([greenlet.get() for greenlet in greenlets])
    jobs, results, ticks = shmq.Queue(), shmq.SimpleQueue(), []
    process = multiprocessing.get_context(METHOD).Process(target=square, args=(jobs, results))
    gevent.spawn(lambda: [jobs.put(each) for each in (3, 4, None)])
    gevent.spawn_later(0, process.start)
    print(results.get(), results.get())
    process.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_greenlets_of_one_process_and_of_two(method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("METHOD", repr(method)))
    done = subprocess.run(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, timeout=WATCHDOG, check=True
    )
    assert done.stdout.splitlines() == ["['worked', 'worked']", "9 16"]
