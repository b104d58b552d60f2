"""Queues between processes with the methods and exceptions of `multiprocessing`'s."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import queue
import secrets
import time
from collections.abc import Callable, Iterator
from multiprocessing import context
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, NoReturn, Self, overload

from shmq import greenlets
from shmq.arguments import number, whole
from shmq.client import Message
from shmq.errors import MessageTooBig, NotInFlight, ShutDown
from shmq.names import check_name
from shmq.objects import Packed, loads_sealed, pack, publish, spare
from shmq.patience import Patience
from shmq.queues import tree
from shmq.queues.hold import delete_dropped
from shmq.queues.item import Item, T, value_of
from shmq.queues.mine import Mine
from shmq.queues.place import Place
from shmq.seal import refuse

if TYPE_CHECKING:
    from shmq.broker import Broker
    from shmq.client import Consumer, Producer

#: Seconds that a thread which waits for an item sleeps before it looks whether the queue was shut.
_SLICE: Final = 0.25
#: Seconds between two looks of `join`: the first, and the most.
_JOIN_FIRST: Final = 0.0005
_JOIN_MOST: Final = 0.02

_numbers = itertools.count()


class _Ends:
    """Both ends of a queue in one process: a producer and a consumer that are opened when they are
    first used. `_publish`, `_take` and `_hold` are their methods, so that a call costs no more than
    that; before, they are functions that do nothing and so lead to the slow paths. A `__getattr__`
    in their place would slow down each look for an attribute."""

    __slots__ = (
        "__weakref__",
        "_closed",
        "_consumer",
        "_hold",
        "_named",
        "_place",
        "_producer",
        "_publish",
        "_take",
        "_writable",
    )
    _when_closed: ClassVar[type[Exception]] = ValueError
    _place: Place
    _named: bool
    _writable: bool
    _closed: bool
    _publish: Callable[[list[Any], object], Any]
    _take: Callable[..., bytes | Message | None]
    _hold: Callable[..., Message | None]
    _producer: Producer | None
    _consumer: Consumer | None

    def __init__(
        self, maxsize: int, broker: Broker | None, name: str | None, writable: bool = False
    ) -> None:
        most = 0 if _is_none(maxsize) else whole("maxsize", maxsize)
        topic = _unique() if name is None else check_name(name, "queue")
        delete_dropped()
        place = Place(tree.broker() if broker is None else broker, topic, name is not None)
        place.create(most)
        self.__setstate__((place, name is not None, writable))

    def _writer(self) -> Producer:
        """The producer, which is opened at the first call."""
        if self._producer is None:
            self._producer = self._place.producer()
            if not greenlets.are_threads():  # otherwise the slow path waits for room
                self._publish = self._producer.publish_object
        return self._producer

    def _reader(self) -> Consumer:
        """The consumer, which is opened at the first call."""
        if self._consumer is None:
            self._consumer = self._place.consumer()
            self._take = greenlets.patient(self._consumer.take_body)
            self._hold = greenlets.patient(self._consumer.take)
        return self._consumer

    def __getstate__(self) -> tuple[Place, bool, bool]:
        if not self._named:
            context.assert_spawning(self)
        return self._place, self._named, self._writable

    def __setstate__(self, state: tuple[Place, bool, bool]) -> None:
        self._place, self._named, self._writable = state
        self._closed = False
        self._publish = self._take = self._hold = _unopened
        self._producer = self._consumer = None

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<shmq.{type(self).__name__} {self.name!r} on {self._place.instance!r}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The name under which other processes of the broker find the queue. It is also the name of
        its topic."""
        return self._place.topic

    def empty(self) -> bool:
        """Return True if no item waits. Another process may put or get one at any time. Raises
        Gone if the broker has ended and, as `multiprocessing` does, OSError after the `close` of a
        process that has put something, or of a SimpleQueue."""
        if self._closed and (self._producer is not None or self._when_closed is OSError):
            raise OSError(f"{self!r} is closed in this process")
        return self._place.size() == 0

    def close(self) -> None:
        """Use the queue no more in this process: `put` and `get` raise ValueError from now on.

        Other processes go on, and what was put stays. Items that this process got and has not
        finished go back to the queue. May be called again."""
        self._closed = True
        self._publish = self._take = self._hold = functools.partial(_refuse, self._when_closed)
        if self._consumer is not None:
            self._consumer.close()

    # ---- the slow paths ----

    def _put(self, obj: object, pickled: Any, block: bool, timeout: float | None) -> None:
        """Put a large object, or one that must not wait for ever. pickled: the pickler that has it
        already, or what is false."""
        if self._closed:
            _refuse(self._when_closed)
        wait = 0.0 if not block else None
        if block and timeout is not None:
            wait = max(number("timeout", timeout), 0.0)
        packed = Packed(b"", *pickled[2:]) if pickled else pack(obj)
        writer = self._writer()
        if self._publish is _unopened:  # for the sake of greenlets
            greenlets.until_there_is_room(functools.partial(publish, writer, packed), wait)
        else:
            publish(writer, packed, wait)

    def _next(self, take: Callable[[float], Any], block: bool, deadline: float | None) -> Any:
        """The next body or message, after a first look has found none. Raises queue.Empty and
        ShutDown. A long wait for what this program itself, or another, has to give back is said in
        the log."""
        patience = Patience()
        while True:
            left = 0.0 if not block else _SLICE
            if block and deadline is not None:
                left = max(min(deadline - time.monotonic(), _SLICE), 0.0)
            shut = self._place.is_shut()  # before the look: nothing is put after it
            found = take(0.0 if shut else left)
            if found is not None:
                return found
            if shut:
                raise ShutDown(f"get from {self!r}: it was shut down, and nothing is left in it")
            if left < _SLICE:
                raise queue.Empty
            if why := self._place.held_up():
                patience.refused(f"get from {self!r}: {why}")
            else:
                patience.over()

    def _received(self, found: bytes | Message | None, block: bool, timeout: float | None) -> Any:
        """The item in a body or message, which is finished. found: None if the first look found
        none, or there was none yet. The timeout counts only if there is no item."""
        self._reader()
        take = self._take
        found = found or take(0)
        deadline = None
        while True:
            if found is None:
                deadline = deadline or _deadline(block, timeout)
                found = self._next(take, block, deadline)
            body: bytes | Message = found
            if isinstance(body, bytes):
                return loads_sealed(body)
            if body.sealed:
                break
            refuse(body)
            found = None
        view = body.view
        with contextlib.suppress(NotInFlight):  # `shutdown` has dropped it meanwhile
            body.finish()
        return value_of(body, self._writable, self._place, view)


class SimpleQueue(_Ends, Generic[T]):
    """A queue with the methods of `multiprocessing.SimpleQueue`, in shared memory: `put`, `get`,
    `empty` and `close`. `Queue` says what holds for all queues of shmq. After `close` they raise
    OSError.

    broker, name: as of `Queue`.
    """

    _when_closed = OSError

    def __init__(self, *, broker: Broker | None = None, name: str | None = None) -> None:
        super().__init__(0, broker, name)

    def put(self, obj: T) -> None:
        """Put an object into the queue; when the call returns any process may get it. It waits only
        while memory is full. Raises what pickling raises, OSError after `close`, and Gone."""
        done = self._publish(spare, obj)
        if done is not True:
            self._put(obj, done, True, None)

    def get(self) -> T:
        """Remove and return the next item; wait until there is one. Raises OSError after `close`,
        and Gone."""
        body = self._take(_SLICE)
        if type(body) is bytes:
            return loads_sealed(body)  # type: ignore[no-any-return]
        return self._received(body, True, None)  # type: ignore[no-any-return]


class Queue(_Ends, Generic[T]):
    """A queue with the methods of `multiprocessing.Queue`, in shared memory.

    maxsize: how many items may wait in the queue; 0: as many as memory holds. `put` waits for room,
    and never touches a disk.
    broker: the broker that holds the queue. None: one that this process and its children share. It
    starts with the first queue, ends with the process that made that one, and leaves nothing
    behind, however the processes end.
    name: the same name is the same queue in every process of the broker; a queue that exists keeps
    its maxsize. Such a queue can be pickled at any time. One without a name can be inherited by a
    forked child and passed to a child that is being started, as those of `multiprocessing` can.
    writable: arrays and tables are copies that may be changed in place, instead of read-only views;
    a copy of the queue in a child that it was passed to does the same.
    When no process has it any more, it is deleted within seconds, and what is in it is lost. With a
    `broker` of another user, the process that made it deletes it when it makes another queue.

    An item may be any object that `multiprocessing` can pickle. Arrays and Arrow tables of 64 KiB
    and more are written once, into shared memory, and `get` returns read-only views of it; the
    memory is free when the last of them is gone. A forked child must not use views that its parent
    got. There is no thread behind the queue: when `put` returns, the item is in it, and survives
    this process.

    Items are got in the order in which they were put. An item belongs to the process that got it,
    as with `multiprocessing`. With `get(ack=True)` and `item()` it belongs to the queue until it is
    done; if its process dies, it comes back within milliseconds, before those that wait.

    Raises BadName, and ShmqError if the broker does not start.
    """

    def __init__(
        self,
        maxsize: int = 0,
        *,
        broker: Broker | None = None,
        name: str | None = None,
        writable: bool = False,
    ) -> None:
        super().__init__(maxsize, broker, name, writable)

    # ---- items ----

    def put(self, obj: T, block: bool = True, timeout: float | None = None) -> None:
        """Put an object into the queue; when the call returns any process may get it.

        block: wait while the queue is full. timeout: for so many seconds at most; None: no limit.

        Raises queue.Full (shmq.Full) if there was no room in time, ShutDown after `shutdown`,
        ValueError after `close`, MessageTooBig if the object can never fit in memory, Gone if the
        broker has ended, and what pickling raises, in this call.
        """
        try:
            done = self._publish(spare, obj) if timeout is None and block else False
            if done is not True:
                self._put(obj, done, block, timeout)
        except MessageTooBig:
            if self._place.is_shut():
                raise ShutDown(f"put into {self!r}: it was shut down") from None
            raise

    def put_nowait(self, obj: T) -> None:
        """Like `put(obj, block=False)`."""
        self.put(obj, False)

    @overload
    def get(
        self, block: bool = True, timeout: float | None = None, *, ack: Literal[False] = False
    ) -> T: ...

    @overload
    def get(
        self, block: bool = True, timeout: float | None = None, *, ack: Literal[True]
    ) -> Item[T]: ...

    @overload
    def get(
        self, block: bool = True, timeout: float | None = None, *, ack: bool
    ) -> T | Item[T]: ...

    def get(self, block: bool = True, timeout: float | None = None, *, ack: bool = False) -> Any:
        """Remove and return the next item.

        block: wait until there is one. timeout: for so many seconds at most; None: no limit.
        ack: return an `Item`, which stays the queue's until its `done()` is called: it comes back
        if this process dies, or calls `requeue()`.

        Raises queue.Empty if there was no item in time, ShutDown if the queue was shut down and has
        no item, ValueError after `close`, Gone if the broker has ended, and what unpickling raises.
        """
        if ack:
            return Item(self._held(block, timeout), self, self._place, self._writable)
        body = self._take(_SLICE if timeout is None and block else 0)
        if type(body) is bytes:
            return loads_sealed(body)
        return self._received(body, block, timeout)

    def get_nowait(self) -> T:
        """Like `get(block=False)`."""
        return self.get(False)

    @contextlib.contextmanager
    def item(self, timeout: float | None = None) -> Iterator[T]:
        """A context manager that gets the next item and yields it: `with queue.item() as job:`.

        At the end of the block the item is done. If the block raises, it goes back to the queue,
        behind those that wait; if this process dies in the block, it is the next that somebody
        gets. timeout: seconds to wait for an item; None: no limit. Raises as `get`.
        """
        with self.get(True, timeout, ack=True) as value:
            yield value

    def _held(self, block: bool, timeout: float | None) -> Message:
        """The message of the next item, which is in flight to this process."""
        if self._closed:
            _refuse(self._when_closed)
        self._reader()
        take = self._hold
        found = take(_SLICE if timeout is None and block else 0)
        deadline = None
        while True:
            if found is None:
                deadline = deadline or _deadline(block, timeout)
                found = self._next(take, block, deadline)
            message: Message = found
            if message.sealed:
                return message
            refuse(message)
            found = None

    # ---- state ----

    def qsize(self) -> int:
        """Return how many items wait, without those that were got with `ack` and are not done.
        Another process may change it at any time. Raises Gone."""
        return self._place.size()

    def full(self) -> bool:
        """Return True if `maxsize` items wait. Raises Gone."""
        maxsize = self._place.maxsize()
        return 0 < maxsize <= self._place.size()

    @property
    def is_shutdown(self) -> bool:
        """Whether a process has called `shutdown`; as of `queue.Queue` in Python 3.13."""
        return self._place.is_shut()

    def shutdown(self, immediate: bool = False) -> None:
        """Shut the queue down for all processes, as `queue.Queue.shutdown` of Python 3.13 does.

        `put` raises ShutDown from now on, also where it waits for room. `get` raises it as soon as
        no item waits; threads that wait in it notice within a quarter of a second. immediate: drop
        the items that wait, as if they had been got and, in a JoinableQueue, done.
        """
        self._place.shut()
        if immediate:
            with self._place.consumer() as consumer:
                while batch := consumer.take_many(1000, 0):
                    batch.finish()

    def join_thread(self) -> None:
        """Do nothing: `put` is done when it returns, so there is no thread to wait for."""

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread that could delay the end of this process."""


class JoinableQueue(Queue[T]):
    """A Queue that knows which items are done, with the methods of `multiprocessing.JoinableQueue`.

    An item that was got stays the queue's until the same process has called `task_done` for it. If
    the process dies before, the item comes back, and `join` waits for that too. If the process ends
    in order, or closes or drops the queue, the items that it got are done.
    """

    _mine: Mine

    def __setstate__(self, state: tuple[Place, bool, bool]) -> None:
        super().__setstate__(state)
        self._mine = Mine()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never made
            self._mine.finish()

    @overload
    def get(
        self, block: bool = True, timeout: float | None = None, *, ack: Literal[False] = False
    ) -> T: ...

    @overload
    def get(
        self, block: bool = True, timeout: float | None = None, *, ack: Literal[True]
    ) -> Item[T]: ...

    @overload
    def get(
        self, block: bool = True, timeout: float | None = None, *, ack: bool
    ) -> T | Item[T]: ...

    def get(self, block: bool = True, timeout: float | None = None, *, ack: bool = False) -> Any:
        """Return the next item; call `task_done` when the work on it is complete. With ack, call
        the item's `done()` instead. Otherwise as `Queue.get`."""
        message = self._held(block, timeout)
        if ack:
            return Item(message, self, self._place, self._writable)
        self._mine.add(message)
        return value_of(message, self._writable, self._place)

    def close(self) -> None:
        """Use the queue no more in this process. The items that `get` returned are done, those of
        `get(ack=True)` go back. Otherwise as `Queue.close`."""
        self._mine.finish()
        super().close()

    def task_done(self) -> None:
        """Tell the queue that the work on an item is complete: on the one that this thread got
        first of those that it has not told of, or else on one that another thread of this process
        got. Raises ValueError if this process holds no item."""
        if not self._mine.done():
            raise ValueError(
                f"task_done() of {self!r} was called more often than this process got items from it"
            )

    def join(self) -> None:
        """Wait until every item that was put is done. Raises Gone if the broker ends."""
        pause = _JOIN_FIRST
        while self._place.unfinished():
            time.sleep(pause)
            pause = min(pause * 2, _JOIN_MOST)


def _deadline(block: bool, timeout: float | None) -> float | None:
    """The time of the monotonic clock until which a call waits; None: no limit, or not at all.
    Raises TypeError and ValueError for what is no number of seconds."""
    if timeout is None or not block:
        return None
    deadline = time.monotonic() + number("timeout", timeout)
    if math.isnan(deadline):
        raise ValueError("timeout must be a number of seconds, not NaN")
    return deadline


def _is_none(maxsize: int) -> bool:
    """Whether this is no limit, as 0 and all that is less is for `multiprocessing` too."""
    try:
        return maxsize <= 0
    except TypeError:
        return False


def _unique() -> str:
    return f"queue-{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"


def _refuse(error: type[Exception], *args: object) -> NoReturn:
    raise error("this queue is closed in this process; make it again, or close it later")


def _unopened(*args: object) -> None:
    """Stand for `_publish`, `_take` and `_hold` until this process has used the end."""
