"""Health of the supervisor: status line, watchdog pings, and the decision to stop.

The loop pings the service manager's watchdog only after it has checked everything that could be
wrong:

* A loop (or the main loop) does not move or keeps crashing: no ping, so that the manager starts
  another supervisor, which adopts. Nothing is lost by that.
* A loop waits for a lock that a stopped client holds: it pings. Every supervisor would wait there,
  and a lock is never taken from its holder.
* The disk fails while writes are pending: no ping. A full disk is not a failure: another supervisor
  would find no more room, publishers wait or get Full, and the status line shows it.
* The directory segment's name is gone from /dev/shm (RemoveIPC, `rm`): no client can find the
  instance any more, but all messages are still mapped here. It calls `lost`, so that the supervisor
  flushes them and ends; its next start recreates the instance.
* A segment is shorter than its mapping (`truncate` by a member of the group). A process that
  touches the missing part gets SIGBUS, so this check helps only if it comes before. A queue is
  replaced. If it is the directory, this process ends at once, because a stop would touch it; the
  next start writes the queues' messages to disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shmq import _native, shm
from shmq._native import Broker
from shmq.layout import Array, lock_holder
from shmq.options import Options
from shmq.supervisor.loops import Bell, Loops, Pace
from shmq.supervisor.registry import Queue, Registry, hot_array
from shmq.supervisor.systemd import Notifier
from shmq.supervisor.trouble import probe

_TICK = 1.0  # seconds between two looks at the directory's name
_STATUS_EVERY = 3.0  # seconds, at least
_STATUS_SHARE = 0.001  # of a core's time, at most
_STUCK = 10.0  # seconds without a heartbeat after which a loop counts as stuck
_SECOND_LOOK = 0.2  # seconds after which a lock with the same holder counts as blocked
_EXTEND_EVERY = 1.0
_EXTEND_BY = 30.0
_CUT = 1  # exit status
_STALLED = 60.0  # seconds without progress of a stop after which it asks for no more time

_NOT_HELPED = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE)  # by a new start

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Totals:
    """Numbers of messages, summed over all queues."""

    queues: int
    depth: int  # to be delivered, in memory and on disk
    on_disk: int
    in_memory: int  # in any state


class Watchdog:
    """The loop that checks health. The supervisor calls `ready` and `stopping`."""

    def __init__(
        self,
        notifier: Notifier,
        loops: Loops,
        broker: Broker,
        registry: Registry,
        options: Options,
        inode: int,
        health: Callable[[], str],
        lost: Callable[[str], None],
        broken: Callable[[int], None] = lambda index: None,
    ) -> None:
        """inode: of the directory segment, whose name may be another's by now. health: nsqd's
        health text of the disk. lost: called once, with a sentence, when the instance must be
        flushed and recreated. broken: called with the index of a queue that must be replaced."""
        self._notifier = notifier
        self._loops = loops
        self._broker = broker
        self._registry = registry
        self._data_path = Path(options.data_path or ".")
        self._path = shm.directory_path(options.instance)
        self._inode = inode
        self._health = health
        self._lost = lost
        self._broken = broken
        self._instance = options.instance
        self._told_short: set[int] = set()
        self._counted: tuple[Queue, ...] = ()
        self._headers: list[Array] = []
        self._hot: Array | None = None
        self._said = ""
        self._ill = ""
        self._excuse = ""

    def run(self, bell: Bell) -> None:
        """Check until the bell is stopped or the instance is lost."""
        notifier, now = self._notifier, time.monotonic()
        alive_at, status = now, Pace(_STATUS_EVERY, _STATUS_SHARE)
        sizes = Pace(_TICK, _STATUS_SHARE)
        interval = notifier.watchdog / 2
        tick = min(_TICK, interval) if interval else _TICK
        while not bell.check():
            now = time.monotonic()
            if not self.is_named():
                self._lost(
                    f"{self._path} was removed (RemoveIPC in logind.conf or in a unit? rm?): "
                    "nobody can attach any more; writing everything to disk to begin again"
                )
                return
            if shm.is_directory_short(self._instance, self._registry.directory.nbytes):
                self._end_at_once()
            if sizes.is_due(now):
                self._find_short()
                sizes.did(now)
            if interval and now >= alive_at:
                alive_at = now + interval
                self._sign_of_life()
            began = time.monotonic()
            if notifier and status.is_due(began):
                self._say(self.line())
                status.did(began)
            bell.wait(tick)

    def ready(self) -> None:
        """Tell the service manager that the instance is open to clients."""
        self._said = self.line()
        self._notifier.ready(self._said)

    def is_named(self) -> bool:
        """True if the instance's name still refers to its directory segment."""
        try:
            return os.lstat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def owns_name(self) -> bool:
        """True unless the name now refers to the segment of another instance."""
        return self.is_named() or not os.path.lexists(self._path)

    def _end_at_once(self) -> None:
        _log.critical(
            "%s is shorter than it was made: somebody who may write it has cut it; ending before "
            "it is touched, the next start saves what the queues hold",
            self._path,
        )
        logging.shutdown()
        os._exit(_CUT)

    def _find_short(self) -> None:
        """Have the queues replaced whose segments are shorter than their mapping."""
        for queue in self._registry.queues:
            if queue.serial not in self._told_short and shm.is_short(
                self._instance, queue.serial, queue.view.nbytes
            ):
                self._told_short.add(queue.serial)
                _log.error("%s: somebody has cut its segment short; replacing it", queue)
                self._broken(queue.index)

    # -- the self-check

    def check(self) -> str:
        """A sentence about what is wrong. Empty if the watchdog may be pinged."""
        beat = self._registry.directory.read("heartbeat")
        age = (_native.now() - beat) / 1e9
        trouble = f"the main loop has not moved for {age:.0f} s" if age > _STUCK else ""
        trouble = trouble or self._loops.ill(_STUCK)
        if trouble:
            excuse = self._locked_by_client()
            if excuse and excuse != self._excuse:
                _log.warning("%s: %s", trouble, excuse)
            self._excuse = excuse
            return "" if excuse else trouble
        self._excuse = ""
        if self._registry.directory.read("supervisor_pid") != os.getpid():
            return f"the instance has another supervisor in its directory ({self._path})"
        return self._disk_trouble()

    def _sign_of_life(self) -> None:
        trouble = self.check()
        if not trouble:
            self._notifier.alive()
        elif trouble != self._ill:
            _log.critical("%s; the service manager gets no sign of life", trouble)
        self._ill = trouble

    def _disk_trouble(self) -> str:
        """A sentence if the disk refused pending writes and still fails. Empty otherwise."""
        try:
            probe(self._data_path)
        except OSError as exc:
            if exc.errno not in _NOT_HELPED and self._health() != "OK":
                return f"cannot write to the data path {self._data_path}: {exc.strerror}"
        return ""

    def _locked_by_client(self) -> str:
        """A sentence about a client's lock that the loops may be waiting for. Empty if there is
        none."""
        before = self._held()
        time.sleep(_SECOND_LOOK)
        mine = {int(name) for name in os.listdir("/proc/self/task")}
        for name, thread in self._held().items():
            if before.get(name) == thread and thread not in mine:
                return f"thread {thread} of a client holds {name} (stopped?); waiting for it"
        return ""

    def _held(self) -> dict[str, int]:
        """The locks that are held now, with the ids of their holders' threads."""
        directory = self._registry.directory
        locks = {"the registry lock": directory.header["registry"]}
        topics = directory.topics
        for topic in self._registry.topics:
            locks[f"the publish lock of {topic.name}"] = topics[topic.index]["publish"]
        for queue in self._registry.queues:
            locks[f"the deliver lock of {queue}"] = queue.view.header["deliver"]
        held = {name: lock_holder(mutex) for name, mutex in locks.items()}
        return {name: thread for name, thread in held.items() if thread}

    # -- the line

    def totals(self) -> Totals:
        """The numbers of messages, from one copy of all queues' headers."""
        queues = self._registry.queues
        if self._counted is not queues or self._hot is None:
            # own arrays, because the spiller's belong to another thread
            self._counted, self._headers = queues, [queue.hot for queue in queues]
            self._hot = hot_array(len(queues))
        hot = self._hot
        if self._headers:
            np.concatenate(self._headers, out=hot.view(np.uint8))

        def ring(name: str) -> int:
            length: Array = hot[f"{name}_tail"] - hot[f"{name}_head"]  # wraps as the indices do
            return int(length.sum(dtype=np.uint64))

        ready, waiting, on_disk = ring("ready"), ring("requeue"), int(hot["disk_depth"].sum())
        others = ring("defer") + int(hot["deferred_len"].sum()) + int(hot["in_flight_len"].sum())
        return Totals(len(queues), ready + waiting + on_disk, on_disk, ready + waiting + others)

    def line(self) -> str:
        """The status line."""
        totals = self.totals()
        clients = self._registry.other_clients(self._broker.client)
        line = f"{totals.queues} queues, depth {totals.depth}"
        if totals.on_disk:
            line += f" ({totals.on_disk} on disk)"
        line += f", {clients} clients"
        trouble = self._ill or self._excuse
        if not trouble and self._health() != "OK":
            trouble = f"disk {self._health()}"
        return f"{line}; {trouble}" if trouble else line

    def _say(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._notifier.status(line)

    # -- the end

    @contextlib.contextmanager
    def stopping(self, what: str) -> Iterator[None]:
        """A context for a whole stop: asks the manager for more time while the stop progresses."""
        self._notifier.stopping(what)
        ended = threading.Event()
        thread = threading.Thread(target=self._extend, args=(what, ended), name="stop", daemon=True)
        if self._notifier:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.is_alive():
                thread.join()

    def _extend(self, what: str, ended: threading.Event) -> None:
        progress: Any = None
        since = time.monotonic()
        while True:
            totals, loops = self.totals(), self._loops.living
            if progress != (totals, loops):
                progress, since = (totals, loops), time.monotonic()
            if time.monotonic() - since < _STALLED:
                # a kill after this loses nothing either: the next supervisor adopts
                self._notifier.extend(_EXTEND_BY, f"{what}: {totals.in_memory} messages in memory")
                if self._notifier.watchdog:
                    self._notifier.alive()
            if ended.wait(_EXTEND_EVERY):
                return
