"""Ends the workers whose tasks run for too long.

Nothing is counted beside the channel itself: it knows which worker has which task, and since when.
So a task costs no more for it, and a crew looks only when a task may be late.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Final

from shmq import procfs
from shmq.peek import Peeked
from shmq.pool.site import CHANNEL, KEY_BYTES, STOP, Site

#: Messages that are looked at: more than a channel can have workers.
_MOST: Final = 1 << 16
#: Seconds to wait for a worker to stop, which one that waits for a disk may not do.
_PATIENCE: Final = 1.0
_STOPPED: Final = set("TtZX")


class Timekeeper:
    """The time limit of a pool's tasks, for its crew."""

    def __init__(self, site: Site, seconds: float) -> None:
        self._site = site
        self.seconds = seconds
        """How long a task may run in one worker."""
        self._limit = int(seconds * 1e9)
        self._next = 0  # when a task may be late, monotonic ns

    def pause(self) -> int:
        """Milliseconds until the next look."""
        return max(self._next - time.monotonic_ns(), 0) // 1_000_000 + 1

    def look(self, workers: Mapping[int, int]) -> Iterator[int]:
        """End the workers that are late, and yield their process ids. workers: descriptors by
        process id."""
        if time.monotonic_ns() < self._next:
            return
        now, first = time.time_ns(), self._limit
        for task in self._running():
            left = (task.since or 0) + self._limit - now
            pid = task.pid or 0
            if left > 0:
                first = min(first, left)
            elif pid in workers and self._end(task, pid, workers[pid]):
                yield pid
        self._next = time.monotonic_ns() + first

    def _running(self) -> list[Peeked]:
        found = self._site.broker.peek(self._site.place.topic, CHANNEL, "in_flight", _MOST)
        return [task for task in found if task.pid and task.body[:KEY_BYTES] != STOP]

    def _end(self, task: Peeked, pid: int, fd: int) -> bool:
        """Kill a worker if it still has this task. It is stopped for the look, so that it cannot
        finish the task and take another meanwhile."""
        try:
            signal.pidfd_send_signal(fd, signal.SIGSTOP)
            _wait_stopped(pid, fd)
            has = any(
                (each.id, each.pid, each.attempts) == (task.id, pid, task.attempts)
                for each in self._running()
            )
            signal.pidfd_send_signal(fd, signal.SIGKILL if has else signal.SIGCONT)
        except ProcessLookupError:
            return False
        return has


def _wait_stopped(pid: int, fd: int) -> None:
    """Wait until all threads of a process have stopped, or it has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    end = time.monotonic() + _PATIENCE
    while not poll.poll(1) and time.monotonic() < end:
        try:
            states = {
                stat.state
                for task in os.listdir(f"/proc/{pid}/task")
                if (stat := procfs.Stat.read(pid, task)) is not None
            }
        except OSError:
            return
        if states <= _STOPPED:
            return
