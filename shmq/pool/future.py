"""One task that was submitted, as `concurrent.futures` has it."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from concurrent.futures import CancelledError
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from typing import Any, Generic, Protocol, TypeVar

from shmq.pool.outcome import Outcomes

T = TypeVar("T")


class Keeper(Protocol):
    """The part of an executor's inbox that its futures use."""

    lock: threading.RLock
    """Protects the state of a future that has no condition."""
    outcomes: Outcomes
    """Reads what is stored."""
    dropped: deque[bytes]
    """Keys of tasks whose futures are gone."""

    def fetch(self, future: Future[Any], timeout: float | None) -> None:
        """Wait until the future has an outcome. Raises TimeoutError."""

    def poll(self, future: Future[Any]) -> bool:
        """Look for the outcome. Returns whether the future has one."""

    def watch(self, future: Future[Any]) -> threading.Condition:
        """Have a thread collect the future. Returns its condition."""

    def wake(self, future: Future[Any]) -> None:
        """A future was cancelled: have the thread that waits for it look at it."""

    def is_running(self, key: bytes) -> bool:
        """Whether a worker has the task."""

    def cancel(self, key: bytes) -> bool:
        """Cancel a task unless a worker has taken it. Returns whether nobody will run it."""


class Future(concurrent.futures.Future[T], Generic[T]):
    """A task of `shmq.Executor`: a `concurrent.futures.Future` with an `id`.

    `result` and `exception` wait directly for the outcome in shared memory. The thread that
    collects outcomes runs only for futures with callbacks, for those in `wait` and `as_completed`,
    and for those that several threads wait for.
    """

    # The base class keeps a condition and two lists for each future. Most futures never need them,
    # so they are made when somebody asks for the condition.
    _waiters: Any = ()
    _done_callbacks: Any = ()

    def __init__(self, inbox: Keeper, key: bytes) -> None:
        self._inbox = inbox
        self._key = key
        self._state = PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._bell: threading.Condition | None = None
        self._held = 0  # the thread that waits for the outcome of this future alone

    @property
    def id(self) -> str:
        """The id of the task. `Executor.future(id)` gives a future for it again."""
        return self._key.decode()

    # ---- state ----

    def done(self) -> bool:
        """Returns True if the task has an outcome, or was cancelled."""
        return self._state != PENDING or self._inbox.poll(self)

    def cancelled(self) -> bool:
        """Returns True if the task was cancelled before it began."""
        return self.done() and self._state == CANCELLED_AND_NOTIFIED

    def running(self) -> bool:
        """Returns True if a worker has the task just now."""
        return not self.done() and self._inbox.is_running(self._key)

    def cancel(self) -> bool:
        """Cancel the task unless a worker has it or had it. Returns whether it is cancelled."""
        if self.done():
            return self._state == CANCELLED_AND_NOTIFIED
        if not self._inbox.cancel(self._key):
            return False
        self._settle(None, None, cancelled=True)
        self._inbox.wake(self)
        return self._state == CANCELLED_AND_NOTIFIED

    # ---- outcome ----

    def result(self, timeout: float | None = None) -> T:
        """Wait for the task and return its value. timeout: seconds; None: no limit.

        Raises the exception that the task raised, with the worker's traceback as its `__cause__`;
        TimeoutError; CancelledError; WorkerDied; TaskTimeout; and BrokenProcessPool."""
        if self._state == PENDING:
            self._inbox.fetch(self, timeout)
        if self._state == CANCELLED_AND_NOTIFIED:
            raise CancelledError
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                self = None  # type: ignore[assignment]  # no cycle with the traceback's frames
        value: T = self._result
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the task and return its exception; None if it returned a value. Raises
        TimeoutError and CancelledError."""
        if self._state == PENDING:
            self._inbox.fetch(self, timeout)
        if self._state == CANCELLED_AND_NOTIFIED:
            raise CancelledError
        return self._exception

    # ---- for the inbox ----

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """The condition of the base class. `wait`, `as_completed` and callbacks use it, and cannot
        look into the store, so a thread collects this future from now on."""
        return self._bell or self._inbox.watch(self)

    def _settle(self, result: Any, raised: BaseException | None, cancelled: bool = False) -> None:
        """Give the future its outcome, unless it has one. The state changes under the condition if
        there is one: `as_completed` holds it while it looks at the state."""
        with self._inbox.lock:
            bell = self._bell
            if bell is None:
                if self._state == PENDING:
                    self._set(result, raised, cancelled)
                return
        with bell:
            if self._state != PENDING:
                return
            self._set(result, raised, cancelled)
            for waiter in self._waiters:
                if cancelled:
                    waiter.add_cancelled(self)
                elif raised is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            bell.notify_all()
        self._invoke_callbacks()  # type: ignore[attr-defined]

    def _set(self, result: Any, raised: BaseException | None, cancelled: bool) -> None:
        self._result = result
        self._exception = raised
        self._state = CANCELLED_AND_NOTIFIED if cancelled else FINISHED

    def _accept(self, stored: bytes) -> None:
        """Give the future the outcome that was stored under its key."""
        self._settle(*self._inbox.outcomes.read(stored))

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "finished" if self.done() else "pending"
        return f"<shmq.Future {self.id} {state}>"

    def __del__(self) -> None:
        # nobody can ask for the outcome any more; the inbox deletes it when it comes
        try:  # `suppress` would be three calls more for each future
            if self._state == PENDING:
                self._inbox.dropped.append(self._key)
        except AttributeError:
            pass
