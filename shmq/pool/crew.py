"""The worker processes of a pool, and the thread that starts, watches and replaces them.

The thread sleeps on a process descriptor for each worker, so it knows of a death at once. The
broker gives the task of a dead worker to another one without it; after the last attempt the
task becomes a dead letter, which this thread makes the outcome of its future.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import process
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Final

from shmq import procfs
from shmq.client import Consumer, DeadLetter, Message
from shmq.errors import Full, NotInFlight, ShmqError
from shmq.patience import Patience
from shmq.pool import worker
from shmq.pool.nursery import Nursery, reap
from shmq.pool.site import KEY_BYTES, LETTERS, STOP, Site
from shmq.pool.timekeeper import Timekeeper

if TYPE_CHECKING:
    from shmq.pool.inbox import Inbox

#: Workers in a row that end by themselves before they are ready, after which the pool is broken.
_HOPELESS: Final = 10
#: Signals by which somebody else ends a worker. They say nothing about the pool.
_FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM)
#: Deaths whose signals are kept until the dead letters come.
_REMEMBERED: Final = 1000
_LONG_MS: Final = 60_000
_RETRY_MS: Final = 20  # until the next try to publish to a full channel
#: Until the next look at the dead letters, while some of them are not sealed and stay.
_STRANGE_MS: Final = 500
#: Dead letters that are looked at together.
_LETTERS: Final = 1 << 15
_START_RETRY_MS: Final = 500  # until the next try to start a process that the system refused

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """How a pool's workers are started."""

    size: int
    context: BaseContext
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    max_tasks: int | None
    timeout: float | None = None
    """Seconds that a task may run in one worker."""


@dataclass(frozen=True)
class _Hand:
    """One worker process."""

    pid: int
    duty: worker.Duty
    reap: Callable[[], int | None]
    """Returns its exit status when it has ended, or None if nobody knows it. Called once."""


class Crew(threading.Thread):
    """The workers of one pool."""

    def __init__(self, site: Site, inbox: Inbox | None, terms: Terms) -> None:
        """inbox: of the executor whose private pool this is, which ends with the crew."""
        super().__init__(name="shmq-pool", daemon=True)
        self._site = site
        self._inbox = inbox
        self._terms = terms
        self._token = secrets.token_hex(6)
        self._serials = itertools.count()
        self._began = procfs.start_time(os.getpid())
        self._crew_pid = os.getpid()
        self._forks = terms.context.get_start_method() == "fork"
        self._program = None if self._forks else _script()
        self._nursery: Nursery | None = None
        self._patience = Patience()  # of outcomes of the dead that a store has no room for
        self._hands: dict[int, _Hand] = {}
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # of `_hands` and `_wake`
        self._poll.register(self._wake, select.POLLIN)
        # A private pool begins with none, and gets one more for each task.
        self._places = terms.size if site.durable else 0
        self._begun = 0  # of these places, those that got their first worker
        self.can_grow = self._places < terms.size
        """Whether there may be more workers."""
        self._wanted = 0  # workers that have to be started
        self._failures = 0  # workers in a row that ended before they were ready
        self._deaths: deque[tuple[int, int | None]] = deque(maxlen=_REMEMBERED)
        self._keeper = None if terms.timeout is None else Timekeeper(site, terms.timeout)
        self._late: deque[int] = deque(maxlen=_REMEMBERED)  # workers that it has ended
        self._letters: Consumer | None = None
        self._strange = False  # some of them are not sealed, and wait for an operator
        self._asked = self._stopping = self._is_over = False
        self._stops = 0  # messages that tell workers to end, still to be published
        self.at_end: Callable[[], object] | None = None
        """Called when the crew has ended."""
        self.broken: str | None = None
        """Why the pool cannot go on, if it cannot."""

    # ---- for other threads ----

    def stop(self) -> None:
        """End in order: a private pool's workers when all tasks are done, a durable pool's when
        each has done the task in hand."""
        self._asked = True
        self._ring()

    def grow(self, count: int) -> None:
        """Start some more workers, but no more than there may be. One thread at a time calls
        this."""
        self._places = min(self._places + count, self._terms.size)
        self.can_grow = self._places < self._terms.size
        self._ring()

    def give_back(self) -> None:
        """Have the workers of a durable pool give back their tasks and end."""
        self._asked = True
        self.signal(worker.GIVE_BACK)
        self._ring()

    def kill(self, number: int) -> None:
        """End all workers by a signal. Tasks without an outcome get a BrokenProcessPool."""
        self._break("its workers were ended by kill_workers or terminate_workers")
        self.signal(number)
        self._ring()

    def signal(self, number: int) -> None:
        """Send a signal to every worker."""
        with self._lock:
            for fd in self._hands:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(fd, number)

    def pids(self) -> list[int]:
        """The process ids of the workers."""
        with self._lock:
            return [hand.pid for hand in self._hands.values()]

    def _ring(self) -> None:
        with self._lock:
            if not self._is_over:
                os.eventfd_write(self._wake, 1)

    def start(self) -> None:
        """Start the thread. Workers are forked from the state of this moment, in which the calling
        thread holds no lock of its program's, or knows that it does."""
        if self._forks:
            with contextlib.suppress(OSError):  # the system has no room now: tried again by `_hire`
                self._nursery = Nursery(self._terms.context, self._run_worker)
        super().start()

    # ---- the thread ----

    def run(self) -> None:
        try:
            if self._site.durable:
                self._expect_letters()  # an earlier crew may have left some
            while self.broken is None and not self._is_done():
                self._turn()
        except ShmqError as exc:
            self._break(f"it lost its broker: {exc}")
        except Exception as exc:
            _log.exception("a pool cannot start its workers")
            self._break(f"its workers cannot be started: {exc!r}")
        finally:
            self._end()

    def _turn(self) -> None:
        """Start the workers that are missing, sleep until something happens, and see to it."""
        pause = None if self._start_missing() else _START_RETRY_MS
        if not self._send_stops():
            pause = _RETRY_MS
        if self._stopping and self._site.durable:
            self.signal(signal.SIGTERM)  # also to a worker that could not listen yet
            pause = _START_RETRY_MS
        if self._strange:
            pause = _STRANGE_MS if pause is None else min(pause, _STRANGE_MS)
        if self._keeper is not None and self._hands:
            pause = min(self._keeper.pause(), pause or _LONG_MS)
        ready = {fd for fd, _ in self._poll.poll(pause)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for fd in ready & self._hands.keys():
            self._see_off(fd)
        if self._keeper is not None:
            workers = {hand.pid: fd for fd, hand in self._hands.items()}
            self._late.extend(self._keeper.look(workers))
        if self._letters is not None and (self._strange or self._letters.fileno() in ready):
            self._bury()
        if self._asked and not self._stopping:
            self._start_missing()
            self._begin_to_stop()

    def _is_done(self) -> bool:
        """Whether the workers have ended because they were told to, and no task is left."""
        if self._begun < self._places or not self._stopping or self._hands or self._wanted:
            return False
        if self._site.durable or not self._deaths:
            return True
        # The task of a worker that died last may come back after the others have ended.
        while not self._site.is_idle():
            time.sleep(_RETRY_MS / 1000)
        self._bury()
        if self._site.depth():
            self._wanted = self._stops = 1
            return False
        return True

    # ---- starting and stopping ----

    def _start_missing(self) -> bool:
        """Returns False if the system refuses to start a process for now."""
        if not self._stopping or not self._site.durable:
            places = self._places
            self._wanted, self._begun = self._wanted + places - self._begun, places
        while self._wanted and self.broken is None:
            self._wanted -= 1
            try:
                self._hire()
            except OSError as exc:
                self._wanted += 1
                _log.warning("a pool cannot start a worker, and tries again: %s", exc)
                return False
        return True

    def _name_the_program(self) -> None:
        """Have `multiprocessing` find the script. Python takes its name from the main module when
        the script ends, while tasks may still wait for their workers. If that happens just now, the
        worker finds the script by itself."""
        main = sys.modules["__main__"]
        if self._program is not None and not hasattr(main, "__file__"):
            main.__file__ = self._program

    def _hire(self) -> None:
        """Start a worker. Raises OSError if the system refuses."""
        number = next(self._serials)
        duty = self._duty(number)
        if self._forks:
            if self._nursery is None or not self._nursery.lives():
                self._renew_nursery()
            assert self._nursery is not None
            pid, fd = self._nursery.fork(number)
            hand = _Hand(pid, duty, functools.partial(self._nursery.status, pid))
        else:
            self._name_the_program()
            start: Any = self._terms.context
            started: BaseProcess = start.Process(
                target=worker.main, args=(duty,), name=f"shmq-worker-{number}"
            )
            started.start()
            assert started.pid is not None
            hand = _Hand(started.pid, duty, functools.partial(reap, started))
            try:
                fd = os.pidfd_open(started.pid)
            except ProcessLookupError:
                # It has ended already, and its status was read: by the fork server, or by another
                # thread that started a process just now.
                self._account(hand)
                return
        with self._lock:
            self._hands[fd] = hand
        self._poll.register(fd, select.POLLIN)

    def _duty(self, number: int) -> worker.Duty:
        terms = self._terms
        return worker.Duty(
            self._site.place,
            self._crew_pid,
            self._began,
            f"{self._token}/{number}".encode(),
            terms.initializer,
            terms.initargs,
            terms.max_tasks,
            self._program,
            self._keeper is not None,
        )

    def _run_worker(self, number: int) -> None:
        """Be a worker, in a process that was forked."""
        worker.main(self._duty(number))

    def _renew_nursery(self) -> None:
        """Fork another one from this thread: it was killed, or the system had no room for it."""
        if self._nursery is not None:
            _log.warning("the process that forks the workers of a pool was ended; forking another")
            self._nursery.end()
        self._nursery = None
        self._nursery = Nursery(self._terms.context, self._run_worker)

    def _begin_to_stop(self) -> None:
        self._stopping = True
        if self._site.durable:
            self._wanted = 0
        else:
            self._stops = len(self._hands) + self._wanted

    def _send_stops(self) -> bool:
        """Publish a message for each worker that is to end, behind all tasks. Returns False if
        there is no room for now."""
        if self._stops:
            producer = self._site.producer
            try:
                while self._stops:
                    producer.publish(STOP, timeout=0)
                    self._stops -= 1
            except Full:
                return False
        return True

    # ---- deaths ----

    def _see_off(self, fd: int) -> None:
        """A worker has ended. Replace it, unless it was told to end."""
        self._poll.unregister(fd)
        with self._lock:
            hand = self._hands.pop(fd)
        os.close(fd)
        self._account(hand)
        self._start_missing()

    def _account(self, hand: _Hand) -> None:
        """Find out how a worker has ended, and want another one unless it was told to end."""
        code, pid = hand.reap(), hand.pid
        was_ready = self._site.signs.pop(hand.duty.up) is not None
        bye = self._site.signs.pop(hand.duty.bye)
        if bye == worker.STOPPED or (self._stopping and self._site.durable):
            return
        self._wanted += 1
        if bye is not None and bye.startswith(worker.BROKEN):
            self._break("its initializer raised:\n" + bye[len(worker.BROKEN) :].decode())
        if bye is not None:
            return
        _log.info("worker %d of a pool ended with status %s", pid, code)
        self._deaths.append((pid, -code if code is not None and code < 0 else None))
        self._count_failures(was_ready, code)
        self._expect_letters()

    def _count_failures(self, was_ready: bool, code: int | None) -> None:
        """Break the pool if its workers never become ready. A worker that somebody kills while it
        starts says nothing about the others."""
        if was_ready:
            self._failures = 0
        elif code not in _FROM_OUTSIDE:
            self._failures += 1
        if self._failures >= _HOPELESS:
            self._break(
                f"{self._failures} workers in a row ended before they were ready, the last one "
                f"with status {code}; their standard error may say why"
            )

    def _expect_letters(self) -> None:
        """Watch the dead letters. A pool in which nobody has died does not need that."""
        if self._letters is None:
            self._letters = self._site.broker.consumer(
                self._site.place.letters, LETTERS, _LETTERS, None
            )
            self._register(self._letters.fileno())

    def _bury(self) -> None:
        """Make each dead letter the outcome of its task."""
        if self._letters is None:
            return
        strange = []
        while (message := self._letters.take(0)) is not None:
            if message.sealed:
                self._bury_one(message)
            else:  # a worker has refused it, or somebody has put it: it is no outcome
                strange.append(message)
        for message in strange:
            with contextlib.suppress(NotInFlight):
                message.requeue(0, failed=False)
        if self._strange != bool(strange):  # their descriptor would be ready all the time
            self._strange = bool(strange)
            change = self._poll.unregister if strange else self._register
            change(self._letters.fileno())

    def _register(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def _bury_one(self, message: Message) -> None:
        letter = DeadLetter.of(message)
        key = letter.body[:KEY_BYTES]
        if key == STOP:
            self._stops += 1
        else:
            # the broker may have noticed the death sooner than this thread
            for fd in [fd for fd, hand in self._hands.items() if hand.pid == letter.pid]:
                self._see_off(fd)
            signals = dict(self._deaths)
            attempts = letter.failures or self._site.place.attempts
            number = signals.get(letter.pid) if letter.pid is not None else None
            found = self._site.outcomes.died(letter.pid, number, attempts)
            if self._keeper is not None and letter.pid in self._late:
                found = self._site.outcomes.late(self._keeper.seconds, letter.pid, attempts)
            # A worker may have died between the outcome and the end of its message.
            if self._inbox is not None:
                self._inbox.put(key, found)
            else:
                try:
                    self._site.store.add(key, found, self._site.ttl)
                except Full as exc:
                    self._patience.refused(exc)
                    message.requeue(1.0, failed=False)
                    return
                self._patience.over()
        message.finish()

    # ---- the end ----

    def _break(self, why: str) -> None:
        if self.broken is None:
            self.broken = f"the pool is broken: {why}"
            if not self._site.durable:
                self._site.ring(self._site.outcomes.broken(self.broken))

    def _end(self) -> None:
        if self._hands:
            self.signal(worker.GIVE_BACK if self._site.durable else signal.SIGKILL)
        with self._lock:
            self._is_over = True
            left, self._hands = self._hands, {}
            os.close(self._wake)
        for fd, hand in left.items():
            hand.reap()
            os.close(fd)
        if self._nursery is not None:
            self._nursery.end()
        if self._letters is not None:
            with contextlib.suppress(ShmqError):
                self._letters.close()
        if self._inbox is not None:
            self._inbox.close(self.broken or "the pool was shut down")
            self._site.remove()
        if self.at_end is not None:
            self.at_end()


def _script() -> str | None:
    """The path of the script that runs, as `multiprocessing` tells it to its processes; None if it
    is a module, or none."""
    main = sys.modules["__main__"]
    file: str | None = getattr(main, "__file__", None)
    if file is None or getattr(main.__spec__, "name", None) is not None:
        return None
    began = getattr(process, "ORIGINAL_DIR", None)  # where the program began
    return os.path.normpath(os.path.join(began or "", file))
