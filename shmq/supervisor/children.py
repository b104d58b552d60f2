"""Processes beside the supervisor, kept going: started, started again when they end, stopped.

Nothing here knows what they are. The stdin of each is a socket. It gets one JSON line there when it
is to begin, with the descriptors that the line names in `fds`, and further ones when something
changes; the end of its stdin tells it that the supervisor is gone. Until the first line comes a
process can load what it needs, so `launch` is for an early moment.

They are executed and never forked to go on in Python: a fork takes along every lock that another
thread of the supervisor holds, and nobody would ever give it back.
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

from shmq.supervisor.arbiter import Bell

_TICK = 0.25  # seconds between two looks at what there is to tell
_FIRST_PAUSE = 0.1  # before one that ended is started again; doubles up to
_LAST_PAUSE = 5.0
_CALM = 10.0  # seconds after which the pause is short again
_PATIENCE = 8.0  # seconds from SIGTERM to SIGKILL

_log = logging.getLogger(__name__)


@dataclass
class Launched:
    """A process that waits for its first line."""

    process: subprocess.Popen[bytes]
    stdin: socket.socket

    def dismiss(self) -> None:
        """It is not needed after all."""
        self.stdin.close()
        self.process.kill()
        self.process.wait()


def launch(argv: Sequence[str]) -> Launched:
    """Start a process, in a session of its own: Ctrl-C is for the supervisor, which then stops it.
    OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(argv, stdin=theirs.fileno(), start_new_session=True)
        except BaseException:
            ours.close()
            raise
    return Launched(process, ours)


@dataclass
class _Child:
    """One of them, living or to be started again."""

    document: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    stdin: socket.socket | None = None
    pidfd: int = -1
    began: float = 0.0
    pause: float = _FIRST_PAUSE
    start_at: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)


class Children:
    """One loop of the arbiter."""

    def __init__(
        self,
        argv: Sequence[str],
        documents: Sequence[dict[str, Any]],
        news: Callable[[], dict[str, Any]],
        launched: Sequence[Launched] = (),
    ) -> None:
        """A process for each of `documents` (their `fds`: descriptors of this process), all with
        `argv`; those of `launched` first. news: what is told when it changes."""
        self._argv = list(argv)
        self._children = [_Child(document) for document in documents]
        self._launched = list(launched)
        self._news = news

    def run(self, bell: Bell) -> None:
        """The loop. However it ends, no process is left."""
        try:
            while not bell.stopped:
                now = time.monotonic()
                for child in self._children:
                    if child.process is None and now >= child.start_at:
                        self._start(child)
                    self._tell(child)
                self._wait()
        finally:
            self._stop()

    def _start(self, child: _Child) -> None:
        child.began = time.monotonic()
        child.told = self._news()
        document = {**child.document, **child.told}
        try:
            launched = self._launched.pop() if self._launched else launch(self._argv)
            child.process, child.stdin = launched.process, launched.stdin
            child.pidfd = os.pidfd_open(child.process.pid)
        except OSError as exc:
            _log.error("cannot start %s: %s", " ".join(self._argv), exc)
            child.start_at = child.began + _LAST_PAUSE
            return
        self._say(child, document, document["fds"])

    def _tell(self, child: _Child) -> None:
        news = self._news()
        if child.process is not None and child.told != news:
            child.told = news
            self._say(child, news)

    def _say(self, child: _Child, document: dict[str, Any], fds: Sequence[int] = ()) -> None:
        assert child.stdin is not None
        line = json.dumps(document).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended
            sent = socket.send_fds(child.stdin, [line], fds) if fds else 0
            child.stdin.sendall(line[sent:])

    def _wait(self) -> None:
        living = {child.pidfd: child for child in self._children if child.process is not None}
        poll = select.poll()  # select cannot look at a descriptor above 1023
        for fd in living:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(_TICK * 1000):
            self._ended(living[fd])

    def _ended(self, child: _Child) -> None:
        status = self._reap(child)
        now = time.monotonic()
        if now - child.began > _CALM:
            child.pause = _FIRST_PAUSE
        _log.error(
            "%s ended with status %d; starting another in %.1f s",
            self._argv[-1], status, child.pause,
        )  # fmt: skip
        child.start_at = now + child.pause
        child.pause = min(2 * child.pause, _LAST_PAUSE)

    def _reap(self, child: _Child) -> int:
        process, child.process = child.process, None
        assert process is not None
        assert child.stdin is not None
        status = process.wait()
        os.close(child.pidfd)
        child.stdin.close()
        return status

    def _stop(self) -> None:
        while self._launched:
            self._launched.pop().dismiss()
        living = [child for child in self._children if child.process is not None]
        for child in living:
            assert child.process is not None
            child.process.terminate()
        deadline = time.monotonic() + _PATIENCE
        for child in living:
            assert child.process is not None
            try:
                child.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                child.process.kill()
            self._reap(child)
