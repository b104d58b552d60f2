"""Returns what dead clients held, within milliseconds of their death.

Each client holds a robust `life` lock; the core's `reap_scan` tries them all. A free one says only
that the thread which attached is gone, so `/proc` decides what ended:

* the process (gone, another start time, zombie, on its way out), or its program (an exec):
  everything it held goes back, its client entry last. Another user's program cannot be read; if its
  first thread attached and still runs, then only an exec can have freed the lock;
* that thread only: the entry lives on and is watched by its pid.

A pidfd per client is the fallback, and what watches those, as long as there are descriptors. It
alone would be too slow: it fires after the address space is gone, 160 ms per GiB.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shmq._native import Broker, Busy, Gone, ShmqError
from shmq.layout import ClientState
from shmq.supervisor import descriptors
from shmq.supervisor.arbiter import Bell
from shmq.supervisor.process import Process, is_running, program_name
from shmq.supervisor.roster import Roster

_SCAN_EVERY = 0.010  # seconds
_LOOK_EVERY = 0.250  # at the client table, for new clients and spared ones
_TID_MASK = 0x3FFFFFFF  # FUTEX_TID_MASK: of the first word of a glibc mutex
_EXEC = "became another program (exec)"
_RETRY_AFTER = 0.5  # seconds until a client whose reaping failed is tried again

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """A client entry and the process behind it."""

    client: int
    generation: int
    pid: int
    start_time: int
    program: int
    pidfd: int  # -1: none could be spared; its lock tells, and if that is free, /proc
    title: str  # for the log; it cannot be asked for any more after the death
    thread: int  # that holds its life lock, 0 if none did


class Reaper:
    """One loop. `freed` is called after each client entry that has become free."""

    def __init__(self, broker: Broker, roster: Roster, freed: Callable[[], None]) -> None:
        self._broker = broker
        self._directory = roster.directory
        self._freed = freed
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._by_fd: dict[int, _Watched] = {}
        self._below = descriptors.below()
        self._epoll = select.epoll()
        self._roused = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._roused, select.EPOLLIN | select.EPOLLET)
        self._suspects: set[tuple[int, int]] = set()  # free lock, process looked alive
        self._retry: dict[tuple[int, int], float] = {}
        self.reaped = 0

    def run(self, bell: Bell) -> None:
        """The loop. It sleeps in the core, which tries the locks."""
        next_look = 0.0
        bell.call_too(lambda: os.eventfd_write(self._roused, 1))
        try:
            while not bell.stopped:
                now = time.monotonic()
                if now >= next_look:
                    next_look = now + _LOOK_EVERY
                    self._look()
                free = self._broker.reap_scan(
                    self._epoll.fileno(), int(_SCAN_EVERY * 1e9), int(next_look * 1e9)
                )
                self._scan(free)
                for fd, _ in self._epoll.poll(_SCAN_EVERY if free else 0):
                    watched = self._by_fd.get(fd)
                    if watched is not None:
                        self._ended(watched.client, watched.generation, watched.pid, "exited")
        finally:
            for watched in list(self._watched.values()):
                self._unwatch(watched)

    def _scan(self, free: list[tuple[int, int, int, int, int]]) -> None:
        """Everyone whose life lock is free."""
        suspects = set()
        for client, generation, pid, start_time, program in free:
            process = Process.look(pid)
            if process is None or not process.is_same(start_time, program):
                self._ended(client, generation, pid, _how(process, start_time))
            elif process.program == 0 and self._has_execed((client, generation), pid):
                self._ended(client, generation, pid, _EXEC)
            elif (client, generation) in self._suspects:
                # Still there at the second look, so no kill is under way: only the thread ended.
                self._broker.reap_spare(client, generation)
                _log.info("client %d (pid %d): the thread that attached has ended", client, pid)
            else:
                suspects.add((client, generation))
        self._suspects = suspects

    def _has_execed(self, key: tuple[int, int], pid: int) -> bool:
        """A free life lock whose thread still runs. (A thread that execs becomes the first one, so
        of another thread nothing can be said.)"""
        watched = self._watched.get(key)
        return watched is not None and watched.thread == pid and is_running(pid, pid)

    def _look(self) -> None:
        """Watch new clients; those without their lock may also have become another program."""
        clients = self._directory.clients
        live = np.flatnonzero(clients["state"] == ClientState.LIVE)
        live = live[live != self._broker.client]
        present = {*zip(live.tolist(), clients["generation"][live].tolist(), strict=True)}
        for key in present - self._watched.keys():
            entry = clients[key[0]]
            pid, start = int(entry["pid"]), int(entry["start_time"])
            self._watch(*key, pid, start, int(entry["program"]))
        for index in live[clients["orphan"][live] != 0].tolist():
            watched = self._watched.get((index, int(clients[index]["generation"])))
            if watched is not None:
                self._check_spared(watched)
        for key in self._watched.keys() - present:
            self._unwatch(self._watched[key])

    def _check_spared(self, watched: _Watched) -> None:
        process = Process.look(watched.pid)
        if process is None or not process.is_same(watched.start_time, watched.program):
            how = _how(process, watched.start_time)
            self._ended(watched.client, watched.generation, watched.pid, how)

    def _watch(self, client: int, generation: int, pid: int, start_time: int, program: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended(client, generation, pid, "exited")
            return
        except OSError:  # out of descriptors
            pidfd = -1
        if pidfd >= self._below:
            os.close(pidfd)
            pidfd = -1
        process = Process.look(pid)
        if process is None or process.start_time not in (0, start_time):
            if pidfd >= 0:
                os.close(pidfd)
            self._ended(client, generation, pid, _how(process, start_time))
            return
        title = ", ".join(filter(None, (f"pid {pid}", program_name(pid))))
        life = bytes(self._directory.clients[client]["life"])
        thread = int.from_bytes(life[:4], "little") & _TID_MASK
        watched = _Watched(client, generation, pid, start_time, program, pidfd, title, thread)
        self._watched[client, generation] = watched
        if pidfd >= 0:
            self._by_fd[pidfd] = watched
            self._epoll.register(pidfd, select.EPOLLIN)

    def _unwatch(self, watched: _Watched) -> None:
        if watched.pidfd >= 0:
            self._epoll.unregister(watched.pidfd)
            os.close(watched.pidfd)
            del self._by_fd[watched.pidfd]
        del self._watched[watched.client, watched.generation]

    def _ended(self, client: int, generation: int, pid: int, how: str) -> None:
        key, now = (client, generation), time.monotonic()
        if now < self._retry.get(key, 0.0):
            return
        watched = self._watched.get(key)
        title = watched.title if watched is not None else f"pid {pid}"
        try:
            returned = self._broker.reap(client, generation)
        except Gone:  # it detached meanwhile
            if watched is not None:
                self._unwatch(watched)
            return
        except Busy:  # a stopped process holds a lock it could have held: the others first
            return
        except (ShmqError, OSError) as exc:
            self._retry[key] = now + _RETRY_AFTER
            if watched is not None:
                self._unwatch(watched)  # its pidfd would stay ready; `_look` takes it up again
            _log.error("client %d (%s) %s; cannot return what it held yet: %s",
                       client, title, how, exc)  # fmt: skip
            return
        self._retry.pop(key, None)
        if watched is not None:
            self._unwatch(watched)
        self.reaped += 1
        _log.info("client %d (%s) %s; %d messages returned", client, title, how, returned)
        self._freed()


def _how(process: Process | None, start_time: int) -> str:
    if process is None or process.ending or process.start_time != start_time:
        return "died"
    return _EXEC
