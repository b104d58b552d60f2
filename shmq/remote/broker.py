"""A process's handle to a broker on another host."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from shmq import arguments
from shmq.errors import Gone
from shmq.leased import READ_BYTES, READ_ROWS, checked_secret
from shmq.names import check_name
from shmq.remote.address import Address
from shmq.remote.connection import MOST_BODY, Login
from shmq.remote.connections import Connections
from shmq.remote.consumer import RemoteConsumer
from shmq.remote.counts import ChannelCounts
from shmq.remote.lease import RemoteLeaseHolder
from shmq.remote.producer import RemoteProducer
from shmq.remote.reading import Reader
from shmq.remote.subscription import Subscription
from shmq.remote.writer import Staged, Writer

if TYPE_CHECKING:
    from shmq.remote.rows import RemoteBatch

_MAX_IN_FLIGHT: Final = 200
_MOST_IN_FLIGHT: Final = (1 << 32) - 1
_TIMEOUT: Final = 30.0


class RemoteBroker:
    """A broker on another host, reached through its gateway; returned by `shmq.connect`. A context
    manager. Its methods are those of `Broker`, as far as they make sense over a network.

    Any thread may use it. It can be pickled: the copy connects by itself (with TLS only if it was
    given as True). A call that may be repeated is repeated until `timeout` is over when a
    connection breaks; then it raises Unreachable, which is a NotRunning.
    """

    def __init__(
        self,
        address: str,
        tls: bool | ssl.SSLContext | None = None,
        auth_secret: str | bytes | None = None,
        timeout: float = _TIMEOUT,
        token: str | bytes | None = None,
        secret: str | None = None,
    ) -> None:
        """As `connect`."""
        if token is not None and auth_secret is not None:
            raise ValueError("token and auth_secret are two names for one thing: give one of them")
        shown = _checked_token(auth_secret if token is None else token)
        seconds = arguments.number("timeout", timeout)
        if not seconds > 0:
            raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
        timeout = min(seconds, arguments.LONGEST)
        self.address = str(Address.parse(address))
        """Where the gateway listens: `host:port`."""
        self._secret = secrets.token_hex(16) if secret is None else checked_secret(secret)
        self._settings = (address, tls, shown, timeout, None, self._secret)
        context = ssl.create_default_context() if tls is True else tls or None
        login = Login(context, shown)
        self._connections = Connections(Address.parse(address), login, timeout)
        self._about = self._connections.ask("LINFO")
        largest = self._about["limits"].get("max_msg_size", MOST_BODY)
        self._connections.most_body = max(1, min(largest, MOST_BODY))

    # ---- the instance ----

    @property
    def identity(self) -> str:
        """The identity of the broker's memory when this client connected, `uuid@number`. It is
        another one after the broker was started with fresh memory: no lease of before exists
        then."""
        return str(self._about["memory"])

    def present_identity(self) -> str:
        """The identity of the broker's memory now. Raises Unreachable."""
        return str(self._connections.ask("LINFO")["memory"])

    @property
    def instance(self) -> str:
        """The broker's name on its host."""
        return str(self._about["instance"])

    @property
    def limits(self) -> dict[str, int]:
        """The limits in force, by option name: `mem_queue_size`, `arena_size`, ... Counts, bytes,
        and durations in ns."""
        return {str(name): int(value) for name, value in self._about["limits"].items()}

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._connections.closed

    @property
    def ended(self) -> bool:
        """Whether `close` was called, or the broker has other memory than when this client
        connected. Connect again then. Raises Unreachable if there is no answer."""
        try:
            return self.present_identity() != self.identity
        except Gone:
            return True

    def close(self) -> None:
        """Close the connections and the consumers: their `take` raises Gone, and messages that are
        not answered go back. Leases stay. Idempotent."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        if isinstance(self._settings[1], ssl.SSLContext):
            raise TypeError("a RemoteBroker with an SSLContext cannot be pickled; give tls=True")
        return RemoteBroker, self._settings

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<shmq.RemoteBroker {self.instance!r} at {self.address}{state}>"

    # ---- messages ----

    def producer(self, topic: str) -> RemoteProducer:
        """Return a producer for the topic, which is created if it is missing. Raises BadName,
        Unreachable, Unauthorized, and ShmqError if the broker refuses."""
        self.create_topic(topic)
        return RemoteProducer(self._connections, topic)

    def consumer(
        self,
        topic: str,
        channel: str,
        max_in_flight: int = _MAX_IN_FLIGHT,
        msg_timeout: float | Literal["server"] = "server",
    ) -> RemoteConsumer:
        """Return a consumer of the channel; topic and channel are created if they are missing.

        max_in_flight: the messages it may hold at a time, at most the broker's max_rdy_count.
        msg_timeout: the seconds it has to finish a message; "server": the broker's option. Raises
        BadName, Unreachable, Unauthorized, ValueError, and ShmqError if the broker refuses.
        """
        check_name(topic, "topic")
        check_name(channel, "channel")
        most = arguments.counted("max_in_flight", max_in_flight, _MOST_IN_FLIGHT)
        subscription = Subscription(
            self._connections, (topic, channel), most, _checked_timeout(msg_timeout)
        )
        return RemoteConsumer(subscription, topic, channel)

    # ---- leases ----

    def lease_holder(
        self,
        topic: str,
        channel: str,
        name: str,
        ttl: float | None = 600.0,
        grace: float | None = None,
        keepalive: bool = False,
        resume: tuple[int, int] | None = None,
    ) -> RemoteLeaseHolder:
        """Return a holder of leases of the channel under a name; topic and channel are created if
        they are missing. The arguments are those of `Broker.lease_holder`.

        resume: the `incarnation` of a holder of this name; the new handle is the same holder and
        fences nobody: it is a secret. Only one handle of a holder may lease: a request that is
        repeated might return a lease that another has taken.

        The name is this client's: another one opens it only with the same `secret` (of `connect`),
        as the same user where the broker knows its users, or when it holds nothing any more.

        Raises LeaseFenced if the name was opened since or is another's, BadName, Unreachable,
        Unauthorized, ValueError for the times, and ShmqError if 64 other names are taken, or if too
        many are this client's.
        """
        check_name(topic, "topic")
        check_name(channel, "channel")
        for label, seconds in (("ttl", ttl), ("grace", grace)):
            if seconds is not None and not 0.001 <= arguments.number(label, seconds) <= 1e9:
                raise ValueError(f"{label} must be None or from 0.001 to 1e9 s, not {seconds}")
        times = (ttl, ttl if grace is None else grace)
        return RemoteLeaseHolder(
            self._connections, topic, channel, name, times, keepalive, self._secret, resume
        )

    def lease_holder_if_free(
        self, topic: str, channel: str, name: str, ttl: float | None, keepalive: bool = False
    ) -> RemoteLeaseHolder:
        """`lease_holder`, for the rest of the package, with a grace that is as long as ttl. Raises
        LeaseFenced if the name has an owner that lives, or a lease that a checkpoint names."""
        times = (ttl, ttl)
        return RemoteLeaseHolder(
            self._connections, topic, channel, name, times, keepalive, self._secret, None, True
        )

    def read_lease(
        self,
        topic: str,
        channel: str,
        lease: int,
        part: int = 0,
        rows: int = READ_ROWS,
        max_bytes: int = READ_BYTES,
        properties: bool = False,
        identity: str | None = None,
    ) -> Iterator[RemoteBatch]:
        """Yield one part of an open lease in batches, as `Broker.read_lease` does; a broken
        connection is made again, and reading goes on after the last message. The holder's name must
        have been opened with this client's `secret`, by whichever process.

        identity: of the channel in which the lease was taken; None: the present one. Raises
        MemoryLost if the channel has another identity, Gone if there is no such channel, LeaseLost
        if the lease has ended, LeaseFenced if it is another's, and Unreachable.
        """
        where, which = (topic, channel), (lease, part)
        mine = {"secret": self._secret}
        reader = Reader(
            self._connections, where, which, identity, mine, rows, max_bytes, properties
        )
        return reader.batches()

    # ---- topics and channels ----

    def create_topic(self, topic: str) -> None:
        """Create the topic if it is missing. Raises as `producer`."""
        self._connections.ask("LMAKE", (check_name(topic, "topic"),))

    def create_channel(self, topic: str, channel: str) -> None:
        """Create the channel, and its topic, if they are missing. Raises as `producer`."""
        check_name(topic, "topic")
        self._connections.ask("LMAKE", (topic, check_name(channel, "channel")))

    def channel_identity(self, topic: str, channel: str) -> str:
        """Return the identity of the channel, as `Broker.channel_identity` does. Raises Gone if
        there is no such channel."""
        return str(self._of(topic, channel)["identity"])

    def channel_depth(self, topic: str, channel: str) -> int:
        """Return the number of messages that wait, in memory and on disk. Raises Gone."""
        return int(self._of(topic, channel)["depth"])

    def channel_stats(self, topic: str, channel: str) -> ChannelCounts:
        """Return the counts of one channel. Raises Gone."""
        return ChannelCounts.of(self._of(topic, channel, stats=True).get("stats", {}))

    def _of(self, topic: str, channel: str, stats: bool = False) -> dict[str, Any]:
        check_name(topic, "topic")
        words = (topic, check_name(channel, "channel"))
        return self._connections.ask("LINFO", words, {"stats": stats})

    # ---- staged rows ----

    def stage(self, topic: str, writer: str, epoch: int, bodies: Iterable[Any]) -> Staged | None:
        """Upload bodies that nobody sees before `commit` names them; None if there are none. A task
        that is repeated stages again: each attempt has its own.

        writer: the key of the write, 1 to 200 characters; it is this client's, by its `secret`:
        under another secret the same key is another writer. epoch: rises with each of its commits.
        """
        return self._writer(topic, writer).stage(epoch, bodies)

    def commit(
        self,
        topic: str,
        writer: str,
        epoch: int,
        staged: Sequence[Staged],
        skip: bool = False,
    ) -> int:
        """Publish staged bodies, once for each writer and epoch: a repeated commit goes on after
        the last message that was published. Returns the number that this call published.

        skip: an epoch that was published with other rows, or that is below one that was published,
        counts as published. Else that raises BadArgument, because these rows are not. Raises
        ShmqError if staged bodies are gone.
        """
        return self._writer(topic, writer).commit(epoch, staged, skip)

    def abandon(self, topic: str, writer: str, epoch: int) -> None:
        """Forget what this client's `writer` has staged for an epoch, unless its commit has
        begun."""
        self._writer(topic, writer).abandon(epoch)

    def _writer(self, topic: str, writer: str) -> Writer:
        return Writer(self._connections, topic, writer, self._secret)


def _checked_token(token: str | bytes | None) -> str | bytes | None:
    """The secret for AUTH. Raises TypeError and ValueError if it is none."""
    if token is not None and not isinstance(token, str | bytes):
        raise TypeError(f"token must be str or bytes, not {type(token).__name__}")
    if token is not None and not token:
        raise ValueError("token must not be empty; give None to connect without one")
    return token


def _checked_timeout(value: Any) -> float | None:
    """The message timeout that a consumer asks for, seconds; None: the broker's. Raises
    ValueError."""
    if value == "server":
        return None
    if not isinstance(value, int | float) or not 1 <= value <= arguments.LONGEST:
        raise ValueError(
            "msg_timeout must be 'server', or seconds from 1 to the broker's max_msg_timeout, "
            f"not {value!r}"
        )
    return value


def connect(
    address: str,
    *,
    tls: bool | ssl.SSLContext | None = None,
    token: str | bytes | None = None,
    auth_secret: str | bytes | None = None,
    timeout: float = _TIMEOUT,
    secret: str | None = None,
) -> RemoteBroker:
    """Connect to a broker on another host (or on this one), through its gateway. Needs no extension
    and nothing but the standard library.

    address: `host:port` of the gateway's TCP listener, or the path of its Unix socket.
    tls: True, or a context of `ssl`; None: not encrypted.
    token: what shows who this is, for brokers that ask for AUTH: a token of their access file or
    `NAME:PASSWORD` (docs/access.md), or the secret for their authorisation server. Without TLS it
    can be read on its way.
    auth_secret: the same, by the name that NSQ's libraries have for it.
    timeout: seconds within which a call is answered; calls that may be repeated are repeated
    meanwhile if connections break.
    secret: 16 to 200 characters that only the processes of one program know, and keep. A client
    that has it is this one: it may open the names of its lease holders again, read its leases, and
    repeat its commits. None: a random one for this object and its pickled copies, so that a process
    that comes later cannot go on where this one ended: give one for exactly-once writes.

    Raises Unreachable, Unauthorized, ssl.SSLCertVerificationError, ValueError for the address and
    the secret, and ShmqError if the server there is no gateway of shmq.
    """
    return RemoteBroker(address, tls, auth_secret, timeout, token, secret)
