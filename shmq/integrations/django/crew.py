"""The processes of `manage.py shmq_worker`: a parent that forks workers, and forks another one for
each that dies."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Final

from django.db import connections

import shmq
from shmq.integrations.django import files
from shmq.integrations.django.backend import Backend
from shmq.integrations.django.files import CHANGED
from shmq.integrations.django.worker import GIVE_BACK, Duty, Worker
from shmq.printing import printable_lines

_log = logging.getLogger("shmq.integrations.django")

#: Seconds between two looks at the broker.
_LOOK: Final = 0.5
#: A worker that ends by itself within so many seconds of its start is followed by a pause.
_QUICK: Final = 1.0
_PAUSE: Final = 1.0
#: Signals that a worker must not get between the fork and its own handlers.
_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, GIVE_BACK, CHANGED})


@dataclass
class _Hand:
    """One worker, as the parent sees it."""

    pid: int
    fd: int
    began: float


class Crew:
    """Worker processes that are kept running until a signal, or until a file has changed."""

    def __init__(
        self,
        backend: Backend,
        duty: Duty,
        processes: int,
        reloads: files.Reloads | None = None,
    ) -> None:
        """reloads: how the crew is run again after a change of a file; None: no file is watched."""
        self._backend = backend
        self._duty = duty
        self._processes = processes
        self._hands: dict[int, _Hand] = {}
        self._reloads = reloads
        self._signals = 0
        self._said = 0
        self._ear, self._mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._not_before = 0.0
        self.reload = False
        """Whether it ended because a file has changed."""

    def run(self) -> None:
        """Run until all workers have ended. Raises ShmqError if no broker can be reached."""
        signal.signal(signal.SIGTERM, self._told)
        signal.signal(signal.SIGINT, self._told)
        if self._reloads:
            signal.signal(CHANGED, self._has_changed)
        signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._poll.register(self._ear, select.POLLIN)
        broker = self._backend.home.broker()
        _log.info(
            "%d processes for %s of instance %s, pid %d",
            self._processes,
            "all queues" if self._duty.queues is None else ", ".join(self._duty.queues),
            broker.instance,
            os.getpid(),
        )
        try:
            self._fill()
            while self._hands or self._wants_more():
                self._wait()
        finally:
            signal.set_wakeup_fd(-1)
            self._tell(signal.SIGKILL)
            self._poll.unregister(self._ear)
        _log.info("stopped")

    def _wants_more(self) -> bool:
        return not (self._signals or self.reload or self._duty.burst)

    def _wait(self) -> None:
        for fd, _ in self._poll.poll(_LOOK * 1000):
            if fd == self._ear:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            else:
                self._reap(self._hands.pop(fd))
        self._say()
        with contextlib.suppress(shmq.ShmqError):
            self._backend.home.broker()  # it starts the supervisor again if its owner is gone
        if not self._signals and self._reloads and os.getppid() != self._reloads.parent:
            self._told(signal.SIGTERM, None)
        if self._wants_more():
            self._fill()

    def _has_changed(self, number: int, frame: FrameType | None) -> None:
        if self._wants_more():
            self.reload = True
            self._tell(signal.SIGTERM)

    def _told(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._tell(signal.SIGTERM if self._signals == 1 else GIVE_BACK)

    def _say(self) -> None:
        """Log the signals, outside of their handler."""
        while self._said < min(self._signals, 2):
            self._said += 1
            again = "finishing" if self._said == 1 else "giving back"
            _log.info("told to stop: %s the tasks in hand", again)

    def _tell(self, number: int) -> None:
        for hand in list(self._hands.values()):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(hand.fd, number)

    def _fill(self) -> None:
        while len(self._hands) < self._processes and time.monotonic() >= self._not_before:
            if self._signals or self.reload:
                return
            self._fork()

    def _fork(self) -> None:
        connections.close_all()  # a connection must not be used by two processes
        me = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python warns of threads; that of the supervisor holds no lock a worker needs.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _work(self._backend, self._duty, me, self._reloads)
            fd = os.pidfd_open(pid)
            self._hands[fd] = _Hand(pid, fd, time.monotonic())
            self._poll.register(fd, select.POLLIN)
        finally:
            # A signal that waited is handled here, and finds the new worker among the hands.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _reap(self, hand: _Hand) -> None:
        _, status = os.waitpid(hand.pid, 0)
        self._poll.unregister(hand.fd)
        os.close(hand.fd)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            name = signal.Signals(-code).name
            _log.warning("worker %d was ended by %s; its task is back", hand.pid, name)
        elif code:
            _log.error("worker %d ended with status %d", hand.pid, code)
            if time.monotonic() - hand.began < _QUICK:
                self._not_before = time.monotonic() + _PAUSE


def _work(backend: Backend, duty: Duty, parent: int, reloads: files.Reloads | None) -> None:
    """The life of a forked worker, which ends in here."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        worker = Worker(backend, duty)
        worker.listen()
        signal.signal(CHANGED, signal.SIG_DFL)
        _follow(parent)
        if reloads:
            files.tell(parent, reloads.since)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        worker.run()
        status = 0
    except BaseException:
        sys.stderr.write(printable_lines(traceback.format_exc()))
    finally:
        with contextlib.suppress(BaseException):
            connections.close_all()
            backend.home.forget()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _follow(parent: int) -> None:
    """Have this process end after the task in hand when its parent has ended."""
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        select.select([fd], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="shmq-worker-parent", daemon=True).start()
