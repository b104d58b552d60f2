"""Keeps a lease of a batch read alive while its Spark application runs.

The process that plans a read is one of Spark's, which ends a minute later or sooner; the JVM cannot
give signs of life. So the planner starts this program, one for each name with open leases. It ends
with the application, or when no lease is left. Its end begins the lease's grace.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import shmq
from shmq import procfs
from shmq.errors import ShmqError
from shmq.spark.reads import Lookout

#: Seconds between two signs of life, at most: an instance that stops is left soon.
_PERIOD: Final = 1.0

_children: list[subprocess.Popen[bytes]] = []


def start(
    instance: str,
    owner: str | None,
    holder: Any,
    identity: str,
    leases: Iterable[int],
    ttl: float | None,
    process: str,
) -> str:
    """Have a process of its own keep the holder's leases alive while `process` lives. Both as
    `PID-START`; returns the new one. identity: of the channel."""
    job = {
        "identity": identity,
        "leases": list(leases),
        "instance": instance,
        "owner": owner,
        "where": [holder.topic, holder.channel, holder.name],
        "holder": list(holder.place),
        "ttl": ttl,
        "process": process,
    }
    above = str(Path(shmq.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH"))))
    _children[:] = [one for one in _children if one.poll() is None]  # those that ended are reaped
    child = subprocess.Popen(
        [sys.executable, "-m", "shmq.spark.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    _children.append(child)
    with contextlib.suppress(OSError):  # its start must not slow down the query's
        os.setpriority(os.PRIO_PROCESS, child.pid, 5)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(json.dumps(job).encode())
    return f"{child.pid}-{procfs.start_time(child.pid)}"


def keep(job: dict[str, Any]) -> None:
    """Give the signs of life. Raises ShmqError where there is nothing left to keep."""
    pid, _, start_time = job["process"].partition("-")
    with contextlib.ExitStack() as stack:
        try:
            fd = os.pidfd_open(int(pid))
        except ProcessLookupError:
            return
        stack.callback(os.close, fd)
        if str(procfs.start_time(int(pid))) != start_time:
            return
        named = {} if job["owner"] is None else {"owner": job["owner"]}
        broker = stack.enter_context(shmq.attach(job["instance"], timeout=2.0, **named))
        topic, channel, name = job["where"]
        queue, serial, index, incarnation = job["holder"]
        held = (queue, serial, index, incarnation)
        holder = broker.lease_holder_again(topic, channel, name, held)
        holder.adopt()
        lookouts = [Lookout(job["instance"], job["identity"], lease) for lease in job["leases"]]
        watch = select.poll()
        watch.register(fd, select.POLLIN)
        period = min(_PERIOD, (job["ttl"] or _PERIOD) / 4)
        try:
            while not watch.poll(period * 1000):
                if not all(lookout.only_looked() for lookout in lookouts):
                    holder.touch()
                owner = broker.lease_owner(topic, channel, name)
                if owner is None or not owner.leases:
                    break
            holder.close()
        finally:
            for lookout in lookouts:
                lookout.forget()


if __name__ == "__main__":
    with contextlib.suppress(ShmqError):
        keep(json.load(sys.stdin))
