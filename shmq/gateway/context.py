"""State that the parts of one gateway process share, and their calls into the broker.

It is used in the event loop's thread, but for the methods that may take long: those are called in
its pool of threads.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import ssl
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, Final

from shmq import audit, layout
from shmq.audit import note, noted
from shmq.broker import Broker
from shmq.client import Consumer, Producer
from shmq.door.brake import Brake
from shmq.door.handshakes import Handshakes
from shmq.errors import Gone, ShmqError
from shmq.gateway import auth
from shmq.gateway.control import Control
from shmq.gateway.host import Client, Grant, Job
from shmq.gateway.lease_desk import LeaseDesk
from shmq.gateway.pools import Pools
from shmq.gateway.protocol import ProtocolError
from shmq.gateway.publish_audit import PublishAudit
from shmq.gateway.rights import Rights
from shmq.gateway.shares import Shares, taken
from shmq.layout import State
from shmq.options import Options
from shmq.seal import check_open
from shmq.users import subject_text

if TYPE_CHECKING:
    from shmq.views import QueueView

#: Seconds between two attempts to subscribe while the channel is being deleted. nsqd makes one more
#: attempt after 0.1 s. If ephemeral channels come and go quickly, the next attempt may meet another
#: deletion, so attempts go on for as long as the creation of a topic or channel may take.
_EPHEMERAL_RETRY: Final = 0.01
_REQUEST_SECONDS: Final = 10.0
_LOOKUP_SECONDS: Final = 15.0

_log = logging.getLogger(__name__)


class Context:
    """The shared state of one process; implements `host.Host` for its sessions."""

    def __init__(
        self,
        options: Options,
        broker: Broker,
        control: Control,
        *,
        ports: dict[str, int],
        start_time: int,
        argv: list[str],
        tls_context: ssl.SSLContext | None,
        rights: Rights | None = None,
    ) -> None:
        """rights: None: by the options. Raises OptionError, OSError."""
        self.options = options
        """The present options; replaced as a whole when they change."""
        self.broker = broker
        self.control = control
        self.ports = ports
        """Kind (tcp, http, https) -> port; -1: a Unix socket, 0: no listener."""
        self.start_time = start_time
        """When the instance started, in Unix seconds."""
        self.argv = argv
        """The command line of the instance."""
        self.tls_context = tls_context
        """The TLS settings of clients' connections; None without a certificate."""
        self.producers: dict[bytes, Producer] = {}
        self.reported_health = "OK"
        """The supervisor's last report."""
        self.pools = Pools()
        self.brake = Brake()
        """The delays of those who show wrong tokens and secrets to this process."""
        self.handshakes = Handshakes()
        """The TLS handshakes with this process that failed."""
        self.rights = rights or Rights(options)
        """The access file: who may do what."""
        self.shares = Shares(
            lambda: taken(self.broker.native().view()), self.has, lambda: self.options.max_topics
        )
        """How many topics and channels each client may make."""
        self.published = PublishAudit(options.audit_publish)
        """The audit of what clients publish."""
        self.leases = LeaseDesk(
            broker, self.create_topic, self.create_channel, layout.VERSION, lambda: self.options
        )

    @property
    def health(self) -> str:
        """The answer to /ping: OK, or NOK and the reason."""
        if not self.broker.supervisor_alive():
            return "NOK - the supervisor is not running"
        return self.reported_health

    async def call(self, call: Callable[..., Any], *args: Any, kind: str = "general") -> Any:
        """Run a call that may take long in a thread. kind: of `pools.KINDS`."""
        run = contextvars.copy_context().run  # the audit log names the client in threads, too
        return await self.pools.of(kind).ask("", functools.partial(run, call, *args))

    def later(self, call: Callable[[], Any]) -> None:
        """Run a call in a thread, and do not wait for it. Raises RuntimeError at the end of the
        process."""
        asked = self.pools.of("close").ask("", call)
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())

    def kind_of(self, topic: bytes) -> str:
        with contextlib.suppress(ShmqError):  # the call itself says what is wrong
            if not self.has_topic(topic.decode()):
                return "topic"
        return "general"

    async def login(self, address: str, job: Job, call: Callable[[], Any]) -> Any:
        """Run the call of a job that checks what a client shows, when its address has its turn.

        Returns its result; None if too many attempts of the address wait already."""
        if not job.proof:
            return await self.pools.of(job.kind).ask(address, call)
        attempt = self.brake.attempt(address, job.proof, job.user)
        if not await attempt.turn():
            return None
        found = await self.pools.of(job.kind).ask(address, call)
        if found is None:
            await attempt.failed()
        else:
            attempt.passed()
        return found

    def close(self) -> None:
        """Detach from the broker: messages in flight return to their channels."""
        self.pools.close()
        self.broker.close()

    # ---- topics and channels; may take long ----

    def has_topic(self, topic: str) -> bool:
        """Returns true if the topic exists."""
        return self.broker.native().find_topic(topic) is not None

    def has(self, topic: str, channel: str = "") -> bool:
        """Returns true if the channel, or (channel empty) the topic, exists."""
        native = self.broker.native()
        found = native.find_topic(topic)
        if found is None or not channel:
            return found is not None
        return native.find_queue(found[0], channel) is not None

    def create_topic(self, topic: str) -> None:
        """Create the topic if it is missing, with the channels that nsqlookupds know. Raises
        TooManyTopics."""
        if not self.has_topic(topic):
            with noted("create_topic", topic):
                quota = self.rights.make_topic(audit.user(), topic, self.has_topic)
                self.shares.topic(topic, quota)
                self._create_channels(topic, self._channels_elsewhere(topic))
                self.broker.create_topic(topic)

    def _create_channels(self, topic: str, channels: list[str]) -> None:
        """Create channels that nsqlookupds have named. One that cannot be made costs no other, and
        the topic is made all the same."""
        for channel in channels:
            try:
                self._create_channel(topic, channel)
            except ShmqError as exc:
                _log.error("channel %s of topic %s, of nsqlookupd: %s", channel, topic, exc)

    def _channels_elsewhere(self, topic: str) -> list[str]:
        """Return the channels that nsqlookupds know of a topic."""
        if not self.options.lookupd_tcp_address:
            return []
        question = {"ask": "lookup", "topic": topic}
        return self.control.ask_from_thread(0, question, _LOOKUP_SECONDS) or []

    def create_channel(self, topic: str, channel: str) -> None:
        """Create the channel, and its topic, if they are missing. Raises NotSealed if the topic is
        that of a pool or a queue, TooManyTopics and TooManyChannels."""
        check_open(self.broker, topic, f"create channel {channel!r}")
        self.create_topic(topic)
        self._create_channel(topic, channel)

    def _create_channel(self, topic: str, channel: str) -> None:
        check_open(self.broker, topic, f"create channel {channel!r}")
        with self._new_channel(topic, channel):
            self.broker.create_channel(topic, channel)

    @contextlib.contextmanager
    def _new_channel(self, topic: str, channel: str) -> Iterator[None]:
        """Count the channel and write its creation to the audit log, if it is missing now. If two
        clients create it at the same time, both are logged. Raises TooManyChannels."""
        if self.has(topic, channel):
            yield
            return
        with noted("create_channel", topic, channel):
            self.shares.channel(topic, channel)
            yield

    # ---- producers ----

    def open_producer(self, topic: bytes) -> Producer:
        name = topic.decode()
        self.create_topic(name)
        producer = self.producers[topic] = self.broker.producer(name)
        return producer

    def producer(self, topic: str) -> Producer:
        """Return the topic's producer; open one if there is none."""
        found = self.producers.get(topic.encode())
        return found if found is not None else self.open_producer(topic.encode())

    def no_room(self) -> str:
        if self.reported_health != "OK":
            return self.reported_health.removeprefix("NOK - ")
        if not self.broker.supervisor_alive():
            return "exiting"
        return ""

    # ---- consumers ----

    def open_consumer(self, topic: bytes, channel: bytes, msg_timeout: float) -> Consumer:
        deadline = time.monotonic() + _REQUEST_SECONDS
        while True:
            try:
                consumer = self._open_consumer(topic.decode(), channel.decode(), msg_timeout)
                break
            except Gone:  # an ephemeral channel went with its last client; try to create it again
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
        check_open(self.broker, topic, "subscribe")
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
        return self.broker.limit("max_msg_timeout") / 1e9

    def _rank(self, consumer: Consumer) -> int:
        """Return how many consumers of the channel, in all processes, are older than this one."""
        sessions, mine = self._queue(consumer).sessions, consumer.session
        assert mine is not None
        since = sessions["since"]
        others = sessions["client"].nonzero()[0].tolist()
        return sum((int(since[i]), i) < (int(since[mine[2]]), mine[2]) for i in others)

    def _queue(self, consumer: Consumer) -> QueueView:
        session = consumer.session
        if session is None:
            raise Gone("the consumer was closed")
        from shmq.views import QueueEntry  # slow to import: numpy

        entry = QueueEntry(session[0], session[1], 0, consumer.channel, False)
        return self.broker.views().queue(entry)

    def is_in_flight(self, consumer: Consumer, message_id: bytes) -> bool:
        try:
            number = int(message_id, 16)
            if b"%016x" % number != message_id:
                return False
            slots = self._queue(consumer).slots
        except (ValueError, ShmqError):
            return False
        held = layout.state(slots["word"]) == State.IN_FLIGHT
        return bool((held & (slots["id"] == number)).any())

    # ---- TLS and AUTH ----

    @property
    def has_tls(self) -> bool:
        return self.tls_context is not None

    @property
    def auth_enabled(self) -> bool:
        return bool(self.options.auth_http_address) or self.rights.users is not None

    def needs_auth(self, wanted: Collection[str]) -> bool:
        users = self.rights.users
        if self.options.auth_http_address or users is None:
            return True
        if "tls" in wanted and users.has_certificates and not users.has_secrets:
            return False
        return self.rights.needs_auth

    def greet(self, client: Client) -> Grant | None:
        if self.options.auth_http_address:
            return None
        return self.rights.greet(client.uid, client.tls.subject if client.tls is not None else ())

    def turned_away(self, client: Client) -> None:
        if not self.options.auth_http_address:
            peer = client.ip or f"uid:{client.uid}"
            subject = client.tls.subject if client.tls is not None else ()
            self.is_nobody(peer, client.address, client.uid, subject)

    def is_nobody(self, peer: str, shown: str, uid: int | None, subject: Any) -> None:
        """Note that a client without a secret was refused: its uid or certificate is no user's.

        peer: as `peer_of` says. shown: the client, as the log names it."""
        if uid is not None:
            self.handshakes.is_nobody(peer, shown, f"uid {uid}")
        elif subject:
            self.handshakes.is_nobody(peer, shown, f"certificate {subject_text(subject)}")

    def again(self, grant: Grant) -> Grant | None:
        return None if self.options.auth_http_address else self.rights.again(grant)

    def enter(self, grant: Grant) -> str:
        return self.rights.enter(grant)

    def leave(self, grant: Grant) -> None:
        self.rights.leave(grant)

    def pause(self, grant: Grant) -> float:
        return self.rights.pause(grant)

    def spend(self, grant: Grant, messages: int) -> None:
        self.rights.spend(grant, messages)

    def query_auth(self, client: Client, secret: bytes) -> Grant | None:
        if not self.options.auth_http_address:
            grant = self.rights.login(secret)
        else:
            grant = self._query_auth(client, secret)
        if grant is None:
            note("auth", result="refused")
            _log.warning("AUTH: client(%s) was not let in", client.address)
        elif not grant.count:
            note("auth", result="no_authorisations")
            _log.warning("AUTH: client(%s) has no authorisations", client.address)
        return grant

    def _query_auth(self, client: Client, secret: bytes) -> Grant | None:
        return auth.query(
            self.options,
            client=client.address,
            remote_ip=client.ip,
            tls=client.tls is not None,
            common_name=client.tls.common_name if client.tls is not None else "",
            secret=secret.decode("utf-8", "replace"),
        )
