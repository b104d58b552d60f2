"""The supervisor process: what must go on when nobody is calling.

Start (make or adopt the instance), run (the loops of `creator`, `scan`, `spill`, `reaper` and
`ledger` under one arbiter, the heartbeat here), stop (flush everything to disk, remove the
instance; or keep it for the next supervisor).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from shmq import _native, layout, segments
from shmq._native import Broker, ShmqError
from shmq.layout import DirectoryView
from shmq.logs import shorten_log
from shmq.options import Options
from shmq.segments import Permits
from shmq.storage import metadata
from shmq.storage.dirlock import DirLock
from shmq.supervisor import flush, start
from shmq.supervisor.arbiter import Arbiter
from shmq.supervisor.children import Children
from shmq.supervisor.creator import Creator
from shmq.supervisor.ledger import Ledger
from shmq.supervisor.process import Process, is_alive
from shmq.supervisor.reaper import Reaper
from shmq.supervisor.roster import Roster
from shmq.supervisor.scan import Scanner
from shmq.supervisor.service import Service
from shmq.supervisor.spill import Spiller
from shmq.supervisor.systemd import Notifier
from shmq.supervisor.trouble import DiskTrouble

_REQUEST, _SPILLER, _LEFT, _CHANGED, _DEADLINE = 1, 2, 4, 8, 16  # bits of supervisor_wait
_BEAT_NS = 250_000_000  # longest sleep of the main loop
_BREATH = 0.001  # after the spiller was rung for: publishers ring again with every message
_STARTER_EVERY = 0.250  # seconds between two looks at the starter
_HANGING_UP = 5.0  # seconds after a SIGHUP in which its terminal may still be about to go

_log = logging.getLogger(__name__)


class Companions(Protocol):
    """Processes beside the supervisor: what they need is opened before the instance begins, so
    that nothing has to be undone when it cannot be."""

    def opened(self) -> contextlib.AbstractContextManager[object]:
        """Around the supervisor's life. Raises OSError with a sentence."""

    def children(self, news: Callable[[], dict[str, Any]]) -> Children | None:
        """The processes; None: there are none to run. news: what to tell them when it changes."""

    def reload(self) -> None:
        """Take up what can change while the instance runs. Says in the log what cannot be."""


class Supervisor:
    """One instance's supervisor. `run` is for the process's main thread: it holds the client
    entry's life lock, and signals come there."""

    def __init__(
        self,
        options: Options,
        starter_pid: int | None = None,
        notifier: Notifier | None = None,
        companions: Companions | None = None,
    ) -> None:
        """starter_pid: stop when this process is dead and no client is attached. notifier: the
        service manager. companions: processes to keep beside this one."""
        self._options = options
        self._notifier = notifier or Notifier()
        self._companions = companions
        self._data_path = Path(options.data_path or ".")
        self._starter = None if starter_pid is None else _Starter(starter_pid)
        self._signal = 0
        self._hung_up = False  # a SIGHUP has come and was not looked at yet
        self._terminal = os.isatty(0) and _has_terminal()
        self._lost = ""  # why the instance must begin anew
        self._flushing = False

    def run(self) -> int:
        """Start, run until told to stop, stop. The exit status: 0, or 1 if messages could not be
        written and were left in shared memory.

        Raises ShmqError or OSError, with a sentence, if it cannot start.
        """
        with self._signals(), DirLock(self._data_path), self._open_companions():
            directory = start.enter(self._options)
            try:
                return self._live(directory)
            finally:
                directory.close()

    def drain(self) -> int:
        """Adopt what a supervisor of this release left, write it to disk, remove the instance; as
        `run`, but nobody is served. Nothing to do if there is no instance. Without a data path: to
        the one that it has its files in.

        Raises ShmqError or OSError, with a sentence: a supervisor lives, or another release made
        it.
        """
        if not self._options.data_path:
            found = layout.data_path_left(self._options.instance)
            self._options = dataclasses.replace(self._options, data_path=found)
            self._data_path = Path(found or ".")
        options = self._options
        with self._signals(), DirLock(self._data_path):
            if not segments.list_objects(options.instance):
                _log.info("instance %s: nothing is left in shared memory", options.instance)
                return 0
            directory = start.enter(options)
            try:
                self._begin_or_undo(directory)
                self._flushing = True
                return self._flush()
            finally:
                directory.close()

    @property
    def health(self) -> str:
        """nsqd's: `OK`, or `NOK - ` and what the disk said."""
        return self._spiller.health

    # -- companions

    def _open_companions(self) -> contextlib.AbstractContextManager[object]:
        return self._companions.opened() if self._companions else contextlib.nullcontext()

    def _news(self) -> dict[str, Any]:
        return {"health": self.health}

    # -- life

    def _live(self, directory: start.Directory) -> int:
        options = self._options
        self._begin_or_undo(directory)
        arbiter = Arbiter()
        self._creator_bell = arbiter.add("creator", self._creator.run)
        self._spiller_bell = arbiter.add("spiller", self._spiller.run)
        self._scanner_bell = arbiter.add(
            "scanner", Scanner(self._broker, self._roster, options, self._is_broken).run
        )
        arbiter.add("reaper", Reaper(self._broker, self._roster, self._client_reaped).run)
        self._ledger_bell = arbiter.add("ledger", self._ledger.run)
        service = Service(
            self._notifier, arbiter, self._broker, self._roster, options,
            lambda: self._spiller.health, self._has_lost, self._is_broken,
        )  # fmt: skip
        arbiter.add("service", service.run)
        if self._companions is not None:
            children = self._companions.children(self._news)
            if children is not None:
                arbiter.add("gateway", children.run)
        arbiter.start()
        _log.info("instance %s: running, pid %d", options.instance, os.getpid())
        service.ready()
        self._beat()
        keep = options.on_stop == "keep" and not self._lost
        with service.stopping("keeping" if keep else "flushing to disk"):
            self._stop(arbiter, keep)
            return self._keep() if keep else self._flush(service.owns_name)

    def _begin_or_undo(self, directory: start.Directory) -> None:
        try:
            self._begin(directory)
        except BaseException:
            if directory.fresh:  # nobody could attach yet
                segments.unlink_instance(self._options.instance)
            raise

    def _begin(self, directory: start.Directory) -> None:
        """Attach, take up or make everything, then let clients in."""
        options = self._options
        start.check_data_path(directory, options)
        reserve = metadata.load_reserve(self._data_path)

        def opener(serial: int) -> int:
            return start.open_queue(options, serial)

        self._broker = broker = Broker(directory.fd, opener, 1, options.instance)
        before = int(DirectoryView(broker.view()).limits["max_msg_size"])
        self._roster = Roster(broker, options, max(before, options.max_msg_size))
        trouble = DiskTrouble(broker)
        self._ledger = Ledger(broker, self._roster, self._data_path, reserve, trouble)
        self._creator = Creator(broker, self._roster, options, self._ledger.floor)
        self._spiller = Spiller(broker, self._roster, options, trouble)
        trouble.clear()  # of the last supervisor; from here on readers believe it
        broker.supervise(**options.limits())
        broker.set_data_path(str(self._data_path.absolute()))
        if directory.fresh:
            start.recreate(self._creator, self._data_path, self._notifier)
        else:
            start.adopt(broker, self._roster, self._creator, options, self._notifier)
        self._ledger.flush()
        mode, group = options.permissions()
        free = self._roster.directory.free_clients
        self._permits = Permits.create(options.instance, free, mode, group)

    def _beat(self) -> None:
        """The main loop: pass on what clients ring for, see signals and the starter's end."""
        look_at = hanging_up = 0.0
        while not self._signal and not self._lost:
            why = self._broker.supervisor_wait(_native.now() + _BEAT_NS)
            if why & (_REQUEST | _LEFT):
                self._creator_bell.ring()
            if why & _CHANGED:
                self._ledger_bell.ring()
            if why & _DEADLINE:
                self._scanner_bell.ring()
            if why & _SPILLER:
                self._spiller_bell.ring()
                time.sleep(_BREATH)
            now = time.monotonic()
            if self._hung_up:
                self._hung_up = False
                hanging_up = now + _HANGING_UP
                if self._has_its_terminal() and self._companions is not None:
                    self._companions.reload()
            if now < hanging_up and not self._has_its_terminal():
                _log.info("the terminal has gone")
                self._signal = signal.SIGHUP
            if self._starter is not None and now >= look_at:
                look_at = now + _STARTER_EVERY
                with contextlib.suppress(OSError):
                    shorten_log()  # what the starter gave us as stderr has no other bound
                alone = self._roster.other_clients(self._broker.client) == 0
                if alone and not self._starter.alive:
                    _log.info("the process that started this instance has ended; stopping")
                    return

    def _client_reaped(self) -> None:
        self._permits.give()
        self._creator_bell.ring()

    def _is_broken(self, index: int) -> None:
        self._creator.broken.append(index)
        self._creator_bell.ring()

    def _has_lost(self, sentence: str) -> None:
        self._lost = sentence

    # -- end

    def _stop(self, arbiter: Arbiter, keep: bool) -> None:
        if self._lost:
            _log.critical("%s", self._lost)
        elif self._signal:
            _log.info("received signal %s; stopping", signal.Signals(self._signal).name)
        self._flushing = True
        if not keep:
            self._broker.stopping()

        def patience(name: str, seconds: float) -> None:
            _log.warning("waiting for the %s since %d s (a stopped client may hold a lock)",
                         name, seconds)  # fmt: skip

        arbiter.stop(patience)

    def _keep(self) -> int:
        flush.keep(self._roster, self._ledger)
        self._broker.detach()
        _log.info("instance %s: kept for the next supervisor", self._options.instance)
        return 0

    def _flush(self, owns_name: Callable[[], bool] = lambda: True) -> int:
        """owns_name: whether the instance's name has not become another's."""
        options = self._options
        try:
            flush.flush(self._broker, self._roster, self._creator, self._spiller, self._ledger)
        except (OSError, ShmqError) as exc:
            _log.critical(
                "cannot write everything to disk: %s; the rest stays in shared memory: make room "
                "and start `shmq serve` again on the same data path", exc,
            )  # fmt: skip
            self._broker.detach()
            return 1
        self._permits.close()
        self._broker.detach()
        if owns_name():
            segments.unlink_instance(options.instance)
        _log.info("instance %s: bye", options.instance)
        return 1 if self._lost else 0

    # -- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask for the end. SIGHUP asks for a reload, but for the end if it came
        because the terminal has gone that this process was started from."""
        before = {number: signal.signal(number, self._caught)
                  for number in (signal.SIGTERM, signal.SIGINT)}  # fmt: skip
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._caught_hangup)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self._flushing:
            with contextlib.suppress(OSError):  # a terminal that has gone
                os.write(2, b"already stopping: everything is being written to disk\n")
        self._signal = self._signal or number

    def _caught_hangup(self, number: int, frame: FrameType | None) -> None:
        self._hung_up = True

    def _has_its_terminal(self) -> bool:
        """False: it was started from one, which has gone since."""
        return not self._terminal or _has_terminal()


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal, and that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class _Starter:
    """The process that started this one."""

    def __init__(self, pid: int) -> None:
        process = Process.look(pid)
        self._pid = pid
        self._start_time = None if process is None else process.start_time

    @property
    def alive(self) -> bool:
        """Whether it is still there, the same process."""
        return self._start_time is not None and is_alive(self._pid, self._start_time)
