"""A broker as a process sees it: embedded (`Broker`) or joined (`attach`)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Literal, Self, TypeVar, Unpack

from shmq import _native, homes, interpreter, layout, ownership, segments, stats
from shmq.client import Batch, Consumer, LeasedBatch, Lessee, Producer
from shmq.client.disk import Files
from shmq.client.handle import Reduction
from shmq.client.lease import READ_BYTES, READ_ROWS, read_lease
from shmq.errors import Gone, LayoutMismatch, NotRunning, ShmqError
from shmq.keywords import Keywords
from shmq.layout import Kind, NativeSource, Peeked, QueueEntry
from shmq.names import check_instance, check_name
from shmq.options import Options, to_ns
from shmq.stats import BrokerStats, ChannelStats

T = TypeVar("T")

_log = logging.getLogger("shmq.broker")

#: How long the supervisor may take to make a topic or channel.
_REQUEST_SECONDS: Final = 10.0
#: How long the end of the interpreter waits behind a stopped process's lock.
_EXIT_PATIENCE_NS: Final = 1_000_000_000
#: How long it may take from its start to the first request, adoption included.
_START_SECONDS: Final = 60.0

_BUS: Final = " (SIGBUS: somebody who may write a segment of it has cut that short)"

_MAX_IN_FLIGHT: Final = 200
_MOST_IN_FLIGHT: Final = (1 << 32) - 1


class Broker:
    """An embedded broker: starts a supervisor process, stops it at the end. A context manager.

    data_path: a directory for what does not fit in memory and for what is left at the end, made
    (0700) if only its last component is missing; None: ~/.local/state/shmq/INSTANCE, the same every
    time for the same name, removed by `close` if no message is left in it (or, if a supervisor of
    this name was killed, the directory that has its files). instance: the name by
    which other processes `attach`; None: SHMQ_INSTANCE, else a unique one. Every option of
    `shmq serve` is a keyword, durations in seconds: `Broker(mem_queue_size=1000, msg_timeout=5)`.

    Raises TypeError for an unknown option, ValueError for a value out of bounds, ShmqError if the
    supervisor does not start (with the last lines it said).

    Any thread may use it. In a forked child it, its producers and its consumers attach anew by
    themselves at their next call; the supervisor stays the parent's. They can be pickled, so handed
    to `multiprocessing.Process` and pools: what comes out attaches by itself, a broker as a joined
    one.

    `instance` is its name on this host. In asyncio, `async with`; publish there with timeout=0, or
    in a thread, as one that waits for room would keep the loop waiting.
    """

    instance: str = ""

    def __init__(
        self,
        data_path: str | os.PathLike[str] | None = None,
        instance: str | None = None,
        **options: Unpack[Keywords],
    ) -> None:
        instance = instance or os.environ.get("SHMQ_INSTANCE") or _unique_instance()
        check_instance(instance)
        options.setdefault("log_level", "warn")
        options.setdefault("audit_log", "")  # nobody reads what its supervisor writes
        options.setdefault("log_prefix", "[shmq] ")
        options.setdefault("tcp_address", "")  # of the gateway: only for who wants it
        options.setdefault("http_address", "")
        options.setdefault("https_address", "")
        if data_path is None:
            # a killed supervisor of this name has its files somewhere already
            left = layout.data_path_left(instance)
            data_path = left if left and not homes.is_own(left, instance) else None
        with _home(instance, data_path) as path:
            chosen = Options.from_keywords(instance=instance, data_path=str(path), **options)
            self._join(instance, _Server(chosen, temporary=data_path is None))

    @classmethod
    def _attached(
        cls, instance: str, kind: Kind = Kind.CLIENT, owner: str | int | None = None
    ) -> Self:
        self = object.__new__(cls)
        self._join(check_instance(instance), None, kind, owner)
        return self

    def _join(
        self,
        instance: str,
        server: _Server | None,
        kind: Kind = Kind.CLIENT,
        owner: str | int | None = None,
    ) -> None:
        self.instance = instance
        """Name of the broker on this host."""
        self.owner = owner
        """The user who was named as its owner in `attach`, or None."""
        self._server = server
        if server is not None:
            server.start()
        try:
            self._attachment = _Attachment(instance, kind, owner)
        except BaseException:
            if server is not None:
                server.stop()
            raise
        # at the interpreter's end: what is in flight goes back at once; a supervisor of ours sees
        # that its starter ended and goes when the last client has
        weakref.finalize(self, self._attachment.abandon)
        if server is not None:
            server.watch()
            weakref.finalize(self, server.abandon).atexit = False

    # ---- life ----

    @property
    def data_path(self) -> Path | None:
        """Where an embedded broker keeps its files; None if it was joined."""
        return None if self._server is None else Path(self._server.options.data_path)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._attachment.closed

    @property
    def ended(self) -> bool:
        """Whether `close` was called or the instance was stopped for good: attach again."""
        try:
            self._source()
        except Gone:
            return True
        return False

    @property
    def limits(self) -> dict[str, int]:
        """What the data path was told: `mem_queue_size`, `arena_size`, ... ; durations in ns."""
        row = self._source().directory.limits
        return {name: int(row[name]) for name in row.dtype.names or ()}

    def supervisor_alive(self) -> bool:
        """Whether a supervisor lives, exactly and at once, also after a `kill -9`."""
        return self._attachment.native().supervisor_alive()

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor, or of the last one."""
        return self._source().directory.read("supervisor_pid")

    def close(self) -> None:
        """Detach: what is in flight goes back to its channels, producers and consumers answer Gone.

        An embedded broker then stops its supervisor and waits until that has flushed everything to
        disk (`on_stop="flush"`). In a forked child only the child's attachment ends. Idempotent.
        """
        self._attachment.close()
        if self._server is not None:
            self._server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        from shmq.client import aio

        await aio.in_thread(self.close)

    def __reduce__(self) -> Reduction:
        return _rejoin, (self.instance, getattr(self, "owner", None))

    def _reduction(self, kind: str, *settings: Any) -> Reduction:
        return _open_again, (self.instance, getattr(self, "owner", None), kind, settings)

    def _lessee_again(
        self, topic: str, channel: str, name: str, lessee: tuple[int, int, int, int]
    ) -> Lessee:
        files = functools.partial(self._files, *lessee[:2])
        return Lessee._same(self._handle(), topic, channel, name, lessee, files)

    def __repr__(self) -> str:
        kind = "joined" if self._server is None else "embedded"
        return f"<shmq.Broker {self.instance!r} {kind}{', closed' if self.closed else ''}>"

    # ---- messages ----

    def producer(self, topic: str) -> Producer:
        """A producer for the topic, which is made if it is missing (nsqd: PUB)."""
        check_name(topic, "topic")
        find = functools.partial(self._topic, topic)
        backlog = functools.partial(self._request, "CREATE_BACKLOG", topic)
        return self._opened(
            find,
            lambda native, index, generation: Producer(
                native, index, generation, topic, backlog, find
            ),
        )

    def consumer(
        self,
        topic: str,
        channel: str,
        max_in_flight: int = _MAX_IN_FLIGHT,
        msg_timeout: float | Literal["server"] | None = "server",
    ) -> Consumer:
        """A consumer of the channel; topic and channel are made if they are missing (nsqd: SUB).

        max_in_flight: how many messages it may hold at a time (nsqd: RDY). msg_timeout: seconds to
        finish one before it is handed out again, at most max_msg_timeout; "server": the broker's
        option of that name (60 s); None: never while this consumer lives.
        """
        check_name(topic, "topic")
        check_name(channel, "channel")
        if not 1 <= _whole("max_in_flight", max_in_flight) <= _MOST_IN_FLIGHT:
            raise ValueError(
                f"max_in_flight must be from 1 to {_MOST_IN_FLIGHT}, not {max_in_flight}"
            )
        timeout = self._message_timeout(msg_timeout)
        find = functools.partial(self._queue, topic, channel)
        return self._opened(
            find,
            lambda native, queue, serial: Consumer(
                native, queue, serial, topic, channel, max_in_flight, timeout, Batch, find
            ),
        )

    # ---- leases ----

    def lessee(
        self,
        topic: str,
        channel: str,
        name: str,
        ttl: float | None = 600.0,
        grace: float | None = None,
        keepalive: bool = False,
    ) -> Lessee:
        """Who holds leases of the channel under a name (1 to 79 bytes); topic and channel are made
        if they are missing. Whoever had the name before is fenced, its open leases are this one's.

        ttl: seconds without a sign of life after which the leases go back to the channel, None:
        never. grace: the same after its process ended or it was closed; None: as ttl. keepalive: a
        thread gives signs of life. ShmqError if 64 other names are taken.
        """
        check_name(topic, "topic")
        check_name(channel, "channel")
        times: list[int] = []
        for label, seconds in (("ttl", ttl), ("grace", ttl if grace is None else grace)):
            if seconds is not None and not 0.001 <= _number(label, seconds) <= 1e9:
                raise ValueError(f"{label} must be None or from 0.001 to 1e9 s, not {seconds}")
            times.append(0 if seconds is None else to_ns(seconds))
        ttl_ns, grace_ns = times

        def opened(native: _native.Broker, queue: int, serial: int) -> Lessee:
            files = functools.partial(self._files, queue, serial)
            return Lessee(
                native, queue, serial, topic, channel, name, ttl_ns, grace_ns, keepalive, files
            )

        return self._opened(functools.partial(self._queue, topic, channel), opened)

    def read_lease(
        self,
        topic: str,
        channel: str,
        lease: int,
        part: int = 0,
        rows: int = READ_ROWS,
        max_bytes: int = READ_BYTES,
    ) -> Iterator[LeasedBatch]:
        """One part of anybody's open lease, in batches, as `Lessee.read_lease`. LeaseLost."""
        native, queue, serial = self._existing_queue(topic, channel)
        files = functools.partial(self._files, queue, serial)
        return read_lease(native, queue, serial, lease, part, files, rows, max_bytes)

    def end_lease(self, topic: str, channel: str, lease: int, requeue: bool) -> int:
        """End anybody's lease: its messages go back to the channel's head, or are finished. How
        many. LeaseLost."""
        native, queue, serial = self._existing_queue(topic, channel)
        return native.lease_end(queue, serial, lease, requeue)

    def _message_timeout(self, seconds: float | str | None) -> int:
        """As the extension takes it: 0 the server's, -1 never."""
        if seconds is None:
            return -1
        if isinstance(seconds, str):
            if seconds != "server":
                raise ValueError(f"msg_timeout must be seconds, None or 'server', not {seconds!r}")
            return 0
        most = int(self._source().directory.limits["max_msg_timeout"])
        if not 0.001 <= _number("msg_timeout", seconds) <= most / 1e9:  # not so for a NaN
            raise ValueError(
                f"msg_timeout must be from 0.001 to {most / 1e9:g} seconds (max_msg_timeout), "
                f"not {seconds}"
            )
        return to_ns(seconds)

    # ---- topics and channels ----

    def create_topic(self, topic: str) -> None:
        """Make the topic if it is missing. NotRunning, BadName."""
        self._topic(check_name(topic, "topic"))

    def create_channel(self, topic: str, channel: str) -> None:
        """Make the channel, and its topic, if they are missing. The first channel of a topic gets
        what was published before; a later one only what comes from now on."""
        self._queue(check_name(topic, "topic"), check_name(channel, "channel"))

    def delete_topic(self, topic: str) -> None:
        """Delete the topic, its channels and all their messages. Gone if there is no such topic."""
        self._existing_topic(topic)
        self._request("DELETE_TOPIC", topic)

    def delete_channel(self, topic: str, channel: str) -> None:
        """Delete the channel and its messages. Gone if there is no such channel."""
        self._existing_queue(topic, channel)
        self._request("DELETE_CHANNEL", topic, channel)

    def pause_topic(self, topic: str) -> None:
        """From now on messages wait in the topic instead of going to its channels."""
        self._pause_topic(topic, True)

    def unpause_topic(self, topic: str) -> None:
        """Messages go to the channels again, those that waited first."""
        self._pause_topic(topic, False)

    def pause_channel(self, topic: str, channel: str) -> None:
        """From now on the channel hands out nothing; what is in flight may still be finished."""
        self._pause_channel(topic, channel, True)

    def unpause_channel(self, topic: str, channel: str) -> None:
        """The channel hands out messages again."""
        self._pause_channel(topic, channel, False)

    def empty_topic(self, topic: str) -> int:
        """Drop what waits in the topic itself, in memory and on disk; its channels keep theirs.
        Returns how many messages."""
        native, index, _ = self._existing_topic(topic)
        backlog = native.find_queue(index, None)
        return 0 if backlog is None else native.empty(*backlog)

    def empty_channel(self, topic: str, channel: str) -> int:
        """Drop everything in the channel: waiting, on disk, in flight, deferred. Returns how many
        messages."""
        native, queue, serial = self._existing_queue(topic, channel)
        return native.empty(queue, serial)

    def _pause_topic(self, topic: str, paused: bool) -> None:
        native, index, generation = self._existing_topic(topic)
        native.pause_topic(index, generation, paused)

    def _pause_channel(self, topic: str, channel: str, paused: bool) -> None:
        native, queue, serial = self._existing_queue(topic, channel)
        native.pause_channel(queue, serial, paused)

    # ---- looking ----

    def peek(
        self, topic: str, channel: str | None, state: str = "ready", n: int = 10
    ) -> list[Peeked]:
        """Up to n messages of the channel that are in memory; changes nothing, takes no lock.

        channel None: the topic's backlog. state: "ready" (in the order of delivery), "back" (those
        of them that were handed out before or come from disk), "in_flight" (by deadline; who holds
        them since when and until when) or "deferred" (by due time). What moves while it is looked
        at is left out.
        """
        check_name(topic, "topic")
        if channel is None:
            native, index, _ = self._existing_topic(topic)
            found = native.find_queue(index, None)
            if found is None:
                return []
            queue, serial = found
        else:
            native, queue, serial = self._existing_queue(topic, channel)
        entry = QueueEntry(queue, serial, 0, channel, False)
        source = self._source()
        return layout.peek(source.queue(entry), state, n, source.directory.clients)

    def channel_stats(self, topic: str, channel: str) -> ChannelStats:
        """Counts of one channel, without its consumers: cheap with any number of others. Gone."""
        _, queue, serial = self._existing_queue(topic, channel)
        view = self._source().queue(QueueEntry(queue, serial, 0, channel, False))
        return stats.read_queue(channel, view)

    def channel_depth(self, topic: str, channel: str) -> int:
        """How many messages of one channel wait, in memory and on disk: that alone, cheap with any
        number of messages. Gone."""
        _, queue, serial = self._existing_queue(topic, channel)
        return stats.depth(self._source().queue(QueueEntry(queue, serial, 0, channel, False)))

    def channel_identity(self, topic: str, channel: str) -> str:
        """Of the channel's memory: another one after it was deleted and made again, or after the
        broker was stopped and started. Lease ids belong to it. Gone."""
        _, _, serial = self._existing_queue(topic, channel)
        made = self._source().directory.header["segment"]["instance"]
        return f"{int(made[0]):016x}-{serial}"

    def stats(self) -> BrokerStats:
        """Counts of all topics, channels and clients; `.to_json()` has nsqd's /stats shape."""
        return stats.collect(self._source(), self.supervisor_alive())

    # ---- the attachment ----

    def _handle(self) -> _native.Broker:
        self._source()
        return self._attachment.native()

    def _source(self) -> NativeSource:
        return self._attachment.source()

    def _files(self, queue: int, serial: int) -> Files:
        source = self._source()
        view = source.queue(QueueEntry(queue, serial, 0, None, False))
        directory = source.directory
        path, most = directory.data_path, directory.limits["max_msg_size"]
        return Files(view, path, int(most))

    def _request(self, kind: str, topic: str, channel: str | None = None) -> None:
        number = layout.constant(kind)
        self._handle().request(number, topic, channel, to_ns(_REQUEST_SECONDS))

    def _opened(
        self,
        find: Callable[[], tuple[_native.Broker, int, int]],
        make: Callable[[_native.Broker, int, int], T],
    ) -> T:
        """`make(*find())`. What was deleted between the two is found anew, and so made anew, for as
        long as a request may take: an ephemeral channel goes whenever its last consumer does."""
        deadline = time.monotonic() + _REQUEST_SECONDS
        before = None
        while True:
            found = find()  # Gone: the broker was closed or stopped
            try:
                return make(*found)
            except Gone:
                # The same once more was not deleted in between: it cannot be used.
                if found == before or time.monotonic() > deadline:
                    raise
                before = found

    def _topic(self, topic: str) -> tuple[_native.Broker, int, int]:
        """(attachment, index, generation) of the topic, made if it is missing."""
        deadline = time.monotonic() + _REQUEST_SECONDS
        while True:
            native = self._handle()
            found = native.find_topic(topic)
            if found is not None:
                return native, *found
            if time.monotonic() > deadline:
                raise Gone(f"topic {topic!r} was deleted each time it was made; try again")
            self._request("CREATE_TOPIC", topic)

    def _queue(self, topic: str, channel: str) -> tuple[_native.Broker, int, int]:
        """(attachment, queue, serial) of the channel, made if it is missing."""
        deadline = time.monotonic() + _REQUEST_SECONDS
        while True:
            native, index, generation = self._topic(topic)
            found = native.find_queue(index, channel)
            # the same topic still, so it was its channel and not that of one in its place
            if found is not None and native.find_topic(topic) == (index, generation):
                return native, *found
            if time.monotonic() > deadline:
                raise Gone(f"{topic}/{channel} was deleted each time it was made; try again")
            if found is None:
                self._request("CREATE_CHANNEL", topic, channel)

    def _existing_topic(self, topic: str) -> tuple[_native.Broker, int, int]:
        native = self._handle()
        found = native.find_topic(check_name(topic, "topic"))
        if found is None:
            raise Gone(f"there is no topic {topic!r} on instance {self.instance!r}")
        return native, *found

    def _existing_queue(self, topic: str, channel: str) -> tuple[_native.Broker, int, int]:
        native, index, _ = self._existing_topic(topic)
        found = native.find_queue(index, check_name(channel, "channel"))
        if found is None:
            raise Gone(f"there is no channel {topic}/{channel} on instance {self.instance!r}")
        return native, *found


def attach(
    instance: str | None = None, timeout: float = 0, owner: str | int | None = None
) -> Broker:
    """Join a running broker.

    instance: its name; None: SHMQ_INSTANCE, else `default`. timeout: seconds to wait for it to come
    up. owner: the user (name or uid) whose broker it may be, beside this process's own user and
    root; None: SHMQ_OWNER, else nobody. Any user may start a broker of any name, and who made the
    shared memory can read and forge all of it, so no other user's is used unless it is named.

    Raises NotRunning, TooManyClients, LayoutMismatch, BadName; ShmqError if its shared memory
    is another user's, with the remedy; ValueError if there is no user `owner`.
    """
    if not _number("timeout", timeout) >= 0:
        raise ValueError(f"timeout must be a number of seconds, 0 or more, not {timeout!r}")
    if owner is not None:
        ownership.uid_of(owner)
    name = check_instance(instance or segments.default_instance())
    return _attach_within(timeout, name, owner=owner)


def _rejoin(instance: str, owner: str | int | None) -> Broker:
    """What a pickled broker becomes: one that is joined, as `attach` does."""
    named: dict[str, Any] = {} if owner is None else {"owner": owner}
    return attach(instance, **named)


def _open_again(
    instance: str, owner: str | int | None, kind: str, settings: tuple[Any, ...]
) -> Producer | Consumer | Lessee:
    """What a pickled handle becomes. All that a process gets of one instance share an attachment,
    which ends with the last of them."""
    broker = _for_handles.get((instance, owner))
    if broker is None or _has_ended(broker):
        broker = _for_handles[instance, owner] = _rejoin(instance, owner)
    if kind == "producer":
        return broker.producer(*settings)
    return broker.consumer(*settings) if kind == "consumer" else broker._lessee_again(*settings)


def _has_ended(broker: Broker) -> bool:
    try:
        return broker.ended
    except Gone:
        return True


_for_handles: weakref.WeakValueDictionary[tuple[str, str | int | None], Broker] = (
    weakref.WeakValueDictionary()
)


def attach_gateway(instance: str, timeout: float) -> Broker:
    """`attach` for a gateway process, which is none of the clients that an embedded broker's
    supervisor lives on for."""
    return _attach_within(timeout, instance, Kind.GATEWAY)


def _attach_within(
    timeout: float, name: str, kind: Kind = Kind.CLIENT, owner: str | int | None = None
) -> Broker:
    deadline = time.monotonic() + timeout
    for pause in _pauses():
        try:
            return Broker._attached(name, kind, owner)
        except ShmqError as exc:
            left = deadline - time.monotonic()
            coming = (
                isinstance(exc, NotRunning)
                or (isinstance(exc, LayoutMismatch) and layout.half_made(name))
                or (isinstance(exc.__cause__, PermissionError) and segments.just_made(name))
            )
            if left <= 0 or not coming:
                raise
            time.sleep(min(pause, left))
    raise AssertionError  # _pauses never ends


def _number(name: str, value: float) -> float:
    """The value of an argument that is seconds. TypeError."""
    try:
        return float(value + 0)
    except TypeError:
        raise TypeError(f"{name} must be a number of seconds, not {value!r}") from None


def _whole(name: str, value: int) -> int:
    """The value of an argument that is a count. TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None


def _pauses() -> Iterator[float]:
    """Seconds between two looks at something that is coming up."""
    yield from (0.002, 0.005, 0.01)
    yield from itertools.repeat(0.02)


class _Attachment:
    """This process's client entry in an instance; in a forked child it is taken anew when used."""

    def __init__(
        self, instance: str, kind: Kind = Kind.CLIENT, owner: str | int | None = None
    ) -> None:
        self._instance = instance
        self._kind = kind
        self._owner = owner
        self._locks: dict[int, threading.Lock] = {}
        self._attached: _native.Broker | None = None
        self._permits: segments.Permits | None = None
        self._views: tuple[_native.Broker, NativeSource] | None = None
        self.closed = False
        self.native()

    def native(self) -> _native.Broker:
        """The extension's handle. Gone after `close`."""
        attached = self._attached
        if attached is not None and not attached.forked:
            return attached
        with self._lock():
            if self.closed:
                raise Gone(f"the broker {self._instance!r} was closed in this process")
            if self._attached is None or self._attached.forked:
                self._attached, self._permits = _attach(self._instance, self._kind, self._owner)
            return self._attached

    def source(self) -> NativeSource:
        """Views of its segments. Gone if the instance was stopped."""
        native = self.native()
        views = self._views
        if views is None or views[0] is not native:
            views = self._views = (native, NativeSource(self._instance, native))
        if views[1].directory.closed:
            raise Gone(f"instance {self._instance!r} was stopped: attach again when it is running")
        return views[1]

    def close(self) -> None:
        """Give back what this process holds, and its entry. Idempotent."""
        self._close(None)

    def abandon(self) -> None:
        """`close` for when nobody can wait: what a stopped process's lock keeps from being given
        back now, the reaper gives back when this process has ended."""
        with contextlib.suppress(_native.Busy):
            self._close(_EXIT_PATIENCE_NS)

    def _close(self, patience: int | None) -> None:
        with self._lock():
            attached, permits = self._attached, self._permits
            self.closed = True
            self._attached = self._permits = self._views = None
        if attached is None:
            return
        mine = not attached.forked
        try:
            attached.detach() if patience is None else attached.detach(patience)
            if permits is not None and mine:
                permits.give()
        finally:
            if permits is not None:
                permits.close()

    def _lock(self) -> threading.Lock:
        """One per process: another thread of the parent may have held its own at the fork."""
        return self._locks.setdefault(_native.fork_generation(), threading.Lock())


def _attach(
    instance: str, kind: Kind, owner: str | int | None
) -> tuple[_native.Broker, segments.Permits]:
    fd = segments.open_directory(instance, owner=owner)
    try:
        owners = frozenset({os.fstat(fd).st_uid})  # everything else is to be the same user's
        try:
            permits = segments.Permits(instance, owners)
        except NotRunning:
            layout.open_readonly(instance, owner)  # says what it is, if it is something else
            raise
        permits.take(0 if kind == Kind.GATEWAY else segments.reserve())
        try:
            opener = functools.partial(segments.open_queue, instance, owners=owners)
            return _native.Broker(fd, opener, int(kind), instance), permits
        except BaseException:
            permits.give()
            permits.close()
            raise
    finally:
        os.close(fd)


# ---- the embedded supervisor ----


class _Server:
    """The supervisor process of an embedded broker: started, watched, started again, stopped.

    Only the process that made it does any of that; in a forked child every method does nothing.
    """

    def __init__(self, options: Options, temporary: bool) -> None:
        self.options = options
        self._temporary = temporary
        self._owner = os.getpid()
        self._stopping = threading.Event()
        self._abandoned = False
        self._lock = threading.Lock()  # of _process
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] = tempfile.TemporaryFile(buffering=0)

    def start(self) -> None:
        """Start it and wait until it answers. ShmqError with its last words if it ends instead."""
        with self._lock:
            process = self._process = self._spawn()
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

    def watch(self) -> None:
        """From now on start it again whenever it ends."""
        threading.Thread(target=self._watch, name="shmq-supervisor", daemon=True).start()

    def stop(self) -> None:
        """SIGTERM, wait for its end, remove a data path of our own if no message is left there."""
        if os.getpid() != self._owner or self._stopping.is_set():
            return
        self._stopping.set()
        with self._lock:
            process = self._process
        assert process is not None
        self._wait_ready(process)  # a signal before it can catch one would end it unflushed
        self._end(process)
        left = segments.list_objects(self.options.instance)
        if left and self.options.on_stop == "flush":  # it died and did not flush; the next one can
            process = self._spawn()
            self._wait_ready(process)
            self._end(process)
            if segments.list_objects(self.options.instance):
                _log.error(
                    "messages of instance %r are left in shared memory: start `shmq serve` with "
                    "this instance and data path to get them%s",
                    self.options.instance,
                    self._last_words(),
                )
        self._clean_up()

    def abandon(self) -> None:
        """SIGTERM, without waiting: the Broker was dropped and not closed. `_watch` cleans up."""
        if os.getpid() == self._owner and not self._stopping.is_set():
            self._abandoned = True
            self._stopping.set()
            with self._lock:
                if self._process is not None:
                    self._process.terminate()

    def _clean_up(self) -> None:
        if self._temporary:
            homes.remove(Path(self.options.data_path))
        self._said.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        words = ["serve", *self.options.to_argv(), f"--starter-pid={self._owner}"]
        return subprocess.Popen(
            interpreter.run_module("shmq", words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,  # Ctrl-C is for the starter, which then stops it
        )

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        process.wait()

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until it answers; False if it ended, or after a long time."""
        deadline = time.monotonic() + _START_SECONDS
        for pause in _pauses():
            if self._answers(process.pid):
                return True
            if process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(pause)
        raise AssertionError  # _pauses never ends

    def _answers(self, pid: int) -> bool:
        """Is it entered in the directory, and is everything there that a client needs?"""
        with contextlib.suppress(ShmqError):  # what is there may be another user's
            directory = layout.open_readonly(self.options.instance).directory
            segments.Permits(self.options.instance).close()
            return directory.read("supervisor_pid") == pid and layout.supervisor_alive(directory)
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
            # the first time at once; one that does not live for seconds is not worth a storm
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
        """What it wrote last, as the end of a sentence."""
        fd = self._said.fileno()
        text = os.pread(fd, 4096, max(os.fstat(fd).st_size - 4096, 0))
        last = text.decode(errors="replace").strip().splitlines()[-8:]
        return "".join(["", *(f"\n    {line}" for line in last)])


@contextlib.contextmanager
def _home(instance: str, data_path: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Where an embedded broker keeps its files; what was made for it goes if its start fails."""
    if data_path is None:
        with homes.opened(instance) as path:
            yield path
    else:
        path = Path(data_path).absolute()
        with homes.made(path):
            yield path


def _unique_instance() -> str:
    return f"embedded-{os.getpid()}-{secrets.token_hex(4)}"
