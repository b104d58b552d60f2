"""The cost of many idle channels. A supervisor starts from an nsqd.dat that names them, does
nothing for a while, is killed and adopted.

    tools/dev bench idle [--channels 10000] [--seconds 20] [--json FILE]

Shared memory is what /dev/shm has allocated for the instance; kernel memory is by how much slabs,
page tables and kernel stacks of the whole machine grow, so nothing else should run. Processor time
is that of the supervisor and its children.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from shmq import shm
from shmq.storage import metadata
from shmq.storage.metadata import ChannelMeta, TopicMeta

EACH = 100  # channels of a topic
SETTLED = 3.0  # seconds after which what a start leaves to do is done
PATIENCE = 120.0
KERNEL = ("Slab", "PageTables", "KernelStack", "VmallocUsed")


def kernel_memory() -> int:
    """Bytes."""
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return sum(int(lines[name].split()[0]) * 1024 for name in KERNEL)


def shared_memory(instance: str) -> int:
    """Bytes."""
    paths = (
        shm.path_of(item.name) for item in shm.list_objects(instance) if item.kind != "semaphore"
    )
    return sum(os.stat(path).st_blocks * 512 for path in paths)


@contextlib.contextmanager
def supervisor(instance: str, data: Path) -> Iterator[tuple[psutil.Process, float]]:
    """The process, and the seconds until it said that it is ready. It is killed at the end."""
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
    ):
        ready.bind(os.path.join(directory, "notify"))
        ready.settimeout(PATIENCE)
        words = [
            "serve",
            f"--instance={instance}",
            f"--data-path={data}",
            "--log-level=error",
            "--tcp-address=",
            "--http-address=",
        ]
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "shmq", *words],
            env=os.environ | {"NOTIFY_SOCKET": os.path.join(directory, "notify")},
        ) as process:
            try:
                while b"READY=1" not in ready.recv(4096):
                    pass
                yield psutil.Process(process.pid), time.monotonic() - began
            finally:
                process.kill()


def processor_time(process: psutil.Process) -> float:
    """Seconds, of a process and its children."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(member.cpu_times()[:2]) for member in family)


def measure(channels: int, seconds: float) -> dict[str, float]:
    instance = f"bench-{os.getpid()}"
    data = Path(tempfile.mkdtemp(prefix="shmq-bench-"))
    each = tuple(ChannelMeta(f"channel-{number}") for number in range(EACH))
    topics = [TopicMeta(f"topic-{number}", False, each) for number in range(channels // EACH)]
    metadata.store(data, topics)
    found = {"channels": float(len(topics) * EACH)}
    try:
        before = kernel_memory()
        with supervisor(instance, data) as (process, took):
            found["start from nsqd.dat (s)"] = took
            time.sleep(SETTLED)
            found["kernel memory (KiB a channel)"] = (kernel_memory() - before) / channels / 1024
            found["shared memory (KiB a channel)"] = shared_memory(instance) / channels / 1024
            spent, began = processor_time(process), time.monotonic()
            time.sleep(seconds)
            spent, passed = processor_time(process) - spent, time.monotonic() - began
            found["idle (% of a core)"] = 100 * spent / passed
        with supervisor(instance, data) as (_, took):
            found["adoption (s)"] = took
    finally:
        shm.unlink_instance(instance)
        shutil.rmtree(data)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--channels", type=int, default=10_000, help="hundreds of them")
    parser.add_argument("--seconds", type=float, default=20, help="of doing nothing")
    parser.add_argument("--json", type=Path, help="add the result to this file, an object a line")
    given = parser.parse_args()
    found = measure(max(given.channels // EACH, 1) * EACH, given.seconds)
    for what, figure in found.items():
        print(f"{what:32}{figure:10,.2f}")
    if given.json is not None:
        with given.json.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
