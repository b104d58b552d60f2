"""The pool of processes that survives its workers."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import itertools
import math
import multiprocessing
import os
import secrets
import signal
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures._base import PENDING
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import util
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar, cast

from shmq import greenlets, layout, objects, shm
from shmq.arguments import number, whole
from shmq.broker import Broker
from shmq.errors import BadArgument, Full, MessageTooBig, Rejected, ShmqError
from shmq.names import check_name
from shmq.patience import Patience
from shmq.pool.calls import encode_call
from shmq.pool.crew import Crew, Terms
from shmq.pool.future import Future
from shmq.pool.inbox import Inbox
from shmq.pool.site import CHANNEL, KEY_BYTES, STOP, Place, Site
from shmq.queues import tree
from shmq.seal import refuse

if TYPE_CHECKING:
    from shmq.objects import Publisher

P = ParamSpec("P")
T = TypeVar("T")

#: The topic of a durable pool that names none.
TOPIC: Final = "tasks"
#: Tasks that a cancelling shutdown takes back at once.
_BATCH: Final = 200
_MOST_ATTEMPTS: Final = 65_535
#: How long a wait for room lasts at most until the next look whether the pool has ended, seconds.
_SLICE: Final = 0.25
_LONGEST: Final = 1e9  # seconds


class Executor(concurrent.futures.Executor):
    """A pool of processes with the interface of `concurrent.futures.ProcessPoolExecutor`, in which
    the death of a worker costs one task one more attempt, and nothing else.

    max_workers: the number of worker processes; None: that of the CPUs this process may use.
    mp_context: of `multiprocessing`; None: its default. initializer, initargs: called in each
    worker before its first task; if it raises, the pool is broken. max_tasks_per_child: the tasks
    after which a worker is replaced; None: no limit. attempts: the number of workers that may die
    of a task before it fails with `WorkerDied`, 1 to 65535. A task runs more than once only if a
    worker dies of it, or while it has it.
    timeout: seconds that a task may run in a worker; None: no limit. A worker that is late is ended
    and replaced, which is one of the `attempts`; after the last one the task fails with
    `TaskTimeout`.

    A pool is private and ends with this object, or with its process. It is durable if one of these
    is given: broker (a `Broker`), instance (the name of one), topic (of the tasks; None: "tasks").
    The tasks of a durable pool wait in the instance and outlive this process. They are done by all
    workers of the topic: those of `shmq worker MODULE:EXECUTOR`, and `max_workers` of this object's
    own (None: none). An outcome is kept for a day, or until a future has it. `future(id)` gives a
    future for a task of any process.

    Large arguments and results (numpy arrays, Arrow tables) go through shared memory and arrive as
    read-only views. writable: they arrive as copies that may be changed in place. Like every use of
    pickle, a pool runs code that its instance's users send. If `cloudpickle` is installed, lambdas,
    local functions and those of an interactive session or a notebook are pickled by it.

    Raises ValueError and TypeError for the arguments, BadName for the topic, and at the first use
    what `attach` and `Broker` raise.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: BaseContext | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
        attempts: int = 2,
        timeout: float | None = None,
        writable: bool = False,
        broker: Broker | None = None,
        instance: str | None = None,
        topic: str | None = None,
    ) -> None:
        if max_workers is not None and whole("max_workers", max_workers) < 1:
            raise ValueError(f"max_workers must be greater than 0, not {max_workers}")
        if (
            max_tasks_per_child is not None
            and whole("max_tasks_per_child", max_tasks_per_child) < 1
        ):
            raise ValueError(f"max_tasks_per_child must be 1 or more, not {max_tasks_per_child}")
        if not 1 <= whole("attempts", attempts) <= _MOST_ATTEMPTS:
            raise ValueError(f"attempts must be from 1 to {_MOST_ATTEMPTS}, not {attempts}")
        if timeout is not None and not 0 < number("timeout", timeout) < _LONGEST:
            raise ValueError(f"timeout must be None or more than 0 seconds, not {timeout}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be callable, not {initializer!r}")
        if broker is not None and instance is not None:
            raise ValueError("name the broker by `broker` or by `instance`, not by both")
        if topic is not None:
            place = Place("", None, topic, attempts, True)
            for name in (topic, place.letters, *place.stores):
                check_name(name, "topic")
        self.durable = not (broker is None and instance is None and topic is None)
        """Whether the tasks outlive this process."""
        self._broker, self._instance, self._topic = broker, instance, topic or TOPIC
        self._attempts, self._writable = attempts, writable
        context: Any = mp_context or multiprocessing.get_context()
        own = 0 if self.durable else len(os.sched_getaffinity(0))
        self.terms = Terms(
            own if max_workers is None else max_workers,
            context,
            initializer,
            initargs,
            max_tasks_per_child,
            timeout,
        )
        """How the workers are started, for the rest of the package."""
        self._max_workers = self.terms.size or len(os.sched_getaffinity(0))  # Dask reads it
        self._begin()
        _alive.add(self)

    def _begin(self) -> None:
        """Begin with nothing open. A forked child does too: the handles are its parent's."""
        self._lock = threading.Lock()
        self._site: Site | None = None
        self._inbox: Inbox | None = None
        self._crew: Crew | None = None
        self._ended: str | None = None
        self._waiting: deque[bytes | objects.Packed] = deque()  # tasks for which there is no room
        self._feeder: threading.Thread | None = None
        self._own: list[weakref.ref[Future[Any]]] = []  # of a durable pool's tasks
        self._most = _BATCH  # of these, until the next look which are done
        self._prefix = secrets.token_hex(6).encode()
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        kind = f"durable on {self._topic!r}" if self.durable else "private"
        return f"<shmq.Executor {kind}, {self.terms.size} workers>"

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more tasks, for the rest of the package."""
        return self._ended is not None

    # ---- submitting ----

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a worker call `fn(*args, **kwargs)`. Returns a Future. A private pool does so at
        once: a task for which there is no room waits in this process. A durable pool has the task
        in its broker when this returns, so it waits for room; after 5 s the log says so.

        Raises RuntimeError after `shutdown`, BrokenProcessPool, and at the first call what opening
        the pool raises. If the task cannot be pickled, or is too big, a private pool's future has
        the error; a durable pool raises it, and whatever else keeps the task from its broker (Gone,
        NotRunning, Rejected).
        """
        inbox = self._inbox or self._open()
        key = b"%b%08x" % (self._prefix, next(self._numbers) & 0xFFFFFFFF)
        future: Future[T] = Future(inbox, key)
        try:
            task = encode_call((fn, args, kwargs), key)
        except BaseException as exc:
            if self.durable or not _is_the_objects(exc):
                raise
            self._check()
            future._settle(None, exc)
            return future
        if self.durable:
            self._note([future])
        self._send_one(future, task)
        if inbox.dropped:
            inbox.sweep()
        return future

    def submit_all(self, fn: Callable[..., T], calls: Iterable[tuple[Any, ...]]) -> list[Future[T]]:
        """Submit several calls together, which costs less than one after the other; for the rest of
        the package. Returns and raises as `submit`."""
        inbox = self._inbox or self._open()
        futures: list[Future[T]] = []
        small: list[bytes] = []
        for args in calls:
            key = b"%b%08x" % (self._prefix, next(self._numbers) & 0xFFFFFFFF)
            future: Future[T] = Future(inbox, key)
            futures.append(future)
            try:
                task = encode_call((fn, args, {}), key)
            except BaseException as exc:
                if self.durable or not _is_the_objects(exc):
                    raise
                future._settle(None, exc)
                continue
            if isinstance(task, bytes):
                small.append(task)
            else:
                self._send_all(small)
                small = []
                self._send_one(future, task)
        if self.durable:
            self._note(futures)
        self._send_all(small)
        if inbox.dropped:
            inbox.sweep()
        return futures

    def _note(self, futures: list[Future[Any]]) -> None:
        """Remember the futures of a durable pool as long as the program has them."""
        with self._lock:
            self._own += map(weakref.ref, futures)
            if len(self._own) >= self._most:
                self._own = [each for each in self._own if _is_pending(each)]
                self._most = 2 * len(self._own) + _BATCH

    def _send_one(self, future: Future[Any], task: bytes | objects.Packed) -> None:
        """Publish a private pool's task, or give its future the reason why not."""
        if self.durable:
            self._entrust(task)
            return
        with self._lock:
            self._ready(1)
            try:
                self._send(task)
            except ShmqError as exc:
                future._settle(None, exc)

    def _send_all(self, small: list[bytes]) -> None:
        """Publish small tasks together, or if there is no room for all of them, one by one."""
        with self._lock:
            self._ready(len(small))
            if small and self._feeder is None and self._site is not None:
                with contextlib.suppress(Full, MessageTooBig):
                    self._site.producer.publish_many(small, timeout=0)
                    return
            if not self.durable:
                for task in small:
                    self._send(task)
                return
        for task in small:
            self._entrust(task)

    def _entrust(self, task: bytes | objects.Packed) -> None:
        """Publish a durable pool's task; wait for room, in which other threads may use the pool.
        The outcomes of tasks before are fetched meanwhile if their store is full: workers wait for
        the room of these, and nobody else may ever collect them."""
        patience, wait = Patience(), 0.0
        while True:
            with self._lock:
                self._ready(0 if wait else 1)
                site = self._site
            assert site is not None
            try:
                self._publish(site, task, wait)
                return
            except Rejected:
                raise
            except Full as exc:
                patience.refused(exc)
                wait = _SLICE
            if self._inbox is not None and self._inbox.has_refused():
                for each in tuple(self._own):
                    if (future := each()) is not None:
                        future.done()

    def _ready(self, count: int) -> None:
        """Check that the pool takes tasks, and have workers started for so many. The caller has the
        lock."""
        crew = self._crew
        if self._ended is not None or (crew is not None and crew.broken is not None):
            self._check()
        if crew is not None and crew.can_grow:
            crew.grow(count)

    def _send(self, task: bytes | objects.Packed) -> None:
        """Publish a task, or keep it until there is room. The caller has the lock."""
        assert self._site is not None
        if self._feeder is None:
            try:
                self._publish(self._site, task, 0)
                return
            except Full:
                self._feeder = threading.Thread(
                    target=self._feed, args=(self._site,), name="shmq-pool-feeder", daemon=True
                )
                self._feeder.start()
        self._waiting.append(task)

    @staticmethod
    def _publish(site: Site, task: bytes | objects.Packed, timeout: float | None) -> None:
        if isinstance(task, bytes):
            site.producer.publish(task, None, timeout)
            return
        try:
            objects.publish(cast("Publisher", site.producer), task, timeout)
        except MessageTooBig:
            if site.durable or task.size > site.broker.limit("max_msg_size"):
                raise
            site.hold(task.size)
            objects.publish(cast("Publisher", site.producer), task, timeout)

    def _feed(self, site: Site) -> None:
        """Publish the tasks that wait, until there are none."""
        patience = Patience()  # one for all of them, so that a long line says it once
        while True:
            with self._lock:
                if not self._waiting:
                    self._feeder = None
                    if self._ended is not None and self._crew is not None:
                        self._crew.stop()
                    return
                task = self._waiting[0]
            try:
                self._publish(site, task, 0.1)
                patience.over()
            except Full as exc:
                if self._crew is None or self._crew.broken is None:
                    patience.refused(exc)
                    continue
            except ShmqError as exc:
                self._put(_key_of(task), site.outcomes.error(exc))
            with self._lock, contextlib.suppress(IndexError):
                if self._waiting[0] is task:
                    self._waiting.popleft()

    def _put(self, key: bytes, found: bytes) -> None:
        """Give a task an outcome that no worker found."""
        if self._inbox is not None:
            with contextlib.suppress(ShmqError):
                self._inbox.put(key, found)

    def _open(self) -> Inbox:
        """Open the pool, and start its workers."""
        with self._lock:
            if self._inbox is not None:
                return self._inbox
            self._check()
            if self.terms.size and multiprocessing.current_process().daemon:
                # the error and the words of `multiprocessing`, before anything is made
                raise AssertionError("daemonic processes are not allowed to have children")
            if self.terms.size:
                _check_threads()
            if self.durable:
                site = self.durable_site()
            else:
                site = self._private_site()
                site.hold()
            inbox = Inbox(site)
            self._site = site  # before the fork, so that workers know whose pool it is
            if self.terms.size:
                self._crew = Crew(site, None if self.durable else inbox, self.terms)
                self._crew.start()
            self._inbox = inbox
            self._end_with_the_process()
            return inbox

    def _end_with_the_process(self) -> None:
        """Have the tasks done before the interpreter ends, and the workers end if nobody refers to
        this object any more."""
        crew = self._crew
        end = functools.partial(_end, weakref.ref(self), crew)
        atexit.register(end)
        # a child of multiprocessing ends without atexit
        finalizer = util.Finalize(None, end, exitpriority=100)

        def forget() -> None:
            atexit.unregister(end)
            finalizer.cancel()

        if crew is not None:
            crew.at_end = forget
            weakref.finalize(self, crew.stop).atexit = False

    def _private_site(self) -> Site:
        broker = tree.broker()
        place = Place.private(broker, self._attempts, self._writable)
        claim = place.claimed(broker)  # before there is anything that could stay
        try:
            site = Site(place, broker)
        except BaseException as exc:
            place.remove(broker)
            if claim is not None:
                claim.close()
            if isinstance(exc, ShmqError) and "a table is full" in str(exc):
                raise ShmqError(
                    f"open a private Executor: {exc}. The processes of one program have room for "
                    f"{layout.constant('STORES') // len(place.stores)} at a time: shut one down"
                ) from exc
            raise
        site.claim = claim
        return site

    def durable_site(self) -> Site:
        """Open the site of a durable pool, for the rest of the package."""
        broker, instance = self._broker, self._instance or ""
        if broker is not None:
            instance = broker.instance
        elif self._instance is None:
            instance = shm.default_instance()
        place = Place(instance, None, self._topic, self._attempts, True, self._writable)
        return Site(place, broker)

    def _check(self) -> None:
        """Raise the reason why the pool takes no more tasks, if there is one."""
        crew = self._crew
        if crew is not None and crew.broken is not None:
            raise BrokenProcessPool(crew.broken)
        if self._ended is not None:
            raise RuntimeError(self._ended)

    # ---- map ----

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        progress: Literal["text"] | None = None,
    ) -> Iterator[T]:
        """Like the builtin `map`, with the calls done by the workers. The values come in order.

        timeout: seconds from this call, after which the iterator raises TimeoutError; None: no
        limit. chunksize: calls that make one task. buffersize: tasks whose values were not yielded
        that there may be; None: all calls are submitted at once. progress: "text" shows a bar on
        the terminal, if standard error is one and `rich` is installed.

        The iterator raises what a call raises. Tasks that have not begun are cancelled when it is
        closed. Raises ValueError and TypeError for the arguments, and as `submit`.
        """
        if whole("chunksize", chunksize) < 1:
            raise ValueError(f"chunksize must be 1 or more, not {chunksize}")
        if buffersize is not None and whole("buffersize", buffersize) < 1:
            raise ValueError(f"buffersize must be None, or 1 or more, not {buffersize}")
        if progress not in (None, "text"):
            raise ValueError(f'progress must be None or "text", not {progress!r}')
        if timeout is not None and math.isnan(timeout := number("timeout", timeout)):
            raise ValueError("timeout must be None or a number of seconds, not NaN")
        calls = zip(*iterables, strict=False)
        from shmq.pool import mapping

        return mapping.run(self, fn, calls, timeout, chunksize, buffersize, progress is not None)

    # ---- ending ----

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks, and end the workers when all tasks are done. A durable pool's own
        workers end when each has done the task in hand; the other tasks stay for other workers.

        wait: return when the workers have ended and their memory is free. cancel_futures: cancel
        the tasks that no worker has yet; of a durable pool, those of all submitters. Outcomes that
        were not collected stay with their futures.
        """
        with self._lock:
            self._ended = self._ended or "cannot schedule new futures after shutdown of this pool"
            crew, site, feeder = self._crew, self._site, self._feeder
            if cancel_futures and site is not None:
                while self._waiting:
                    self._put(_key_of(self._waiting.popleft()), site.outcomes.cancelled)
        if site is not None and cancel_futures:
            self._cancel_all(site)
        with self._lock:
            if crew is not None and self._feeder is None:
                crew.stop()
        if feeder is not None and wait:
            feeder.join()
        if crew is not None and wait:
            crew.join()

    def terminate_workers(self) -> None:
        """End all workers by SIGTERM at once. Tasks that are not done raise BrokenProcessPool, and
        those of a durable pool go to other workers."""
        self._force(signal.SIGTERM)

    def kill_workers(self) -> None:
        """End all workers by SIGKILL at once. Otherwise as `terminate_workers`."""
        self._force(signal.SIGKILL)

    def _force(self, number: int) -> None:
        with self._lock:
            self._ended = self._ended or "the workers of this Executor were ended"
            self._waiting.clear()
            crew = self._crew
        if crew is not None:
            crew.kill(number)
            crew.join()

    def _cancel_all(self, site: Site) -> None:
        """Take all tasks that wait, and make them cancelled."""
        stops = 0
        with (
            contextlib.suppress(ShmqError),
            site.broker.consumer(site.place.topic, CHANNEL, _BATCH, None) as taker,
        ):
            while batch := taker.take_many(_BATCH, 0):
                for message in batch:
                    if not message.sealed:
                        refuse(message)
                        continue
                    key = message.body[:KEY_BYTES]
                    if key == STOP:
                        stops += 1
                    else:
                        self._put(key, site.outcomes.cancelled)
                batch.finish()
            for _ in range(stops):  # of an earlier shutdown, behind the tasks
                site.producer.publish(STOP)

    # ---- tasks of others ----

    def future(self, task_id: str) -> Future[Any]:
        """Return a future for a task of a durable pool that this or another process submitted.

        task_id: `Future.id`. The first future that gets the outcome has it: others wait on. Raises
        BadArgument if the text is no id, ValueError if the pool is private, and as `submit`.
        """
        if not self.durable:
            raise ValueError(
                "only a durable pool's tasks have futures in other processes: make the Executor "
                "with `instance` or `broker`"
            )
        key = task_id.encode()
        if len(key) != KEY_BYTES or not key.isalnum():
            raise BadArgument(f"{task_id!r} is not the id of a task: use `Future.id`")
        return Future(self._inbox or self._open(), key)


def _key_of(task: bytes | objects.Packed) -> bytes:
    return bytes((task if isinstance(task, bytes) else task.joined())[:KEY_BYTES])


def _is_pending(future: weakref.ref[Future[Any]]) -> bool:
    found = future()
    return found is not None and found._state == PENDING


def _is_the_objects(exc: BaseException) -> bool:
    """Whether an error of pickling belongs to the object, for example to a `__reduce__` that calls
    `sys.exit`. Ctrl-C, and what the handler of a signal raises, belong to the program."""
    if isinstance(exc, Exception):
        return True
    if isinstance(exc, KeyboardInterrupt):
        return False
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(getattr(each, "__func__", each), "__code__", None) for each in handlers}
    return not any(frame.f_code in codes for frame, _ in traceback.walk_tb(exc.__traceback__))


def _check_threads() -> None:
    """Raise ShmqError if threads are greenlets: that which starts the workers would never run while
    a result is awaited in shared memory."""
    if greenlets.are_threads():
        raise ShmqError(
            "start the workers of an Executor: gevent or eventlet has patched `threading`, and "
            "greenlets cannot wait for shared memory; patch with thread=False, or run the workers "
            "by `shmq worker` and make the Executor with instance="
        )


# ---- the end of processes ----

_alive: weakref.WeakSet[Executor] = weakref.WeakSet()


def _end(executor: weakref.ref[Executor], crew: Crew | None) -> None:
    """The interpreter ends: have all tasks done first."""
    found = executor()
    if found is not None:
        found._ended = found._ended or "cannot schedule new futures after interpreter shutdown"
        found.shutdown()
    elif crew is not None:
        crew.stop()
        crew.join()


def _in_child() -> None:
    """A forked child, for example a worker, has no part in the pool of its parent. It may submit to
    a durable one, which it opens by itself."""
    for executor in list(_alive):
        was_open = executor._site is not None
        executor._begin()
        if was_open and not executor.durable:
            executor._ended = (
                "this Executor belongs to the process that forked this one: make another one here"
            )


os.register_at_fork(after_in_child=_in_child)
