"""Returns the messages that dead clients held, within milliseconds of their death.

Each client holds a robust `life` lock, and the core's `reap_scan` tries all of them. A free lock
shows only that the thread which attached has ended, so `/proc` decides what else ended:

* The process ended (it is gone, has another start time, is a zombie or is exiting), or its program
  did (an exec): everything it held is returned, and its client entry is freed last. Another user's
  program cannot be read; but if its first thread attached and still runs, only an exec can have
  freed the lock.
* Only that thread ended: the entry stays, and its pid is watched from now on.

A client that died between its permit and its entry has no entry to be reaped by. So the reaper also
compares the number of permits with the table.

The reaper also watches a pidfd per client, as long as descriptors last. The pidfds alone would be
too slow: one fires only when the process's address space is gone, about 160 ms per GiB.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shmq._native import Broker
from shmq.deaths import How
from shmq.errors import Busy, Gone, ShmqError
from shmq.layout import ClientState, lock_holder
from shmq.procfs import Process, is_running, program_name
from shmq.shm import Permits
from shmq.supervisor import rlimits
from shmq.supervisor.death_log import DeathLog
from shmq.supervisor.loops import Bell
from shmq.supervisor.registry import Registry

_SCAN_EVERY = 0.010  # seconds
_LOOK_EVERY = 0.250  # seconds between two looks at the client table, for new and spared clients
_EXEC = "became another program (exec)"
_RETRY_AFTER = 0.5  # seconds until a client whose reaping failed is tried again

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """A client entry and its process."""

    client: int
    generation: int
    pid: int
    start_time: int
    program: int
    pidfd: int  # -1: no descriptor was left; then its lock and /proc show its death
    title: str  # for the log, because /proc cannot be read after the death
    thread: int  # the thread that holds its life lock, 0 if none did
    program_name: str


class Reaper:
    """The loop that reaps clients, and keeps the number of their permits right."""

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        deaths: DeathLog,
        permits: Permits,
        freed: Callable[[], None],
    ) -> None:
        """freed: called after each client entry that becomes free."""
        self._broker = broker
        self._deaths = deaths
        self._directory = registry.directory
        self._permits = permits
        self._freed = freed
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._by_fd: dict[int, _Watched] = {}
        self._below = rlimits.below()
        self._epoll = select.epoll()
        self._roused = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._roused, select.EPOLLIN | select.EPOLLET)
        self._suspects: set[tuple[int, int]] = set()  # their lock is free, their process lives
        self._retry: dict[tuple[int, int], float] = {}
        self.reaped = 0

    def run(self, bell: Bell) -> None:
        """Reap until the bell is stopped. The loop sleeps in the core, which tries the locks."""
        next_look = 0.0
        bell.call_too(lambda: os.eventfd_write(self._roused, 1))
        try:
            while not bell.check():
                now = time.monotonic()
                if now >= next_look:
                    self._look()
                    mended = self._permits.mend(lambda: self._directory.free_clients)
                    next_look = now + (_LOOK_EVERY if mended else _SCAN_EVERY)
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
        """Decide about the clients whose life lock is free."""
        suspects = set()
        for client, generation, pid, start_time, program in free:
            process = Process.look(pid)
            if process is None or not process.is_same(start_time, program):
                self._ended(client, generation, pid, _how(process, start_time))
            elif process.program == 0 and self._has_execed((client, generation), pid):
                self._ended(client, generation, pid, _EXEC)
            elif (client, generation) in self._suspects:
                # It lives at the second look, so no kill is under way: only the thread ended.
                self._broker.reap_spare(client, generation)
                _log.info("client %d (pid %d): the thread that attached has ended", client, pid)
            else:
                suspects.add((client, generation))
        self._suspects = suspects

    def _has_execed(self, key: tuple[int, int], pid: int) -> bool:
        """True if a client's life lock is free although its thread still runs: it called exec.
        (A thread that calls exec becomes the first thread, so this tells nothing of other
        threads.)"""
        watched = self._watched.get(key)
        return watched is not None and watched.thread == pid and is_running(pid, pid)

    def _look(self) -> None:
        """Watch new clients. A client that was spared may also have become another program."""
        clients = self._directory.clients
        # A client may leave, and another one take its entry, between any two of these reads. The
        # fields are of this generation if it is read before LIVE, and again after them.
        generations = clients["generation"].copy()
        live = np.flatnonzero(clients["state"] == ClientState.LIVE)
        live = live[live != self._broker.client]
        present = {*zip(live.tolist(), generations[live].tolist(), strict=True)}
        for key in present - self._watched.keys():
            entry = clients[key[0]]
            pid, start = int(entry["pid"]), int(entry["start_time"])
            program = int(entry["program"])
            if int(entry["generation"]) == key[1]:
                self._watch(*key, pid, start, program)
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
        name = program_name(pid)
        title = ", ".join(filter(None, (f"pid {pid}", name)))
        thread = lock_holder(self._directory.clients[client]["life"])
        watched = _Watched(client, generation, pid, start_time, program, pidfd, title, thread, name)
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
        self._deaths.notice(client, generation, How.EXEC if how == _EXEC else How.DIED)
        try:
            returned = self._broker.reap(client, generation)
        except Gone:  # it detached meanwhile
            self._deaths.forget(client, generation)
            if watched is not None:
                self._unwatch(watched)
            return
        except Busy:  # a stopped process holds a lock that this client may have held: later
            return
        except (ShmqError, OSError) as exc:
            self._retry[key] = now + _RETRY_AFTER
            if watched is not None:
                self._unwatch(watched)  # its pidfd would stay ready; `_look` watches it again
            _log.error(
                "client %d (%s) %s; cannot return what it held yet: %s", client, title, how, exc
            )
            return
        self._retry.pop(key, None)
        if watched is not None:
            self._unwatch(watched)
        self.reaped += 1
        _log.info("client %d (%s) %s; %d messages returned", client, title, how, returned)
        program = watched.program_name if watched is not None else ""
        self._deaths.record(client, generation, program, returned)
        self._permits.give()
        self._freed()


def _how(process: Process | None, start_time: int) -> str:
    if process is None or process.ending or process.start_time != start_time:
        return "died"
    return _EXEC
