"""A process's handle to a broker: one that it embeds (`Broker`) or one that it joins (`attach`)."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar, Unpack, overload

from shmq import _native, layout, ownership, shm
from shmq.answers import Answers
from shmq.arguments import LONGEST, counted, delay, number, whole
from shmq.attachment import Attachment, Kept, leave_threads, pauses
from shmq.client import (
    Batch,
    Consumer,
    DeadLetters,
    LeaseHolder,
    MultiConsumer,
    Producer,
    Results,
    lanes,
)
from shmq.client.handle import Reduction, Shown
from shmq.client.many import Missing
from shmq.errors import Gone, NotReady, NotRunning, ShmqError
from shmq.held import Held
from shmq.keywords import Keywords
from shmq.layout import ClientKind
from shmq.lessor import Lessor
from shmq.names import check_instance, check_name, is_pattern
from shmq.option_types import to_ns

if TYPE_CHECKING:
    from shmq.embedded import EmbeddedSupervisor
    from shmq.peek import Peeked
    from shmq.sources import NativeSource
    from shmq.stats import BrokerStats, ChannelStats
    from shmq.views import DirectoryView

T = TypeVar("T")

_MAX_IN_FLIGHT: Final = 200
_MOST_IN_FLIGHT: Final = (1 << 32) - 1


class Broker(Answers, Held, Lessor, metaclass=Shown):
    """An embedded broker: starts a supervisor process, stops it at the end. A context manager.

    data_path: a directory for the messages that do not fit in memory and for those that are left
    at the end. It is created (mode 0700) if only its last component is missing. None means
    ~/.local/state/shmq/INSTANCE, which is the same every time for the same name, or, if a
    supervisor of this name was killed, the directory that has its files. `close` removes a
    directory that was not named if no message is left in it.
    disk: False means that nothing is ever written to a disk: a full topic or channel blocks its
    publishers unless its settings say otherwise, and `close` drops the messages that are left.
    instance: the name by which other processes `attach`. None means SHMQ_INSTANCE, or a unique
    name if that is not set.
    options: every option of `shmq serve`, by its name with underscores, with durations in seconds:
    `Broker(mem_queue_size=1000, msg_timeout=5)`. `shmq.keywords.Keywords` lists them all.

    Raises TypeError for an unknown option, ValueError for a value out of bounds, and ShmqError if
    the supervisor does not start (with the last lines of its log).

    Any thread may use it. In a forked child the broker, its producers and its consumers attach
    again by themselves at their next call; the supervisor stays the parent's. They can be pickled,
    and so passed to `multiprocessing.Process` and to pools: the copy attaches by itself, the copy
    of a broker as a joined one.

    `instance` is the broker's name on this host. In asyncio use `async with`. Publish there with
    `publish_async`, because a call of `publish` that waits for room blocks the loop.
    """

    _internal = frozenset(
        {
            "check_free",
            "check_reader",
            "consumer_type",
            "directory",
            "join",
            "keep",
            "lane",
            "lease_holder_again",
            "lease_holder_for",
            "lease_holder_if_free",
            "lease_holder_known",
            "lease_owner",
            "leases_returned",
            "max_msg_size",
            "native",
            "owned",
            "producer_type",
            "reduction",
            "reply_store",
            "views",
        }
    )
    instance: str = ""
    #: The classes of the producers and consumers that it makes; `shmq.otel` sets others.
    producer_type: type[Producer] = Producer
    consumer_type: type[Consumer] = Consumer

    def __init__(
        self,
        data_path: str | os.PathLike[str] | None = None,
        instance: str | None = None,
        disk: bool = True,
        **options: Unpack[Keywords],
    ) -> None:
        from shmq import embedded, homes

        instance = instance or os.environ.get("SHMQ_INSTANCE") or embedded.unique_instance()
        check_instance(instance)
        if data_path is None and disk:
            from shmq import sources

            # if a supervisor of this name was killed, its files are in the directory it used
            left = sources.data_path_left(instance)
            data_path = left if left and not homes.is_own(left, instance) else None
        place = embedded.data_path_of if disk else embedded.memory_path
        with place(instance, data_path) as path:
            chosen = embedded.options_of(instance, path, disk, options)
            server = embedded.EmbeddedSupervisor(chosen, data_path is None, not disk)
            self._join(instance, server)

    @classmethod
    def owned(cls, instance: str, **options: Unpack[Keywords]) -> Self:
        """An embedded broker without a disk that ends with this process, even if others are
        attached, for the rest of the package."""
        from shmq import embedded

        self = object.__new__(cls)
        chosen = embedded.options_of(instance, embedded.owned_path(), False, options)
        self._join(instance, embedded.EmbeddedSupervisor(chosen, False, owned=True))
        return self

    @classmethod
    def _attached(
        cls, instance: str, kind: ClientKind = ClientKind.CLIENT, owner: str | int | None = None
    ) -> Self:
        self = object.__new__(cls)
        self._join(check_instance(instance), None, kind, owner)
        return self

    def _join(
        self,
        instance: str,
        server: EmbeddedSupervisor | None,
        kind: ClientKind = ClientKind.CLIENT,
        owner: str | int | None = None,
    ) -> None:
        self.instance = instance
        """Name of the broker on this host."""
        self.owner = owner
        """The user who was named as its owner in `attach`, or None."""
        self._server = server
        self._answers_begin()
        if server is not None:
            server.start()
        try:
            self._attachment = Attachment(instance, kind, owner)
        except BaseException:
            if server is not None:
                server.stop()
            raise
        # At the interpreter's end the messages in flight go back at once. A supervisor of ours
        # sees that its parent ended, and ends after the last client.
        weakref.finalize(self, self._attachment.abandon)
        leave_threads()
        if server is not None:
            server.watch()
            weakref.finalize(self, server.abandon).atexit = False

    # ---- life ----

    @property
    def data_path(self) -> Path | None:
        """The directory where an embedded broker keeps its files; None if it was joined."""
        return None if self._server is None else Path(self._server.options.data_path)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._attachment.closed

    @property
    def ended(self) -> bool:
        """Whether `close` was called or the instance was stopped for good. Attach again then."""
        try:
            self.native()
        except Gone:
            return True
        return False

    @property
    def limits(self) -> dict[str, int]:
        """The limits in force, by option name: `mem_queue_size`, `arena_size`, ... Counts, bytes,
        and durations in ns. Raises Gone."""
        row = self.views().directory.limits
        return {name: int(row[name]) for name in row.dtype.names or ()}

    def supervisor_alive(self) -> bool:
        """Returns True if a supervisor lives: exactly and without delay, also after a `kill -9`.
        Raises Gone after `close`."""
        return self._attachment.native().supervisor_alive()

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor, or of the last one if none lives. Raises Gone."""
        return self.views().directory.read("supervisor_pid")

    def close(self) -> None:
        """Detach: messages in flight go back to their channels, and the producers and consumers
        raise Gone from then on.

        An embedded broker then stops its supervisor and waits until it has flushed everything to
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

    def reduction(self, kind: str, *settings: Any) -> Reduction:
        """A call that makes the same handle again, in this process or another; for `pickle`."""
        return _open_again, (self.instance, getattr(self, "owner", None), kind, settings)

    def __repr__(self) -> str:
        kind = "joined" if self._server is None else "embedded"
        return f"<shmq.Broker {self.instance!r} {kind}{', closed' if self.closed else ''}>"

    # ---- messages ----

    def producer(self, topic: str) -> Producer:
        """Return a producer for the topic, which is created if it is missing (nsqd: PUB).

        Raises BadName, NotRunning (if the topic must be created and no supervisor lives), Gone,
        and ShmqError if the supervisor refuses or does not answer within 10 s.
        """
        check_name(topic, "topic")
        find = functools.partial(self._topic, topic)
        backlog = functools.partial(self._request, "CREATE_BACKLOG", topic)
        return self._opened(
            find,
            lambda native, index, generation: self.producer_type(
                native, index, generation, topic, backlog, find
            ),
        )

    @overload
    def consumer(
        self,
        topic: str,
        channel: str,
        max_in_flight: int = _MAX_IN_FLIGHT,
        msg_timeout: float | Literal["server"] | None = "server",
    ) -> Consumer: ...

    @overload
    def consumer(
        self,
        topic: list[str] | tuple[str, ...],
        channel: str,
        max_in_flight: int = _MAX_IN_FLIGHT,
        msg_timeout: float | Literal["server"] | None = "server",
        policy: lanes.Policy | None = None,
        weights: Sequence[int] | None = None,
    ) -> MultiConsumer: ...

    @overload
    def consumer(
        self,
        topic: str,
        channel: str,
        max_in_flight: int = _MAX_IN_FLIGHT,
        msg_timeout: float | Literal["server"] | None = "server",
        *,
        policy: lanes.Policy,
    ) -> Consumer | MultiConsumer: ...

    def consumer(
        self,
        topic: str | Sequence[str],
        channel: str,
        max_in_flight: int = _MAX_IN_FLIGHT,
        msg_timeout: float | Literal["server"] | None = "server",
        policy: lanes.Policy | None = None,
        weights: Sequence[int] | None = None,
    ) -> Consumer | MultiConsumer:
        """Return a consumer of the channel; topic and channel are created if they are missing
        (nsqd: SUB).

        topic: the name of a topic. For a list of names, or for a pattern, a MultiConsumer is
        returned, which takes from the channel of that name of each topic. In a pattern `*` stands
        for any characters but a dot, `**` for any characters; a list may have patterns too. A topic
        belongs to the entry that names it, or else to the first pattern that matches.
        policy: which topic of many is next. "fair" (None): they take turns. "strict": one is served
        only while those before it have nothing. "weighted": in the ratio of `weights`, one whole
        number for each entry of the list; None: 8:4:1 for three, else each half of the one before.
        max_in_flight: the number of messages it may hold at a time (nsqd: RDY).
        msg_timeout: the seconds it has to finish a message before the message is delivered again,
        from 0.001 to max_msg_timeout; "server": the broker's option of that name (60 s); None: no
        limit while this consumer lives.

        Raises BadName, NotRunning (if something must be created and no supervisor lives), Gone,
        ShmqError if the supervisor refuses or does not answer within 10 s, and ValueError or
        TypeError for the other arguments.
        """
        plan = lanes.plan(topic, policy, weights)
        check_name(channel, "channel")
        if not 1 <= whole("max_in_flight", max_in_flight) <= _MOST_IN_FLIGHT:
            raise ValueError(
                f"max_in_flight must be from 1 to {_MOST_IN_FLIGHT}, not {max_in_flight}"
            )
        if isinstance(topic, str) and not is_pattern(topic):
            return self.lane(topic, channel, max_in_flight, msg_timeout)
        self._message_timeout(msg_timeout)  # a pattern may match no topic yet
        return MultiConsumer(self, plan, channel, max_in_flight, msg_timeout)

    def lane(
        self,
        topic: str,
        channel: str,
        max_in_flight: int,
        msg_timeout: float | str | None,
        missing: Missing = "create",
    ) -> Consumer:
        """The consumer of one topic, for the rest of the package. missing: "create" creates what is
        missing, "join" the channel alone, "refuse" nothing; they raise Gone otherwise."""
        timeout = self._message_timeout(msg_timeout)
        finders = {"create": self._queue, "join": self._joined, "refuse": self._existing_queue}
        find = functools.partial(finders[missing], topic, channel)
        return self._opened(
            find,
            lambda native, queue, serial: self.consumer_type(
                native, queue, serial, topic, channel, max_in_flight, timeout, Batch, find
            ),
        )

    def join(self, topic: str, channel: str) -> None:
        """Create the channel, but not its topic, for the rest of the package. Waits for the
        supervisor. Raises as `create_channel`, and Gone if there is no such topic."""
        self._joined(topic, channel)

    def _message_timeout(self, seconds: float | str | None) -> int:
        """The timeout in ns as the extension takes it. 0 means the broker's, -1 means none."""
        if seconds is None:
            return -1
        if isinstance(seconds, str):
            if seconds != "server":
                raise ValueError(f"msg_timeout must be seconds, None or 'server', not {seconds!r}")
            return 0
        most = self.limit("max_msg_timeout")
        if not 0.001 <= number("msg_timeout", seconds) <= most / 1e9:  # not so for a NaN
            raise ValueError(
                f"msg_timeout must be from 0.001 to {most / 1e9:g} seconds (max_msg_timeout), "
                f"not {seconds}"
            )
        return to_ns(seconds)

    # ---- topics and channels ----

    def create_topic(self, topic: str) -> None:
        """Create the topic if it is missing. Raises BadName, NotRunning, Gone, and ShmqError if
        the supervisor refuses."""
        self._topic(check_name(topic, "topic"))

    def create_channel(self, topic: str, channel: str) -> None:
        """Create the channel, and its topic, if they are missing. The first channel of a topic
        gets the messages published before; a later one gets only those published from now on.
        Raises as `create_topic`."""
        self._queue(check_name(topic, "topic"), check_name(channel, "channel"))

    def delete_topic(self, topic: str) -> None:
        """Delete the topic, its channels and all their messages. Raises Gone if there is no such
        topic, BadName, and NotRunning."""
        self._existing_topic(topic)
        self._request("DELETE_TOPIC", topic)

    def delete_channel(self, topic: str, channel: str) -> None:
        """Delete the channel and its messages. Raises Gone if there is no such channel, BadName,
        and NotRunning."""
        self._existing_queue(topic, channel)
        self._request("DELETE_CHANNEL", topic, channel)

    def pause_topic(self, topic: str) -> None:
        """Have messages wait in the topic instead of going to its channels. Raises Gone if there
        is no such topic, and BadName."""
        self._pause_topic(topic, True)

    def unpause_topic(self, topic: str) -> None:
        """Have messages go to the channels again, those that waited first. Raises as
        `pause_topic`."""
        self._pause_topic(topic, False)

    def pause_channel(self, topic: str, channel: str) -> None:
        """Stop deliveries from the channel; messages in flight may still be finished. Raises Gone
        if there is no such channel, and BadName."""
        self._pause_channel(topic, channel, True)

    def unpause_channel(self, topic: str, channel: str) -> None:
        """Have the channel deliver again. Raises as `pause_channel`."""
        self._pause_channel(topic, channel, False)

    def empty_topic(self, topic: str) -> int:
        """Drop the messages that wait in the topic itself, in memory and on disk; its channels
        keep theirs. Returns their number. Raises Gone if there is no such topic, and BadName."""
        native, index, _ = self._existing_topic(topic)
        backlog = native.find_queue(index, None)
        return 0 if backlog is None else native.empty(*backlog)

    def empty_channel(self, topic: str, channel: str) -> int:
        """Drop all messages of the channel: waiting, on disk, in flight and deferred. Returns
        their number. Raises Gone if there is no such channel, and BadName."""
        native, queue, serial = self._existing_queue(topic, channel)
        return native.empty(queue, serial)

    # ---- dead letters ----

    def dead(self, topic: str, channel: str, via: str | None = None) -> DeadLetters:
        """Return the dead letters of a channel. via: the dead topic's channel that holds them;
        None: `dead`, or its only one. Raises Gone if there is no such channel, and BadName."""
        return DeadLetters(self, topic, channel, via)

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
        """Return up to n messages of the channel that are in memory, without taking them. It
        changes nothing and takes no lock; a message that moves while it is read is left out.

        channel: None means the topic's backlog.
        state: "ready" (in the order of delivery), "requeued" (those of the ready messages that
        were delivered before or come from disk), "in_flight" (by deadline, with the consumer that
        holds each) or "deferred" (by due time).

        Raises Gone if there is no such topic or channel, BadName, and ValueError for another
        state.
        """
        check_name(topic, "topic")
        n = counted("n", n, least=0)
        if channel is None:
            native, index, _ = self._existing_topic(topic)
            found = native.find_queue(index, None)
            if found is None:
                return []
            queue, serial = found
        else:
            native, queue, serial = self._existing_queue(topic, channel)
        from shmq import peek

        source = self.views()
        return peek.peek(source.queue_at(queue, serial), state, n, source.directory.clients)

    def channel_stats(self, topic: str, channel: str) -> ChannelStats:
        """Return the counts of one channel, without its consumers. The cost does not depend on the
        number of other channels. Raises Gone if there is no such channel, and BadName."""
        _, queue, serial = self._existing_queue(topic, channel)
        from shmq import stats

        return stats.read_queue(channel, self.views().queue_at(queue, serial))

    def channel_depth(self, topic: str, channel: str) -> int:
        """Return the number of messages of one channel that wait, in memory and on disk. The cost
        does not depend on that number. Raises Gone if there is no such channel, and BadName."""
        _, queue, serial = self._existing_queue(topic, channel)
        from shmq import stats

        return stats.depth(self.views().queue_at(queue, serial))

    @property
    def identity(self) -> str:
        """The identity of the broker's memory. It changes when the broker starts with fresh memory,
        and not when a supervisor takes over. Raises Gone."""
        return self.views().directory.identity

    def channel_identity(self, topic: str, channel: str) -> str:
        """Return the identity of the channel's queue segment. It changes when the channel is
        deleted and created again, and when the broker starts with fresh memory. Lease ids are
        valid only together with it. Raises Gone if there is no such channel, and BadName."""
        _, _, serial = self._existing_queue(topic, channel)
        made = self.views().directory.header["segment"]["instance"]
        return f"{int(made[0]):016x}-{serial}"

    def stats(self) -> BrokerStats:
        """Return the counts of all topics, channels and clients; `to_json()` of the result has the
        shape of nsqd's /stats. Raises Gone."""
        from shmq import stats

        return stats.collect(self.views(), self.supervisor_alive())

    # ---- the attachment ----

    def native(self) -> _native.Broker:
        """The extension's handle, for the rest of the package. Raises Gone if the broker was
        closed or the instance was stopped."""
        native = self._attachment.native()
        if native.stopped:
            self.views()  # raises Gone unless it is still being stopped
        return native

    def _comes_back(self, data_path: str) -> bool:
        ours = self._server is not None and self._server.is_watched
        return ours or super()._comes_back(data_path)

    def limit(self, name: str) -> int:
        """One of `limits`, without numpy, for the rest of the package. Raises as `native`."""
        return layout.number_in(self.native().view(), "directory", "limits", name)

    def views(self) -> NativeSource:
        """Read-only views of the segments, for the rest of the package. Raises Gone if the broker
        was closed or the instance was stopped."""
        return self._attachment.views()

    def keep(self, serial: int) -> Kept | None:
        """Keep the right to open a queue's segment, for the package; as of `Attachment`."""
        return self._attachment.keep(serial)

    def directory(self) -> DirectoryView:
        """A read-only view of the directory, for the rest of the package. Raises Gone."""
        return self.views().directory


def attach(
    instance: str | None = None, timeout: float = 0, owner: str | int | None = None
) -> Broker:
    """Join a running broker.

    instance: its name; None: SHMQ_INSTANCE, or `default` if that is not set.
    timeout: seconds to wait for the broker to start; 0: do not wait.
    owner: the user (name or uid) whose broker it may be, besides this process's own user and root;
    None: SHMQ_OWNER, or nobody if that is not set. Any user may start a broker of any name, and
    the user who created the shared memory can read and forge all of it. So the broker of another
    user is used only if that user is named.

    Raises NotRunning, TooManyClients, LayoutMismatch, BadName, ShmqError (with the remedy) if the
    shared memory belongs to another user, and ValueError if there is no user `owner`.
    """
    seconds = min(delay("timeout", timeout, endless=True), LONGEST)
    if owner is not None:
        ownership.uid_of(owner)
    name = check_instance(instance or shm.default_instance())
    return _attach_within(seconds, name, owner=owner)


def _rejoin(instance: str, owner: str | int | None) -> Broker:
    """The copy of a pickled broker: a joined one, as `attach` returns it."""
    named: dict[str, Any] = {} if owner is None else {"owner": owner}
    return attach(instance, **named)


def _open_again(
    instance: str, owner: str | int | None, kind: str, settings: tuple[Any, ...]
) -> Producer | Consumer | LeaseHolder | Results:
    """The copy of a pickled handle. All copies in one process of one instance's handles share an
    attachment, which ends with the last of them."""
    broker = joined(instance, owner)
    if kind == "producer":
        return broker.producer(*settings)
    if kind == "results":
        return broker.results(*settings)
    return (
        broker.consumer(*settings) if kind == "consumer" else broker.lease_holder_again(*settings)
    )


def joined(instance: str, owner: str | int | None) -> Broker:
    """The attachment that all handles of an instance share in this process, for the rest of the
    package. It ends with the last of them."""
    broker = _for_handles.get((instance, owner))
    if broker is None or _has_ended(broker):
        broker = _for_handles[instance, owner] = _rejoin(instance, owner)
    return broker


def _has_ended(broker: Broker) -> bool:
    try:
        return broker.ended
    except Gone:
        return True


_for_handles: weakref.WeakValueDictionary[tuple[str, str | int | None], Broker] = (
    weakref.WeakValueDictionary()
)


def attach_gateway(instance: str, timeout: float) -> Broker:
    """Like `attach`, as a gateway process: it does not keep an embedded broker's supervisor
    alive."""
    return _attach_within(timeout, instance, ClientKind.GATEWAY)


def _attach_within(
    timeout: float, name: str, kind: ClientKind = ClientKind.CLIENT, owner: str | int | None = None
) -> Broker:
    deadline = time.monotonic() + timeout
    for pause in pauses():
        try:
            return Broker._attached(name, kind, owner)
        except ShmqError as exc:
            left = deadline - time.monotonic()
            coming = isinstance(exc, (NotRunning, NotReady)) or (
                isinstance(exc.__cause__, PermissionError) and shm.just_made(name)
            )
            if left <= 0 or not coming:
                raise
            time.sleep(min(pause, left))
    raise AssertionError  # pauses never ends
