"""Keeps processes beside the supervisor running: starts, restarts and stops them.

This module does not know what the processes do. The stdin of each one is a socket. The supervisor
sends a JSON line there when the process is to begin, with the descriptors that the line names in
`fds`, and another line whenever something changes. The end of stdin tells the process that the
supervisor is gone. A process can import its modules before the first line comes, so `launch` may
be called early.

The processes are executed, and never forked to continue in Python: a fork copies every lock that
another thread of the supervisor holds, and nothing in the child would ever release it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shmq.supervisor.loops import Bell

_TICK = 0.25  # seconds between two looks for news
_FIRST_PAUSE = 0.1  # seconds before a process that ended is restarted; doubles each time
_LAST_PAUSE = 5.0  # ... up to this
_CALM = 10.0  # seconds of life after which the first pause applies again
_PATIENCE = 8.0  # seconds from SIGTERM to SIGKILL

_log = logging.getLogger(__name__)


@dataclass
class Launched:
    """A process that waits for its first line."""

    process: subprocess.Popen[bytes]
    stdin: socket.socket

    def dismiss(self) -> None:
        """End it, because it is not needed."""
        self.stdin.close()
        self.process.kill()
        self.process.wait()


def launch(argv: Sequence[str]) -> Launched:
    """Start a process in a session of its own, so that Ctrl-C reaches only the supervisor, which
    then stops the process. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(argv, stdin=theirs.fileno(), start_new_session=True)
        except BaseException:
            ours.close()
            raise
    return Launched(process, ours)


@dataclass
class _Worker:
    """One process, running or to be restarted."""

    document: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    stdin: socket.socket | None = None
    pidfd: int = -1
    began: float = 0.0
    pause: float = _FIRST_PAUSE
    start_at: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)


class Workers:
    """The loop that keeps the processes running."""

    def __init__(
        self,
        argv: Sequence[str],
        documents: Sequence[dict[str, Any]],
        news: Callable[[], dict[str, Any]],
        launched: Sequence[Launched] = (),
    ) -> None:
        """Run one process for each of `documents`, all with the command line `argv`.

        documents: the first line for each; `fds` are descriptors of this process. launched:
        processes that were started early and are used first. news: returns the entries that are
        sent in a further line when they change.
        """
        self._argv = list(argv)
        self._workers = [_Worker(document) for document in documents]
        self._launched = list(launched)
        self._news = news

    def run(self, bell: Bell) -> None:
        """Run until the bell is stopped. However the loop ends, it leaves no process."""
        try:
            while not bell.check():
                now = time.monotonic()
                for worker in self._workers:
                    if worker.process is None and now >= worker.start_at:
                        self._start(worker)
                    self._tell(worker)
                self._wait()
        finally:
            self._stop()

    def _start(self, worker: _Worker) -> None:
        worker.began = time.monotonic()
        worker.told = self._news()
        document = {**worker.document, **worker.told}
        try:
            launched = self._launched.pop() if self._launched else launch(self._argv)
            worker.process, worker.stdin = launched.process, launched.stdin
            worker.pidfd = os.pidfd_open(worker.process.pid)
        except OSError as exc:
            _log.error("cannot start %s: %s", " ".join(self._argv), exc)
            worker.start_at = worker.began + _LAST_PAUSE
            return
        self._say(worker, document, document["fds"])

    def _tell(self, worker: _Worker) -> None:
        news = self._news()
        if worker.process is not None and worker.told != news:
            worker.told = news
            self._say(worker, news)

    def _say(self, worker: _Worker, document: dict[str, Any], fds: Sequence[int] = ()) -> None:
        assert worker.stdin is not None
        line = json.dumps(document).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended
            sent = socket.send_fds(worker.stdin, [line], fds) if fds else 0
            worker.stdin.sendall(line[sent:])

    def _wait(self) -> None:
        living = {worker.pidfd: worker for worker in self._workers if worker.process is not None}
        poll = select.poll()  # select.select cannot watch a descriptor above 1023
        for fd in living:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(_TICK * 1000):
            self._ended(living[fd])

    def _ended(self, worker: _Worker) -> None:
        status = self._reap(worker)
        now = time.monotonic()
        if now - worker.began > _CALM:
            worker.pause = _FIRST_PAUSE
        _log.error(
            "%s ended with status %d; starting another in %.1f s",
            self._argv[-1],
            status,
            worker.pause,
        )
        worker.start_at = now + worker.pause
        worker.pause = min(2 * worker.pause, _LAST_PAUSE)

    def _reap(self, worker: _Worker) -> int:
        process, worker.process = worker.process, None
        assert process is not None
        assert worker.stdin is not None
        status = process.wait()
        os.close(worker.pidfd)
        worker.stdin.close()
        return status

    def _stop(self) -> None:
        while self._launched:
            self._launched.pop().dismiss()
        living = [worker for worker in self._workers if worker.process is not None]
        for worker in living:
            assert worker.process is not None
            worker.process.terminate()
        deadline = time.monotonic() + _PATIENCE
        for worker in living:
            assert worker.process is not None
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                worker.process.kill()
            self._reap(worker)
