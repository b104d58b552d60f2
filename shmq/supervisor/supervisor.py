"""The supervisor process, from start to stop.

* start: create or adopt the instance
* run: the loops, each in its own thread; the main thread has the heartbeat and passes rings on
* stop: flush everything to disk and remove the instance, or keep it for the next supervisor
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
from typing import TYPE_CHECKING, Any, Protocol

from shmq import _native, claims, shm, sources
from shmq._native import Broker
from shmq.errors import ShmqError
from shmq.layout import Ring
from shmq.logs import shorten_log
from shmq.options import Options
from shmq.procfs import Process, is_alive
from shmq.settings import Patterns
from shmq.shm import Permits
from shmq.staging_place import forget_staged
from shmq.storage import key_file, metadata, own_files, remedies
from shmq.storage.dirlock import DirLock
from shmq.supervisor import shutdown, startup
from shmq.supervisor.adoption import adopt
from shmq.supervisor.book import SettingsBook, from_document
from shmq.supervisor.death_log import DeathLog
from shmq.supervisor.historian import Historian, open_chronicle
from shmq.supervisor.loops import Loops
from shmq.supervisor.metadata_writer import MetadataWriter
from shmq.supervisor.overflow.spiller import Spiller
from shmq.supervisor.reaper import Reaper
from shmq.supervisor.registry import Registry
from shmq.supervisor.requests import RequestServer
from shmq.supervisor.results import ResultsKeeper
from shmq.supervisor.scan import Scanner
from shmq.supervisor.systemd import Notifier
from shmq.supervisor.topics import TopicManager
from shmq.supervisor.trouble import DiskTrouble
from shmq.supervisor.watchdog import Watchdog
from shmq.views import DirectoryView

if TYPE_CHECKING:
    from shmq.supervisor.workers import Workers

_BEAT_NS = 250_000_000  # longest sleep of the main loop
_BREATH = 0.001  # seconds after a ring for the spiller: publishers ring with every message
_PARENT_EVERY = 0.250  # seconds between two looks at the process that started this one
_HANGING_UP = 5.0  # seconds after a SIGHUP in which its terminal may still be about to go

_log = logging.getLogger(__name__)


class Companions(Protocol):
    """Processes beside the supervisor. Their resources are opened before the instance starts, so a
    failure needs no rollback."""

    def opened(self) -> contextlib.AbstractContextManager[object]:
        """A context that opens their resources for the supervisor's life. Raises OSError with a
        sentence."""

    def workers(self, news: Callable[[], dict[str, Any]]) -> Workers | None:
        """The loop that keeps the processes running; None if there are none. news: returns what to
        tell the processes when it changes."""

    def reload(self) -> None:
        """Apply changed settings that can change while the instance runs, and log the others."""


class Supervisor:
    """One instance's supervisor. `run` must be called from the main thread, which holds the life
    lock of the client entry and receives the signals."""

    def __init__(
        self,
        options: Options,
        parent_pid: int | None = None,
        notifier: Notifier | None = None,
        companions: Companions | None = None,
        owned: bool = False,
        dropping: bool = False,
    ) -> None:
        """parent_pid: stop when this process is dead and no client is attached. notifier: for the
        service manager. companions: processes to run beside this one. owned: stop when the parent
        is dead even if clients are attached, drop what is left, and make and remove the data
        path. dropping: so if the parent is dead, or at SIGINT; a SIGTERM that somebody else sends
        leaves the messages to the supervisor that the parent starts next."""
        self._owned = owned
        self._dropping = dropping
        self._options = options
        self._notifier = notifier or Notifier()
        self._companions = companions
        self._data_path = Path(options.data_path or ".")
        self._parent = None if parent_pid is None else _Parent(parent_pid)
        self._signal = 0
        self._starting = False  # a signal ends the start where it is
        self._hung_up = False  # a SIGHUP has come and was not handled yet
        self._terminal = os.isatty(0) and _has_terminal()
        self._lost = ""  # why the instance must be flushed and recreated
        self._flushing = False

    def run(self) -> int:
        """Start, run until a signal asks for the end, stop. Returns the exit status: 0, or 1 if
        messages could not be written and were left in shared memory.

        Raises ShmqError or OSError, with a sentence, if it cannot start.
        """
        with self._signals(), self._locked_data_path(), self._open_companions():
            # what killed processes left may have filled /dev/shm
            forget_staged(self._options.instance, os.geteuid())
            directory = startup.enter(self._options)
            try:
                return self._live(directory)
            except _Stopped:
                return self._say_stopped()
            finally:
                directory.close()

    def _say_stopped(self) -> int:
        name = signal.Signals(self._signal).name
        _log.info("received signal %s while starting; the next start begins anew", name)
        return 0

    @contextlib.contextmanager
    def _locked_data_path(self) -> Iterator[None]:
        """Hold the lock of the data path. If the instance is owned, the directory is made for it,
        and goes at the end with all that is in it."""
        self._share_files()
        if self._owned:
            self._data_path.mkdir(mode=0o700, exist_ok=True)
        with DirLock(self._data_path):
            own_files.check_all(self._data_path)
            try:
                yield
            finally:
                if self._owned:
                    import shutil  # slow to import

                    shutil.rmtree(self._data_path, ignore_errors=True)

    def _share_files(self) -> None:
        if self._options.data_path_shared:
            own_files.share(self._data_path)

    def drain(self) -> int:
        """Adopt an instance that a supervisor of this release left, write it to disk and remove it,
        without serving clients. Returns the exit status as `run` does, 0 if there is no instance.
        Without a data path in the options, the instance's own is used.

        Raises ShmqError or OSError, with a sentence, if its supervisor lives or another release
        made it.
        """
        if not self._options.data_path:
            found = sources.data_path_left(self._options.instance)
            self._options = dataclasses.replace(self._options, data_path=found)
            self._data_path = Path(found or ".")
        options = self._options
        self._share_files()
        with self._signals(), DirLock(self._data_path):
            own_files.check_all(self._data_path)
            if not shm.list_objects(options.instance):
                _log.info("instance %s: nothing is left in shared memory", options.instance)
                return 0
            directory = startup.enter(options)
            try:
                self._begin_or_undo(directory)
                self._flushing = True
                return self._flush()
            except _Stopped:
                return self._say_stopped()
            finally:
                directory.close()

    @property
    def health(self) -> str:
        """nsqd's health text: `OK`, or `NOK - ` and the disk's last error."""
        return self._spiller.health

    # -- companions

    def _open_companions(self) -> contextlib.AbstractContextManager[object]:
        return self._companions.opened() if self._companions else contextlib.nullcontext()

    def _news(self) -> dict[str, Any]:
        return {"health": self.health}

    # -- life

    def _live(self, directory: startup.Directory) -> int:
        options = self._options
        self._begin_or_undo(directory)
        loops = Loops()
        self._request_bell = loops.add("request server", self._request_server.run)
        self._spiller_bell = loops.add("spiller", self._spiller.run)
        self._scanner_bell = loops.add(
            "scanner", Scanner(self._broker, self._registry, options, self._is_broken).run
        )
        deaths = self._deaths
        reaper = Reaper(
            self._broker, self._registry, deaths, self._permits, self._request_bell.ring
        )
        loops.add("reaper", reaper.run)
        if self._chronicle is not None:
            loops.add("historian", Historian(self._registry, self._chronicle).run)
        loops.add("results keeper", self._results.run)
        self._metadata_bell = loops.add("metadata writer", self._metadata_writer.run)
        watchdog = Watchdog(
            self._notifier,
            loops,
            self._broker,
            self._registry,
            options,
            os.fstat(directory.fd).st_ino,
            lambda: self._spiller.health,
            self._has_lost,
            self._is_broken,
        )
        loops.add("watchdog", watchdog.run)
        if self._companions is not None:
            workers = self._companions.workers(self._news)
            if workers is not None:
                loops.add("gateway", workers.run)
        loops.start()
        _log.info("instance %s: running, pid %d", options.instance, os.getpid())
        watchdog.ready()
        self._beat()
        keep = options.on_stop == "keep" and not self._lost
        doing = "keeping" if keep else "dropping all" if self._drops else "flushing to disk"
        with watchdog.stopping(doing):
            self._stop(loops, keep)
            return self._keep() if keep else self._flush(watchdog.owns_name)

    def _begin_or_undo(self, directory: startup.Directory) -> None:
        try:
            # what a predecessor left in memory must go to disk, unless memory keeps it
            self._starting = directory.fresh or self._options.on_stop == "keep"
            if self._signal and self._starting:
                raise _Stopped
            self._begin(directory)
        except BaseException:
            self._starting = False
            if directory.fresh:  # nobody could attach yet
                shm.unlink_instance(self._options.instance)
            raise

    def _begin(self, directory: startup.Directory) -> None:
        """Attach, adopt or create topics and queues, then admit clients."""
        options = self._options
        startup.check_data_path(directory, options)
        own = metadata.load_own(self._data_path, from_document)
        book = SettingsBook(Patterns(options.topics), Patterns(options.channels), own.settings)

        def opener(serial: int) -> int:
            return startup.open_queue(options, serial)

        began, dead = time.monotonic(), startup.dead_supervisor(directory)
        self._broker = broker = Broker(directory.fd, opener, 1, options.instance)
        before = int(DirectoryView(broker.view()).limits["max_msg_size"])
        self._registry = Registry(broker, options, max(before, options.max_msg_size))
        trouble = DiskTrouble(broker)
        self._metadata_writer = MetadataWriter(
            broker, self._registry, self._data_path, own.clock, trouble, book
        )
        self._manager = TopicManager(
            broker, self._registry, options, self._metadata_writer.floor, book
        )
        self._results = ResultsKeeper(broker, options, self._registry.directory)
        self._request_server = RequestServer(
            broker, self._registry, self._manager, self._results, self._data_path
        )
        self._spiller = Spiller(broker, self._registry, options, trouble)
        trouble.clear()  # the last supervisor's; after `supervise` readers believe the word
        broker.supervise(**options.limits())
        broker.set_data_path(startup.data_path_text(str(self._data_path)))
        if directory.fresh:
            startup.recreate(self._manager, self._data_path, self._notifier)
            self._results.recreate()
        else:
            key_file.keep(self._data_path, DirectoryView(broker.view()).seal_key)
            adopt(broker, self._registry, self._manager, options, self._notifier)
            self._results.adopt()
        self._metadata_writer.begin(fresh=directory.fresh)
        self._chronicle = open_chronicle(options)
        self._deaths = DeathLog(self._chronicle, self._registry)
        if dead is not None:
            self._deaths.record_adoption(*dead, began)
        mode, group = options.permissions()
        free = self._registry.directory.free_clients
        self._permits = Permits.create(options.instance, free, mode, group)
        self._starting = False  # what the files had is removed below, so now it is in memory
        self._results.started()

    def _beat(self) -> None:
        """The main loop: pass the clients' rings on to the loops, handle signals, and watch for the
        end of the process that started this one."""
        look_at = hanging_up = 0.0
        while not self._signal and not self._lost:
            why = self._broker.supervisor_wait(_native.now() + _BEAT_NS)
            if why & (Ring.REQUEST | Ring.LEFT):
                self._request_bell.ring()
            if why & Ring.CHANGED:
                self._metadata_bell.ring()
            if why & Ring.DEADLINE:
                self._scanner_bell.ring()
            if why & Ring.SPILLER:
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
            if self._parent is not None and now >= look_at:
                look_at = now + _PARENT_EVERY
                with contextlib.suppress(OSError):
                    shorten_log()  # the file that the parent passed as stderr has no other bound
                if not self._parent.alive and (
                    self._owned or self._registry.other_clients(self._broker.client) == 0
                ):
                    _log.info("the process that started this instance has ended; stopping")
                    return

    def _is_broken(self, index: int) -> None:
        self._request_server.broken.append(index)
        self._request_bell.ring()

    def _has_lost(self, sentence: str) -> None:
        self._lost = sentence

    # -- end

    @property
    def _drops(self) -> bool:
        """Whether nobody can want what is left at this end."""
        if self._owned:
            return True
        parent_lives = self._parent is None or self._parent.alive
        return (
            self._dropping
            and not self._lost
            and (self._signal == signal.SIGINT or not parent_lives)
        )

    def _stop(self, loops: Loops, keep: bool) -> None:
        if self._lost:
            _log.critical("%s", self._lost)
        elif self._signal:
            _log.info("received signal %s; stopping", signal.Signals(self._signal).name)
        self._flushing = True
        if not keep:
            self._broker.stopping()

        def patience(name: str, seconds: float) -> None:
            _log.warning(
                "waiting for the %s since %d s (a stopped client may hold a lock)", name, seconds
            )

        loops.stop(patience)

    def _keep(self) -> int:
        shutdown.keep(self._registry, self._metadata_writer, self._spiller)
        self._broker.detach()
        _log.info("instance %s: kept for the next supervisor", self._options.instance)
        return 0

    def _flush(self, owns_name: Callable[[], bool] = lambda: True) -> int:
        """owns_name: returns false if the instance's name now refers to another instance."""
        options, drops = self._options, self._drops
        try:
            self._broker.stopping()
            if drops:
                self._broker.close_directory()
            else:
                self._request_server.drop_unclaimed()  # it would be written to disk for nobody
                self._results.flush()
                shutdown.flush(
                    self._broker,
                    self._registry,
                    self._manager,
                    self._spiller,
                    self._metadata_writer,
                )
        except (OSError, ShmqError) as exc:
            _log.critical(
                "cannot write everything to disk: %s; the rest stays in shared memory: mend that "
                "and start `shmq serve` again on the same data path",
                remedies.sentence(exc) if isinstance(exc, OSError) else exc,
            )
            self._broker.detach()
            return 1
        self._permits.close()
        self._broker.detach()
        if owns_name():
            shm.unlink_instance(options.instance)
            forget_staged(options.instance, os.geteuid())
            claims.forget_empty(self._data_path)
        if drops:
            import shutil  # slow to import

            shutil.rmtree(self._data_path, ignore_errors=True)
        _log.info("instance %s: bye", options.instance)
        return 1 if self._lost else 0

    # -- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals in this context: SIGTERM and SIGINT ask for the end, SIGHUP for a reload.
        A SIGHUP that comes because this process's terminal has gone asks for the end."""
        before = {
            number: signal.signal(number, self._caught)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
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
        if self._starting:
            self._starting = False
            raise _Stopped

    def _caught_hangup(self, number: int, frame: FrameType | None) -> None:
        self._hung_up = True

    def _has_its_terminal(self) -> bool:
        """False if this process was started from a terminal that has gone since."""
        return not self._terminal or _has_terminal()


def _has_terminal() -> bool:
    """True if this process has a controlling terminal that still exists."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class _Stopped(BaseException):
    """A signal asks for the end while the start is under way."""


class _Parent:
    """The process that started this one."""

    def __init__(self, pid: int) -> None:
        process = Process.look(pid)
        self._pid = pid
        self._start_time = None if process is None else process.start_time

    @property
    def alive(self) -> bool:
        """True if the same process still lives."""
        return self._start_time is not None and is_alive(self._pid, self._start_time)
