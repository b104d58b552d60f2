"""Publishing to one topic."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias, TypeGuard

from shmq import _native
from shmq.client.handle import Reduction, Shown, home_of, reduction
from shmq.client.properties import Properties, pack_all
from shmq.errors import Gone
from shmq.names import lane_name

if TYPE_CHECKING:
    import numpy as np

    from shmq._native import _Body

#: Distance between two ids of one batch: an id has 54 bits of clock above 10 bits of node id.
ID_STEP: Final = 1 << 10

_Properties: TypeAlias = Properties | Iterable[Properties | None] | None


class _ArrowArray(Protocol):
    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]: ...


class _ArrowStream(Protocol):
    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


#: A column of any library that speaks Arrow's PyCapsule protocol.
_ArrowColumn: TypeAlias = _ArrowArray | _ArrowStream


_Terms: TypeAlias = tuple[float | None, float | None, _Properties, float | None]


def _packed(terms: _Terms, count: int | None = None) -> tuple[Any, ...]:
    """The defer, timeout, properties and ttl of `count` messages as the extension's last arguments,
    which may be left out. count: None if only the extension knows it."""
    defer, timeout, properties, ttl = terms
    if properties is None and ttl is None:
        return () if defer is None and timeout is None else (defer, timeout)
    return defer, timeout, pack_all(properties, count), ttl


def _is_numpy(bodies: object) -> TypeGuard[np.ndarray[Any, Any]]:
    numpy = sys.modules.get("numpy")  # who has an array has imported it
    return numpy is not None and isinstance(bodies, numpy.ndarray)


class Producer(_native.Producer, metaclass=Shown):
    """Publishes to one topic; returned by `Broker.producer`. Any thread may use it.

    `publish(body: Buffer, defer: float | None = None, timeout: float | None = None, properties:
    Mapping[str, str | bytes] | None = None, ttl: float | None = None, priority: str | None = None)
    -> str`: publish one body (bytes or any buffer: bytearray, memoryview, numpy array, Message) to
    every channel of the topic, or to its backlog while it has none, and return its id, 16 hex
    digits. defer: seconds before it may be delivered (at most max_req_timeout). timeout: seconds to
    wait for room; None: no limit; 0: do not wait. properties: values beside the body, at most 4096
    bytes together; a name has 1 to 64 of a-z 0-9 . _ - and does not begin with `shmq-`. ttl:
    seconds, more than 0, from when it may be delivered, after which no channel delivers it; None:
    as the channels' `message_ttl` says; the lower one counts. priority: publish to the topic
    TOPIC.PRIORITY instead, which is created if it is missing; a consumer of both takes them by its
    policy. Raises Full, Rejected, MessageTooBig (the body, or the properties), BadName, BadArgument
    (the body is empty, or deferred for too long, or a property's name is none), Gone, and
    NotRunning (only if the supervisor is needed to create a topic or a backlog queue). nsqd: PUB,
    DPUB.

    `loan(nbytes: int, defer: float | None = None, timeout: float | None = None, zero: bool = True,
    properties: Mapping[str, str | bytes] | None = None) -> Loan`: a context manager that yields
    a writable memoryview in shared memory. It is published at the end of the block, or dropped
    if the block raised. `Loan.truncate(nbytes)` in the block publishes only its first bytes;
    the message still occupies all the memory until it is finished. zero=False does not clear
    the buffer, for callers that write every byte: bytes that are not written show parts of
    other messages.

    It can be pickled: the copy in another process is a producer of its own for the same topic.
    """

    # not in __dict__, which stays empty: to look up a method is faster then
    __slots__ = ("__dict__", "__weakref__", "_home", "_is_sealed", "_priorities")
    _internal = frozenset(
        {"mark", "publish_fixed", "publish_framed", "publish_list", "publish_once", "seal"}
        | {"publish_arrow", "publish_arrow_stream", "publish_object", "publish_run"}
    )

    def __init__(
        self,
        broker: _native.Broker,
        topic: int,
        generation: int,
        name: str,
        on_backlog: Callable[[], None],
        on_forked: Callable[[], tuple[_native.Broker, int, int]],
    ) -> None:
        super().__init__(broker, topic, generation, name, on_backlog, on_forked)
        self._home = home_of(on_forked)
        self._priorities: dict[str, Producer] | None = None
        self._is_sealed = False

    def __reduce__(self) -> Reduction:
        return reduction(self._home, "producer", self.topic)

    def __repr__(self) -> str:
        where = f" on {self._home.instance!r}" if self._home else ""
        return f"<shmq.Producer of {self.topic!r}{where}{', closed' if self.closed else ''}>"

    def publish_many(
        self,
        bodies: Iterable[_Body] | _ArrowColumn,
        defer: float | None = None,
        timeout: float | None = None,
        properties: _Properties = None,
        ttl: float | None = None,
        priority: str | None = None,
    ) -> range:
        """Publish many bodies in order, all or none; nsqd's MPUB.

        bodies: a list, tuple or other iterable of bytes-likes; a numpy array of uint8 with shape
        (messages, bytes of each); or a column of binary or string without nulls of any library that
        speaks Arrow's PyCapsule protocol (a pyarrow Array or ChunkedArray, a Polars Series). defer,
        timeout, ttl (seconds), priority: as in `publish`. properties: one mapping for all messages,
        or a list with a mapping or None for each. Returns the ids as numbers, one for each body:
        `Message.id` is `f"{id:016x}"`.

        Raises as `publish`, and MessageTooBig also if the batch as a whole can never fit in memory,
        or into a channel with `max_messages` or `max_bytes`: then publish fewer at once.
        Raises TypeError or ValueError for anything that is not such an array.
        """
        if priority is not None:
            if self.closed:
                raise Gone(f"publish to {self.topic!r}: the producer was closed")
            return self._lane(priority).publish_many(bodies, defer, timeout, properties, ttl)
        terms = (defer, timeout, properties, ttl)
        if isinstance(bodies, list | tuple):
            first, count = self._list(bodies, terms)
        elif _is_numpy(bodies):
            first, count = self._numpy(bodies, terms)
        elif hasattr(bodies, "__arrow_c_array__") and not isinstance(bodies, _native.Batch):
            first, count = self.publish_arrow(*bodies.__arrow_c_array__(), *_packed(terms))
        elif hasattr(bodies, "__arrow_c_stream__") and not isinstance(bodies, _native.Batch):
            first, count = self.publish_arrow_stream(bodies.__arrow_c_stream__(), *_packed(terms))
        elif isinstance(bodies, str | bytes | bytearray | memoryview):
            raise TypeError("publish_many takes many bodies; use publish for one")
        elif isinstance(bodies, Iterable):
            first, count = self._list(list(bodies), terms)
        else:
            raise TypeError(
                f"publish_many takes an iterable of bodies, not {type(bodies).__name__}"
            )
        return range(first, first + count * ID_STEP, ID_STEP)

    async def publish_async(
        self,
        body: _Body,
        defer: float | None = None,
        timeout: float | None = None,
        properties: Properties | None = None,
        ttl: float | None = None,
        priority: str | None = None,
    ) -> str:
        """Publish in asyncio: as `publish`, but while a channel is full the event loop goes on.
        Raises as `publish`."""
        from shmq.client import aio

        return await aio.publish(
            lambda: self.publish(body, defer, 0, properties, ttl, priority), timeout
        )

    async def publish_many_async(
        self,
        bodies: Iterable[_Body] | _ArrowColumn,
        defer: float | None = None,
        timeout: float | None = None,
        properties: _Properties = None,
        ttl: float | None = None,
        priority: str | None = None,
    ) -> range:
        """Publish many bodies in asyncio: as `publish_many`, but while a channel is full the event
        loop goes on. Raises as `publish_many`."""
        from shmq.client import aio

        batch: Any = bodies
        if not hasattr(batch, "__len__") and not hasattr(batch, "__arrow_c_array__"):
            batch = list(batch)  # an iterator could not be tried twice
        return await aio.publish(
            lambda: self.publish_many(batch, defer, 0, properties, ttl, priority), timeout
        )

    def seal(self) -> None:
        """As of the extension, and its priorities too."""
        super().seal()
        self._is_sealed = True
        for lane in (self._priorities or {}).values():
            lane.seal()

    def _lane(self, priority: str) -> Producer:
        """The producer of the topic for messages of this priority. Raises BadName, Gone, and what
        `Broker.producer` raises."""
        name = lane_name(self.topic, priority)
        found = (self._priorities or {}).get(name)
        if found is not None:
            return found
        if self._home is None:
            raise TypeError("this producer was not made by a Broker, so it has no priorities")
        made: Producer = self._home.producer(name)
        if self._is_sealed:
            made.seal()
        if self._priorities is None:
            self._priorities = {}
        return self._priorities.setdefault(name, made)

    def _list(
        self,
        bodies: list[Any] | tuple[Any, ...],
        terms: _Terms,
    ) -> tuple[int, int]:
        count = len(bodies)
        packed = _packed(terms, count)
        if not bodies:
            return 0, 0
        return self.publish_list(bodies, *packed), count

    def _numpy(
        self,
        rows: np.ndarray[Any, Any],
        terms: _Terms,
    ) -> tuple[int, int]:
        import numpy as np

        if rows.ndim != 2 or rows.dtype != np.uint8:
            raise TypeError(
                f"publish_many takes a numpy array of uint8 with two dimensions (a row is a body), "
                f"not of {rows.dtype} with {rows.ndim}: use array.view(numpy.uint8).reshape(n, -1)"
            )
        count, width = rows.shape
        if not count:
            return 0, 0
        data = np.ascontiguousarray(rows)
        packed = _packed(terms, count)
        return self.publish_fixed(data, count, width, *packed), count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
