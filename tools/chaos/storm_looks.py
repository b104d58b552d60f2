"""Looks at queues, ports, children and the commit, for a storm."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
from chaos.storm.nursery import NAME
from support import processes

from shmq import layout, sources

HEADER_FIELDS = (
    "dirty",
    "paused",
    "disk_read",
    "disk_write",
    "disk_depth",
    "spilling",
    "overflowed",
    "base_pending",
    "spilling_count",
    "deferred_depth",
    "ready_head",
    "ready_tail",
    "requeue_head",
    "requeue_tail",
    "requeue_head_group_end",
    "in_use_bytes",
    "need_bytes",
    "need_slots",
    "arena_committed",
    "slots_committed",
)


def describe_queues(instance: str) -> Iterator[str]:
    """The header of each queue, and the number of its slots in each state."""
    with sources.open_readonly(instance) as source:
        topics = {topic.index: topic.name for topic in source.directory.live_topics()}
        for entry in source.directory.live_queues():
            view = source.queue(entry)
            states = Counter(layout.state(view.slots["word"]).tolist())
            yield f"{topics[entry.topic]}/{entry.channel}: queue {entry.index}"
            yield f"  { ({layout.State(state).name: n for state, n in states.items()}) }"
            yield f"  { ({name: view.read(name) for name in HEADER_FIELDS}) }"
            yield f"  free in the arena: {int(view.header['arena']['free_bytes'])}"


def free_port() -> int:
    """One that no connection is given for its own end, as a client's may be that dials this very
    port while nobody listens there: the next supervisor could not have it."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(given - 20_000, 1024), given)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def children_of(pid: int) -> list[int]:
    """Processes that this one has started: a supervisor's gateways."""
    try:
        paths = list(Path(f"/proc/{pid}/task").glob("*/children"))  # each thread has its own
        found = [int(word) for path in paths for word in path.read_text().split()]
        names = [Path(f"/proc/{child}/comm").read_bytes().strip() for child in found]
    except OSError:
        return []
    return [child for child, name in zip(found, names, strict=True) if name != NAME]


def group(leader: int) -> list[psutil.Process]:
    """The other processes of the group of this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if process.pid != leader and os.getpgid(process.pid) == leader:
                found.append(process)
    return found


def commit() -> str:
    """Of the working tree, with a plus if it has changes."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", processes.ROOT, *words], capture_output=True, text=True, check=False
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (
        "+" if git("status", "--porcelain", "-uno") else ""
    )
