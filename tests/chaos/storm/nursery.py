"""Forks children for a process that has threads, from one that has none.

A fork copies every lock as it is, and only the thread that forks: a lock which another thread held
(to write a line of the log, for one) stays taken in the child for ever. So a process that wants to
fork later what goes on in Python forks a nursery while it still has one thread; the nursery forks
when it is asked, and the kernel gives the grandchildren to the process that asked.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

NAME = b"nursery"
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_FIRST_SPARE = 512  # above every number that a child is to find its descriptors under
_MOST = 250  # descriptors in one message (SCM_MAX_FD is 253)

_libc = ctypes.CDLL(None)


class Nursery:
    """Made by a process with one thread, which must stay the parent of all that it bears."""

    def __init__(self, work: Callable[[], object]) -> None:
        """work: what each child does, in a session of its own; then it ends with status 1."""
        assert threading.active_count() == 1, "locks of other threads would be copied"
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # a process that loses its parent becomes ours, unless a nearer one is set so
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.pid = os.fork()
        if not self.pid:
            try:
                self._socket.close()
                _libc.prctl(_PR_SET_NAME, NAME)
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                _serve(theirs, work)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()

    def bear(self, fds: dict[int, int]) -> int:
        """A child of this process, whose pid it is. fds: its descriptors, {number there: here},
        beside stdout and stderr."""
        with self._lock:
            numbers = json.dumps(list(fds)).encode()
            socket.send_fds(self._socket, [numbers], list(fds.values()))
            answer = self._socket.recv(64)
        if not answer:
            raise OSError("the nursery has ended")
        return int(answer)


def _serve(asked: socket.socket, work: Callable[[], object]) -> None:
    while True:
        data, ancillary, _, _ = asked.recvmsg(65536, socket.CMSG_SPACE(4 * _MOST))
        if not data:
            return  # it has ended
        fds = array.array("i")
        for _, _, item in ancillary:
            fds.frombytes(item)
        told, tells = os.pipe()
        between = os.fork()
        if not between:
            try:
                pid = os.fork()
                if pid:
                    os.write(tells, b"%d" % pid)
                    os._exit(0)
                _become(dict(zip(json.loads(data), fds, strict=True)), work)
            finally:
                os._exit(1)
        os.close(tells)
        for fd in fds:
            os.close(fd)
        pid_of = os.read(told, 64)
        os.close(told)
        os.waitpid(between, 0)  # from now on the child is the asking process's
        asked.send(pid_of)


def _become(fds: dict[int, int], work: Callable[[], object]) -> NoReturn:
    try:
        os.setsid()
        _libc.prctl(_PR_SET_NAME, b"python")
        assert max(fds) < _FIRST_SPARE
        for offset, fd in enumerate(fds.values()):
            os.dup2(fd, _FIRST_SPARE + offset)
        for offset, number in enumerate(fds):
            os.dup2(_FIRST_SPARE + offset, number)
        low = 3
        for fd in (*sorted(number for number in fds if number > 2), os.sysconf("SC_OPEN_MAX")):
            os.closerange(low, fd)
            low = fd + 1
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class Born:
    """As much of a `subprocess.Popen` as a supervisor wants of its gateway."""

    def __init__(self, nursery: Nursery, stdin: int) -> None:
        self.pid = nursery.bear({0: stdin})
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its status; None while it lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Its status when it has ended. subprocess.TimeoutExpired."""
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                if not poll.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            finally:
                os.close(pidfd)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def terminate(self) -> None:
        """SIGTERM."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
