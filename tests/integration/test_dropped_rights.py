"""A program that makes its queues as root and then drops its rights, or whose children do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.other_users import STRANGER, needed
from support.processes import WATCHDOG

PROGRAM = f"""
import multiprocessing, os, sys
import numpy as np
import shmq

def drop():
    os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})

def work(jobs, results, joined):
    drop()
    results.put((os.getuid(), jobs.get(), jobs.qsize()))
    results.put(joined.get())
    joined.task_done()
    results.put(np.arange(100_000).sum())
    if METHOD == "fork":                        # a child of the child
        child = context.Process(target=results.put, args=("grandchild",))
        child.start()
        child.join()
    else:
        results.put("grandchild")
    joined.get(ack=True)
    results.put("holds one")
    jobs.get()

METHOD, WHOSE = sys.argv[1:]
context = multiprocessing.get_context(METHOD)
if __name__ == "__main__":
    broker = None if WHOSE == "tree" else shmq.Broker(disk=False)
    jobs, results, unopened = (shmq.Queue(broker=broker) for _ in range(3))
    joined = shmq.JoinableQueue(broker=broker)
    jobs.put("job"), joined.put("done"), joined.put("comes back")
    child = context.Process(target=work, args=(jobs, results, joined))
    child.start()
    print([str(results.get()) for _ in range(5)])
    child.kill()
    child.join()
    drop()
    print(joined.get())
    joined.task_done()
    joined.join()
    unopened.put(1)
    print(unopened.get(), os.getuid())
"""


@needed
@pytest.mark.parametrize("whose", ["tree", "own"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_queues_go_on(method: str, whose: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, method, whose],
        stdout=subprocess.PIPE,
        timeout=WATCHDOG,
        text=True,
        check=True,
    )
    first = str((STRANGER, "job", 0))
    assert done.stdout.splitlines() == [
        str([first, "done", str(sum(range(100_000))), "grandchild", "holds one"]),
        "comes back",
        f"1 {STRANGER}",
    ]
