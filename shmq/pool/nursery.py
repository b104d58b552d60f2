"""The process that forks the workers of a pool, with the start method `fork`.

A fork copies every lock as it is, and a lock that another thread holds at that moment stays locked
in the child for ever. The standard library forks its workers in the first `submit`, in the thread
of the caller. So the nursery is forked there, and does nothing but fork: whenever a worker is
wanted, it starts from the same state, and no thread is about to hold a lock.

The crew and the nursery talk by a socket, in messages of a word and two numbers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing import process as mp_process
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Final

#: Seconds to wait for the status of an ended process that another thread may be about to learn.
_STATUS: Final = 0.2
#: The same for the fork server, which tells it when it is scheduled.
_FROM_SERVER: Final = 2.0
_BYTES: Final = 100  # more than a message has

#: Runs a worker with this number, in a new process.
Run = Callable[[int], None]


class Nursery:
    """The crew's end. One thread at a time uses it."""

    def __init__(self, context: BaseContext, run: Run) -> None:
        """Fork it, in the calling thread. Raises OSError if the system refuses."""
        start: Any = context
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended: dict[int, int] = {}  # statuses by process id
        self._process: BaseProcess = start.Process(
            target=_main, args=(theirs, self._socket, os.getpid(), start, run), name="shmq-nursery"
        )
        try:
            self._process.start()
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        assert self._process.pid is not None
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        # A child whose status nobody reads goes at once if the program ignores SIGCHLD.
        self._fd: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._fd = os.pidfd_open(self._process.pid)
            self._poll.register(self._fd, select.POLLIN)

    def fork(self, number: int) -> tuple[int, int]:
        """Have a worker forked. Returns its process id and a descriptor of it. Raises OSError."""
        self._socket.send(b"%d" % number)
        while True:
            word, left, _, fds = self._read()
            if word == b"began":
                return left, fds[0]
            if word == b"refused":
                raise OSError(left, os.strerror(left))

    def status(self, pid: int) -> int | None:
        """How a worker has ended, which it has; None if the nursery died before it knew."""
        with contextlib.suppress(OSError):
            while pid not in self._ended:
                self._read()
        return self._ended.pop(pid, None)

    def lives(self) -> bool:
        """Whether it can fork."""
        if self._fd is None:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(0)

    def end(self) -> None:
        """End it. It keeps nothing."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            os.close(self._fd)
            self._fd = None
        reap(self._process)
        self._socket.close()

    def _read(self) -> tuple[bytes, int, int, list[int]]:
        """The next message, with the descriptors in it. Raises OSError if none can come."""
        ready = {fd for fd, _ in self._poll.poll()}
        data, fds = b"", list[int]()
        if self._socket.fileno() in ready:
            data, fds, _, _ = socket.recv_fds(self._socket, _BYTES, 1)
        if not data:
            raise ConnectionError("the process that forks the workers of a pool has ended")
        word, left, right = data.split()
        if word == b"ended":
            self._ended[int(left)] = int(right)
        return word, int(left), int(right), fds


def reap(process: BaseProcess) -> int | None:
    """The exit status of a child that has ended, or is about to; None if nobody can know it: the
    program ignores SIGCHLD, or has read the status itself, or its fork server has SIGCHLD blocked.
    """
    popen: Any = process._popen  # type: ignore[attr-defined]
    served = popen.method == "forkserver"
    limit = _FROM_SERVER if served else _STATUS
    end = time.monotonic() + limit
    process.join(limit)
    while (code := process.exitcode) is None:
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN or time.monotonic() > end:
            children: set[BaseProcess] = mp_process._children  # type: ignore[attr-defined]
            children.discard(process)  # `multiprocessing` would ask for it for ever
            return None
        time.sleep(0.001)
    process.close()
    return code


# ---- in the nursery ----


def _main(crew: socket.socket, theirs: socket.socket, parent: int, context: Any, run: Run) -> None:
    theirs.close()
    nurse = _Nurse(crew, context, run)
    with contextlib.suppress(ConnectionError):  # the crew's process has ended
        nurse.serve(parent)
    os._exit(0)


class _Nurse:
    def __init__(self, crew: socket.socket, context: Any, run: Run) -> None:
        self._crew = crew
        self._context = context
        self._run = run
        self._children: dict[int, BaseProcess] = {}
        self._poll = select.poll()
        self._found = multiprocessing.parent_process()
        self._handler = signal.getsignal(signal.SIGCHLD)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C, which the crew's process handles
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def serve(self, parent: int) -> None:
        """Fork, and tell how they ended, until the crew's process ends."""
        try:
            lives = os.pidfd_open(parent)
        except ProcessLookupError:
            return
        self._poll.register(lives, select.POLLIN)
        self._poll.register(self._crew, select.POLLIN)
        while os.getppid() == parent:
            for fd in {fd for fd, _ in self._poll.poll()}:
                if fd == lives:
                    return
                if fd != self._crew.fileno():
                    self._see_off(fd)
                elif number := self._crew.recv(_BYTES):
                    self._fork(int(number))
                else:
                    return

    def _fork(self, number: int) -> None:
        child = self._context.Process(
            target=self._worker, args=(number,), name=f"shmq-worker-{number}"
        )
        try:
            child.start()
            fd = os.pidfd_open(child.pid)
        except OSError as exc:
            self._crew.send(b"refused %d 0" % (exc.errno or 0))
            return
        self._children[fd] = child
        self._poll.register(fd, select.POLLIN)
        socket.send_fds(self._crew, [b"began %d 0" % child.pid], [fd])

    def _see_off(self, fd: int) -> None:
        self._poll.unregister(fd)
        os.close(fd)
        child = self._children.pop(fd)
        pid = child.pid or 0
        self._crew.send(b"ended %d %d" % (pid, reap(child) or 0))

    def _worker(self, number: int) -> None:
        """Be a worker, whose parent is the crew's process for the program."""
        self._crew.close()
        for fd in self._children:
            os.close(fd)
        mp_process._parent_process = self._found  # type: ignore[attr-defined]
        if self._handler is not None:
            signal.signal(signal.SIGCHLD, self._handler)
        self._run(number)
