"""What the connections of one gateway process share: the broker, its producers, and one thread that
waits for all channels that connections are subscribed to.

Everything but the thread runs in the event loop's thread; what may take long is called in a pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shmq import _native, layout
from shmq.audit import note, noted
from shmq.broker import Broker
from shmq.client import Consumer, Producer
from shmq.errors import Gone, ShmqError
from shmq.gateway import auth
from shmq.gateway.login import Logins
from shmq.gateway.protocol import ProtocolError
from shmq.gateway.session import Grant, Session
from shmq.layout import QueueEntry, State
from shmq.options import Options

if TYPE_CHECKING:
    from shmq.gateway.tcp import Connection

_SLICE_NS: Final = 10**9
#: A channel's deletion may be on its way. nsqd tries a second time after 0.1 s. Where many channels
#: come and go, the second try may meet another deletion, so it is tried for as long as making a
#: topic or channel may take.
_EPHEMERAL_RETRY: Final = 0.01
_REQUEST_SECONDS: Final = 10.0
_THREADS: Final = 16
#: Descriptors that TCP connections leave to others: an eighth, but so many at least and at most.
_RESERVE_LEAST: Final = 32
_RESERVE_MOST: Final = 256

_log = logging.getLogger(__name__)


class Hub:
    """One per process; `session.Host` for its sessions."""

    def __init__(self, broker: Broker, options: Options, tls_context: Any = None) -> None:
        self.broker = broker
        self.options = options
        self.tls_context = tls_context
        self.producers: dict[bytes, Producer] = {}
        self.connections: set[Connection] = set()
        self.health = "OK"
        """nsqd's; the supervisor tells."""
        self.new_topic: Callable[[str], Iterable[str]] = lambda topic: ()
        """Channels that the nsqlookupds know of a topic that is about to be made. May take long."""
        self.pool = ThreadPoolExecutor(_THREADS, "gateway")
        self.logins = Logins()
        self.held = 0
        """Bytes that the connections held when they were last asked."""
        self._addresses: Counter[str] = Counter()
        self._files = 0  # descriptors that are no connection's
        self._sheds = False
        self._refused = 0
        self._refused_at = -1.0
        self.sleeper: Sleeper | None = None

    # ---- session.Host ----

    @property
    def has_tls(self) -> bool:
        return self.tls_context is not None

    @property
    def auth_enabled(self) -> bool:
        return bool(self.options.auth_http_address)

    def create_topic(self, topic: str) -> None:
        """Make the topic if it is missing, with the channels that nsqlookupds know."""
        if self.broker._handle().find_topic(topic) is None:
            with noted("create_topic", topic):
                for channel in self.new_topic(topic):
                    self.create_channel(topic, channel)
                self.broker.create_topic(topic)

    def create_channel(self, topic: str, channel: str) -> None:
        """Make the channel if it is missing."""
        with self._new_channel(topic, channel):
            self.broker.create_channel(topic, channel)

    def _new_channel(self, topic: str, channel: str) -> contextlib.AbstractContextManager[None]:
        """Note the creation of a channel inside, if it is missing now. Of two that make it at the
        same moment both are noted."""
        native = self.broker._handle()
        found = native.find_topic(topic)
        if found is not None and native.find_queue(found[0], channel) is not None:
            return contextlib.nullcontext()
        return noted("create_channel", topic, channel)

    def open_producer(self, topic: bytes) -> Producer:
        name = topic.decode()
        self.create_topic(name)
        producer = self.producers[topic] = self.broker.producer(name)
        return producer

    def producer(self, topic: str) -> Producer:
        """As open_producer; the one there is if it is good."""
        found = self.producers.get(topic.encode())
        return found if found is not None else self.open_producer(topic.encode())

    def open_consumer(self, topic: bytes, channel: bytes, msg_timeout: float) -> Consumer:
        deadline = time.monotonic() + _REQUEST_SECONDS
        while True:
            try:
                consumer = self._open_consumer(topic.decode(), channel.decode(), msg_timeout)
                break
            except Gone:  # an ephemeral channel ended with its last client; the next try makes it
                if (
                    time.monotonic() > deadline
                    or self.broker.ended
                    or not self.broker.supervisor_alive()
                ):
                    raise ProtocolError(
                        "E_SUB_FAILED", "SUB failed to deleted topic/channel"
                    ) from None
                time.sleep(_EPHEMERAL_RETRY)
        most = self.options.max_channel_consumers
        if most and self._rank(consumer) >= most:
            consumer.close()
            name = f"{topic.decode()}:{channel.decode()}"
            raise ProtocolError(
                "E_SUB_FAILED", f"SUB failed consumers for {name} exceeds limit of {most}"
            )
        return consumer

    def _open_consumer(self, topic: str, channel: str, msg_timeout: float) -> Consumer:
        self.create_topic(topic)
        with self._new_channel(topic, channel):
            consumer = self.broker.consumer(topic, channel, 1, min(msg_timeout, self._most_timeout))
        try:
            consumer.limit(0)
        except BaseException:
            consumer.close()
            raise
        return consumer

    @property
    def _most_timeout(self) -> float:
        return int(self.broker._source().directory.limits["max_msg_timeout"]) / 1e9

    def _rank(self, consumer: Consumer) -> int:
        """How many consumers of the channel, of whatever process, came before this one."""
        sessions, mine = self._queue(consumer).sessions, consumer.session
        assert mine is not None
        since = sessions["since"]
        others = np.flatnonzero(sessions["client"])
        return sum((int(since[i]), i) < (int(since[mine[2]]), mine[2]) for i in others.tolist())

    def _queue(self, consumer: Consumer) -> layout.QueueView:
        session = consumer.session
        if session is None:
            raise Gone("the consumer was closed")
        entry = QueueEntry(session[0], session[1], 0, consumer.channel, False)
        return self.broker._source().queue(entry)

    def query_auth(self, session: Session, secret: bytes) -> Grant | None:
        grant = auth.query(
            self.options,
            client=session.address,
            remote_ip=session.ip,
            tls=session.tls is not None,
            common_name=session.tls.common_name if session.tls is not None else "",
            secret=secret.decode("utf-8", "replace"),
        )
        if grant is None:
            note("auth", result="refused")
            _log.warning("AUTH: client(%s) was not let in", session.address)
        elif not grant.count:
            note("auth", result="no_authorisations")
            _log.warning("AUTH: client(%s) has no authorisations", session.address)
        return grant

    def no_room(self) -> str:
        if self.health != "OK":
            return self.health.removeprefix("NOK - ")
        if not self.broker.supervisor_alive():
            return "exiting"
        return ""

    def is_in_flight(self, consumer: Consumer, message_id: bytes) -> bool:
        try:
            number = int(message_id, 16)
            if b"%016x" % number != message_id:
                return False
            slots = self._queue(consumer).slots
        except (ValueError, ShmqError):
            return False
        held = layout.state(slots["word"]) == State.INFLIGHT
        return bool(np.any(held & (slots["id"] == np.uint64(number))))

    # ---- connections ----

    def begin(self) -> None:
        """The process is about to serve: what it has open now is not for connections."""
        self._files = len(os.listdir("/proc/self/fd"))

    def enter(self, connection: Connection) -> str:
        """A connection that was accepted. Why it may not stay; empty if it may."""
        ip, options = connection.session.ip, self.options
        most = self._most_connections()
        each = options.max_connections_per_address
        reason = ""
        if len(self.connections) >= most:
            reason = f"connections exceed limit of {most}"
        elif each and ip and self._addresses[ip] >= each:
            reason = f"connections of {ip} exceed limit of {each}"
        if not reason:
            self.connections.add(connection)
            self._addresses[ip] += 1
            return ""
        self._refused += 1
        now = time.monotonic()
        if now - self._refused_at >= 1.0:  # a flood of connections must not flood the log
            address = connection.session.address
            _log.warning("TCP: client(%s) refused (%d so far): %s", address, self._refused, reason)
            self._refused_at = now
        return reason

    def leave(self, connection: Connection) -> None:
        """It has ended, whether it was let in or not."""
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        ip = connection.session.ip
        self._addresses[ip] -= 1
        if not self._addresses[ip]:
            del self._addresses[ip]

    def _most_connections(self) -> int:
        """What is configured, as far as descriptors allow: HTTP, threads and topics that must be
        mapped have theirs. Worked out each time, for the limit of a process may be changed."""
        configured = self.options.max_connections
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return configured or 1 << 30
        reserve = min(max(files // 8, _RESERVE_LEAST), _RESERVE_MOST)
        allowed = max(files - self._files - reserve, 1)
        return min(configured, allowed) if configured else allowed

    def hold(self, more: int) -> None:
        """A connection holds so many bytes more than it did, or fewer. Over the limit the one with
        the most is ended, again and again."""
        self.held += more
        most = self.options.max_buffered_bytes
        if self.held <= most or self._sheds:
            return
        self._sheds = True
        try:
            for connection in self.connections:
                connection.count()
                if self.held > most:
                    connection.trim()
            while self.held > most and self.connections:
                largest = max(self.connections, key=lambda connection: connection.held)
                if not largest.shed(f"buffered bytes exceed limit of {most}"):
                    break  # it has nothing to give
        finally:
            self._sheds = False

    def watch(self, connection: Connection) -> None:
        """Call the connection's `ring` when its channel may have something for it, once."""
        if self.sleeper is None:
            self.sleeper = Sleeper(self.broker, asyncio.get_running_loop())
        self.sleeper.watch(connection.session.consumer, connection)

    def unwatch(self, consumer: Consumer) -> None:
        """Nobody is there any more for the consumer."""
        if self.sleeper is not None:
            self.sleeper.unwatch(consumer)

    def close(self) -> None:
        """Detach: what is in flight goes back."""
        if self.sleeper is not None:
            self.sleeper.close()
        self.logins.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.broker.close()


class Sleeper:
    """The thread. A consumer is watched until it was told once."""

    def __init__(self, broker: Broker, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiter = _native.Waiter(broker._handle())
        self._lock = threading.Lock()
        self._watched: dict[Any, Connection] = {}
        self._seen: dict[Any, Connection] = {}  # what the thread waits for just now
        self._closed = False
        threading.Thread(target=self._run, name="sleeper", daemon=True).start()

    def watch(self, consumer: Any, connection: Connection) -> None:
        with self._lock:
            self._watched[consumer] = connection
            new = consumer not in self._seen
        if new:
            self._waiter.wake()

    def unwatch(self, consumer: Any) -> None:
        with self._lock:
            watched = self._watched.pop(consumer, None) is not None
        if watched:
            self._waiter.wake()  # so that the thread lets go of it

    def close(self) -> None:
        self._closed = True
        self._waiter.wake()

    def _run(self) -> None:
        try:
            while not self._closed:
                with self._lock:
                    self._seen = self._watched.copy()
                consumers = list(self._seen)
                ready = self._waiter.wait(consumers, _native.now() + _SLICE_NS)
                if not ready:
                    continue
                rung = []
                with self._lock:
                    for index in ready:
                        consumer = consumers[index]
                        connection = self._watched.pop(consumer, None)
                        if connection is not None:
                            rung.append(connection)
                        else:
                            self._waiter.pass_on(consumer)
                    self._seen = {}
                if rung:
                    self._loop.call_soon_threadsafe(_ring, rung)
        except (Gone, RuntimeError):  # the broker or the loop was closed
            pass


def _ring(connections: list[Connection]) -> None:
    for connection in connections:
        connection.ring()
