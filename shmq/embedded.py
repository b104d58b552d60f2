"""The supervisor process of an embedded broker, and its data path."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from shmq import homes, interpreter, shm
from shmq.attachment import pauses
from shmq.errors import ShmqError
from shmq.keywords import Keywords
from shmq.options import Options
from shmq.procfs import Process
from shmq.shm import SHM_DIRECTORY

_log = logging.getLogger("shmq.broker")

#: How long a supervisor may take from its start to its first answer, adoption included.
_START_SECONDS: Final = 60.0

#: Options of embedded brokers: nobody reads the output of the supervisor, and the gateway runs only
#: if an address is given.
QUIET: Final[Keywords] = {
    "log_level": "warn",
    "audit_log": "",
    "log_prefix": "[shmq] ",
    "tcp_address": "",
    "http_address": "",
    "https_address": "",
}

_BUS: Final = " (SIGBUS: somebody who may write a segment of it has cut that short)"


class EmbeddedSupervisor:
    """The supervisor process of an embedded broker: started, watched, restarted, stopped.

    Only the process that created the object does this; in a forked child every method does
    nothing.
    """

    def __init__(
        self, options: Options, temporary: bool, memory: bool = False, owned: bool = False
    ) -> None:
        """temporary: the data path goes at the end if no message is left in it. memory: it goes
        with all that is in it. owned: the instance ends with this process, even if others are
        attached, and the supervisor makes and removes the data path."""
        self.options = options
        self._temporary = temporary
        self._memory = memory or owned
        self._owned = owned
        self._owner = os.getpid()
        self._stopping = threading.Event()
        self._abandoned = False
        self._lock = threading.Lock()  # protects _process
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] = tempfile.TemporaryFile(buffering=0)

    def start(self) -> None:
        """Start it and wait until it answers. Raises ShmqError, with the last lines of its log, if
        it ends or does not answer within 60 s."""
        with self._lock:
            try:
                process = self._process = self._spawn()
            except BaseException as exc:
                self._said.close()
                if not isinstance(exc, OSError):
                    raise
                raise ShmqError(
                    f"start the supervisor of instance {self.options.instance!r} by "
                    f"{exc.filename or sys.executable}: {exc.strerror}; name a Python that has "
                    "shmq by multiprocessing.set_executable(PATH)"
                ) from exc
        if not self._wait_ready(process):
            what = (
                f"was not ready after {_START_SECONDS:g} s"
                if process.returncode is None
                else f"ended with status {process.returncode} before it was ready"
            )
            words = self._last_words()
            self._end(process)
            self._said.close()
            raise ShmqError(f"the supervisor of instance {self.options.instance!r} {what}{words}")

    @property
    def is_watched(self) -> bool:
        """Whether another supervisor is started when this one ends."""
        return not self._stopping.is_set() and Process.look(self._owner) is not None

    def watch(self) -> None:
        """Start the thread that restarts the supervisor whenever it ends."""
        threading.Thread(target=self._watch, name="shmq-supervisor", daemon=True).start()

    def stop(self) -> None:
        """Send SIGTERM, wait for its end, and remove a temporary data path if no message is left
        there. A process that has dropped its rights leaves that to the supervisor, which ends in
        order when its parent does."""
        if os.getpid() != self._owner or self._stopping.is_set():
            return
        self._stopping.set()
        with self._lock:
            process = self._process
        assert process is not None
        if _is_beyond(process):
            self._said.close()
            return
        self._wait_ready(process)  # before it has a handler, a signal would end it unflushed
        self._end(process)
        left = shm.list_objects(self.options.instance)
        if left and self.options.on_stop == "flush":  # it died before its end: the next can end it
            process = self._spawn()
            self._wait_ready(process)
            self._end(process)
            if shm.list_objects(self.options.instance):
                _log.error(
                    "messages of instance %r are left in shared memory: start `shmq serve` with "
                    "this instance and data path to get them%s",
                    self.options.instance,
                    self._last_words(),
                )
        self._clean_up()

    def abandon(self) -> None:
        """Send SIGTERM without waiting: the Broker was dropped and not closed. `_watch` cleans
        up."""
        if os.getpid() == self._owner and not self._stopping.is_set():
            self._abandoned = True
            self._stopping.set()
            with self._lock:
                if self._process is not None and not _is_beyond(self._process):
                    self._process.send_signal(self._last_signal)

    @property
    def _last_signal(self) -> signal.Signals:
        """The signal for the end. At SIGINT a supervisor of a broker in memory drops all."""
        return signal.SIGINT if self._memory and not self._owned else signal.SIGTERM

    def _clean_up(self) -> None:
        if self._memory:
            shutil.rmtree(self.options.data_path, ignore_errors=True)
        elif self._temporary:
            homes.remove(Path(self.options.data_path))
        self._said.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        words = ["serve", *self.options.to_argv(), f"--parent-pid={self._owner}"]
        if self._owned:
            words.append("--owned")
        elif self._memory:
            words.append("--dropping")
        command = interpreter.run_main("shmq.__main__", words)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,  # Ctrl-C goes to the parent, which then stops the supervisor
        )

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(self._last_signal)
        process.wait()

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until it answers. Returns False if it ended, or after 60 s."""
        deadline = time.monotonic() + _START_SECONDS
        for pause in pauses():
            if self._answers(process.pid):
                return True
            if process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(pause)
        raise AssertionError  # pauses never ends

    def _answers(self, pid: int) -> bool:
        """Returns True if the directory names it and every object that a client needs exists."""
        from shmq import sources  # numpy comes with it, while the supervisor starts

        with contextlib.suppress(ShmqError):  # the objects may be another user's
            directory = sources.open_readonly(self.options.instance).directory
            shm.Permits(self.options.instance).close()
            return directory.read("supervisor_pid") == pid and sources.supervisor_alive(directory)
        return False

    def _watch(self) -> None:
        pause = 0.0
        while True:
            process = self._process
            assert process is not None
            began = time.monotonic()
            status = process.wait()
            if self._stopping.wait(pause):
                if self._abandoned:
                    self._clean_up()
                return
            _log.warning(
                "the supervisor of instance %r (pid %d) ended with status %d%s; starting another%s",
                self.options.instance,
                process.pid,
                status,
                _BUS if status == -signal.SIGBUS else "",
                self._last_words(),
            )
            # The first restart is immediate. If supervisors end within seconds, wait longer.
            pause = min(pause * 2 or 0.1, 5.0) if time.monotonic() - began < 5 else 0.0
            with self._lock:
                if self._stopping.is_set():
                    return
                try:
                    self._process = self._spawn()
                except OSError as exc:
                    _log.error("cannot start a supervisor: %s", exc)
                    pause = 5.0

    def _last_words(self) -> str:
        """The last lines of its log, as the end of a sentence."""
        fd = self._said.fileno()
        text = os.pread(fd, 4096, max(os.fstat(fd).st_size - 4096, 0))
        last = text.decode(errors="replace").strip().splitlines()[-8:]
        return "".join(["", *(f"\n    {line}" for line in last)])


def _is_beyond(process: subprocess.Popen[bytes]) -> bool:
    """Whether it is another user's than this process, which has dropped its rights since."""
    try:
        process.send_signal(0)
    except PermissionError:
        return True
    return False


@contextlib.contextmanager
def data_path_of(instance: str, data_path: str | os.PathLike[str] | None) -> Iterator[Path]:
    """The directory where an embedded broker keeps its files. If the block raises, a directory
    that was created for it is removed."""
    if data_path is None:
        with homes.opened(instance) as path:
            yield path
    else:
        path = Path(data_path).absolute()
        with homes.made(path):
            yield path


def options_of(instance: str, data_path: Path, disk: bool, given: Keywords) -> Options:
    """The options of an embedded broker. In one without a disk what is full blocks, unless they
    say otherwise. Raises as `Options.from_keywords`."""
    chosen = Options.from_keywords(instance=instance, data_path=str(data_path), **QUIET | given)
    if disk:
        return chosen
    always = ("*: overflow=block",)
    return chosen.replace(topics=always + chosen.topics, channels=always + chosen.channels)


@contextlib.contextmanager
def memory_path(_instance: str, data_path: object) -> Iterator[Path]:
    """A data path in memory, which goes if the block raises. Raises ValueError if the caller named
    a data path."""
    if data_path is not None:
        raise ValueError(f"a broker with disk=False has no data path; leave {data_path!r} out")
    _sweep_memory()
    path = Path(tempfile.mkdtemp(prefix=f"{homes.MEMORY}{os.getpid()}-", dir=SHM_DIRECTORY))
    try:
        yield path
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def owned_path() -> Path:
    """A data path in memory for a supervisor with `--owned`, which makes and removes it."""
    _sweep_memory()
    return Path(SHM_DIRECTORY) / f"{homes.MEMORY}{os.getpid()}-{secrets.token_hex(4)}"


def _sweep_memory() -> None:
    """Remove the data paths in memory whose processes were killed."""
    for left in homes.memory_left():
        homes.remove_memory(left)


def unique_instance() -> str:
    """A name that no other broker of this host has."""
    return f"embedded-{os.getpid()}-{secrets.token_hex(4)}"
