"""A worker process: takes one task at a time, runs it, stores its outcome, finishes its message.

A death anywhere in this leaves the message in flight, and it comes back to another worker. An
outcome that was stored before the death is not stored again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any, Final

from shmq import objects, procfs
from shmq.client import Consumer, Message
from shmq.errors import Full, Gone, MessageTooBig, NotInFlight, ShmqError
from shmq.patience import Patience
from shmq.pool.site import CHANNEL, KEPT, KEY_BYTES, STOP, Place, Site
from shmq.seal import refuse

#: How a worker that ended in order went: the value of its key `bye`.
STOPPED: Final = b"stopped"
RETIRED: Final = b"retired"
BROKEN: Final = b"broken "

#: The signal by which a crew tells the worker of a durable pool to give its task back and end.
GIVE_BACK: Final = signal.SIGUSR1

#: Seconds between two tries to store an outcome in a store without room: at first, at most.
_PAUSES: Final = (0.001, 0.05)

#: Seconds after which an outcome counts as one that never fits, if the store has no other and still
#: refuses it. Memory that was just given back may take moments to be there again.
_ALONE: Final = 5.0

_PR_SET_PDEATHSIG: Final = 1

#: Bytes of the largest outcome for which a worker keeps its memory.
_SCRATCH: Final = 16 << 20

_log = logging.getLogger("concurrent.futures")


@dataclass(frozen=True)
class Duty:
    """The work of one worker."""

    place: Place
    crew: int
    """The process that it works for, whose end ends it."""
    began: int | None
    """When that process was started, in clock ticks since boot."""
    name: bytes
    """The name of this worker in its keys in the store."""
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    max_tasks: int | None
    program: str | None = None
    """The script whose functions the tasks call, for a worker that is not forked."""
    is_timed: bool = False
    """Whether its crew may stop it, to see which task it has."""

    @property
    def up(self) -> bytes:
        """The key that says that the worker was ready."""
        return b"up/" + self.name

    @property
    def bye(self) -> bytes:
        """The key that says that the worker has ended in order."""
        return b"bye/" + self.name


def main(duty: Duty) -> None:
    """Run a worker until it is told to stop, has done `max_tasks`, or the crew's process ends."""
    _be_the_main_thread()
    if duty.program is not None:
        spawn.import_main_path(duty.program)  # unless `multiprocessing` did it
    if duty.is_timed:
        _go_on_without_parent()
    worker = _Worker(duty)
    try:
        bye = worker.run()
        with contextlib.suppress(ShmqError):
            worker.site.signs.set(duty.bye, bye, KEPT)
    except Gone:  # the pool was removed
        pass
    finally:
        worker.end()


def _be_the_main_thread() -> None:
    """After a fork the main thread is the one that forked, perhaps a daemon. Threads of tasks would
    be daemons too then, and be cut at the end of the worker."""
    thread: Any = threading.current_thread()
    thread.name, thread._daemonic = "MainThread", False


def _go_on_without_parent() -> None:
    """Have the kernel continue this process when the one that started it ends. A crew that dies
    while it has a worker stopped would leave it so for ever, with its task. A fork server ends only
    after its children, so there it does not help."""
    import ctypes  # seldom needed

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


class _Crew:
    """The process that a worker works for."""

    def __init__(self, duty: Duty) -> None:
        try:
            self.fd = os.pidfd_open(duty.crew)
        except ProcessLookupError:
            os._exit(1)
        if duty.began is not None and procfs.start_time(duty.crew) != duty.began:
            os._exit(1)  # it ended, and another process has its number
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    @property
    def lives(self) -> bool:
        return not self._poll.poll(0)


class _Worker:
    def __init__(self, duty: Duty) -> None:
        self._duty = duty
        self._is_busy = False  # a task of the user's runs
        self._is_ending = False
        self._crew = _Crew(duty)
        self._ear, self._mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()  # of the step from a message to its task
        self._has_task = False
        self._scratch = bytearray()
        # A task's arguments and its result. They go when the message is finished: destructors may
        # end the worker, and the outcome is there then.
        self._kept: Any = None
        self._writable = duty.place.writable
        self._listen_to_signals()
        self.site = Site(duty.place)
        # A time-out must never take a task from a worker that lives.
        self._consumer: Consumer = self.site.broker.consumer(duty.place.topic, CHANNEL, 1, None)
        threading.Thread(target=self._watch, name="shmq-pool-crew", daemon=True).start()

    # ---- signals, and the end of the crew ----

    def _listen_to_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        # The program may have blocked them, to wait for them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, GIVE_BACK})
        if self._duty.place.durable:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the crew's process passes it on
            signal.signal(signal.SIGTERM, lambda *_: self._tell(b"s"))
            signal.signal(GIVE_BACK, lambda *_: self._tell(b"g"))
        else:
            signal.signal(signal.SIGINT, self._interrupt)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _interrupt(self, *_: object) -> None:
        """Ctrl-C interrupts the task, not the worker: the pool's process decides about that."""
        if self._is_busy:
            raise KeyboardInterrupt

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._mouth, word)

    def _watch(self) -> None:
        """End the worker when its crew's process has ended, or has told it to."""
        poll = select.poll()
        poll.register(self._crew.fd, select.POLLIN)
        poll.register(self._ear, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._crew.fd in ready:
                self._give_back()
                os._exit(1)
            if b"g" in os.read(self._ear, 100):
                self._give_back()
                with contextlib.suppress(ShmqError):
                    self.site.signs.set(self._duty.bye, STOPPED, KEPT)
                os._exit(0)
            with self._lock:
                self._is_ending = True
                if not self._has_task:
                    self._consumer.close()

    def _give_back(self) -> None:
        """Return the task in hand, as one that has not failed."""
        with contextlib.suppress(ShmqError):
            self._consumer.close()

    # ---- tasks ----

    def run(self) -> bytes:
        """Returns how it ended. Raises Gone if the pool was removed."""
        duty = self._duty
        if duty.initializer is not None:
            try:
                duty.initializer(*duty.initargs)
            except BaseException:
                # the words and the logger of ProcessPoolExecutor
                _log.critical("Exception in initializer:", exc_info=True)
                return BROKEN + traceback.format_exc().encode("utf-8", "replace")
        self.site.signs.set(duty.up, b"up", KEPT)
        left = duty.max_tasks
        while left is None or left > 0:
            try:
                message = self._consumer.take()
            except Gone:
                if self._is_ending:
                    return STOPPED
                raise
            if not message.sealed:
                refuse(message)
                continue
            if not self._work(message):
                return STOPPED
            if left is not None:
                left -= 1
        return RETIRED

    def _work(self, message: Message) -> bool:
        """Run one task. Returns False if the worker is to end."""
        large = len(message) >= objects.LARGE
        key = bytes((message.view if large else message.body)[:KEY_BYTES])
        if key == STOP:
            # In this order: a death in between costs the crew nothing but one more such message.
            self.site.signs.set(self._duty.bye, STOPPED, KEPT)
            message.finish()
            return False
        if message.attempts > 1 and not self._crew.lives:
            # The whole crew may be dying, and would use up the attempts of one task after another.
            message.requeue(failed=False)
            return False
        with self._lock:
            if self._is_ending:
                self._give_back()
                return False
            self._has_task = True
        if self.site.signs.pop(key) == self.site.outcomes.cancelled:
            if self.site.durable:
                self._deliver(key, self.site.outcomes.cancelled)
        elif message.attempts == 1 or not self._has_outcome(key):
            self._deliver(key, self._perform(message))
        try:  # noqa: SIM105  # `suppress` would be a tenth of a small task's cost here
            message.finish()
        except NotInFlight:
            pass
        self._has_task = False
        try:  # to forget the task; Ctrl-C interrupts what its destructors do
            self._is_busy = True
            self._kept = None
        except KeyboardInterrupt:
            pass
        finally:
            self._is_busy = False
        return not self._is_ending

    def _has_outcome(self, key: bytes) -> bool:
        """Whether the task was done, by a worker that died before its message was finished."""
        stored = self.site.store.get(key)
        return stored is not None and self.site.outcomes.is_sealed(stored)

    def _perform(self, message: Message) -> bytes | objects.Packed:
        """Call the function. Returns the outcome."""
        try:
            self._is_busy = True
            if self._writable:
                task = objects.unseal(message, KEY_BYTES, writable=True)
            else:
                task = objects.unseal(message, KEY_BYTES)
            function, arguments, named = task
            result = function(*arguments, **named)
            self._kept = task, result
            found = self.site.outcomes.value(result)
            self._is_busy = False
            return found
        except BaseException as exc:
            self._is_busy = False
            self._kept = self._kept, exc
            return self.site.outcomes.error(exc)

    def _deliver(self, key: bytes, found: bytes | objects.Packed) -> None:
        """Store an outcome. Waits while the store is full: its room comes back when others are
        collected. An outcome that can never fit becomes the error MessageTooBig."""
        value: bytes | memoryview = found if isinstance(found, bytes) else self._written(found)
        try:
            self.site.store.set(key, value, self.site.ttl)
        except (Full, MessageTooBig):
            self._press(key, value)

    def _press(self, key: bytes, value: bytes | memoryview) -> None:
        """Store an outcome that the store has refused once."""
        pause, most = _PAUSES
        patience = Patience()
        alone: float | None = None  # since when the store has no other value, and no room
        while True:
            try:
                self.site.store.set(key, value, self.site.ttl)
                return
            except MessageTooBig as exc:
                value = self.site.outcomes.error(exc)
            except Full as exc:
                if self.site.store.stats().keys or len(value) < objects.LARGE:
                    alone = None
                elif alone is None:
                    alone = time.monotonic()
                elif time.monotonic() - alone > _ALONE:
                    value = self.site.outcomes.error(_never(len(value), exc))
                    continue
                patience.refused(exc)
                time.sleep(pause)
                pause = min(pause * 2, most)

    def _written(self, found: objects.Packed) -> memoryview:
        """The bytes of a large outcome, in memory that the next one uses again: new memory would
        cost more than the copy."""
        if found.size > len(self._scratch):
            if found.size > _SCRATCH:
                return memoryview(found.joined())
            self._scratch = bytearray(found.size)
        found.write(self._scratch)
        return memoryview(self._scratch)[: found.size]

    def end(self) -> None:
        """Give back what is left, and leave the instance."""
        with contextlib.suppress(ShmqError):
            self.site.close()


def _never(length: int, refused: Full) -> MessageTooBig:
    """The error for an outcome that an empty store has refused."""
    return MessageTooBig(
        f"store the outcome of a task: it has {length} bytes, and the results store has no other, "
        f"but there is no room: {refused}"
    )
