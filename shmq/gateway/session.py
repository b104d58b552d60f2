"""One client of nsqd's TCP protocol as a state machine: bytes in, bytes out.

It has no socket and no clock. The driver (`tcp`) sets the time, passes input to `receive`, writes
`output` when `flush` is set, and calls `tick` at `wake_at`. Work that takes longer than an access
to shared memory (creating a topic, asking an authorisation server) is left to the driver as a
`job`. Until `done` is called no further command is read, so commands are executed strictly in
order.

This module has the loop over the commands, the timers, the output, the jobs, and AUTH. The other
commands are in `identify`, `publish` and `delivery`. Their order of checks and the texts of their
errors are nsqd's (nsqd/protocol_v2.go).
"""

from __future__ import annotations

import functools
import json
import math
import struct
from typing import Any, Final

from shmq.errors import ShmqError
from shmq.gateway import acts, identify, protocol
from shmq.gateway.asker import Asker
from shmq.gateway.delivery import CONNECTED, DELIVERY_COMMANDS, Delivery
from shmq.gateway.host import NO_QUOTA, After, Grant, Host, Job, Reader
from shmq.gateway.identify import Settings
from shmq.gateway.lease_requests import COMMANDS as LEASE_COMMANDS
from shmq.gateway.leasing import Leasing
from shmq.gateway.protocol import MAX_LINE, ProtocolError
from shmq.gateway.publish import PUBLISH_COMMANDS, Publishing
from shmq.users import Quota, name_in

#: nsqd's client timeout, in seconds; it has no option. Half of it is the default heartbeat
#: interval. It also limits two waits that nsqd does not limit: for the magic, and for the rest of a
#: command while heartbeats are off.
_CLIENT_TIMEOUT: Final = 60.0

#: Commands of one `receive`, not counting runs of PUB or FIN; they take some milliseconds. Then the
#: other clients of the process get their turn, even if a few compressed bytes hold many commands.
_COMMANDS_MOST: Final = 1024

#: Clients of leases that have no secrets yet. Without leases they say that they need a gateway of
#: their own version.
_OLD_CLIENTS: Final = ("shmq-remote/1",)

_MAY_PUBLISH: Final = b"MP"

_SIZE = struct.Struct(">i")
_NEVER: Final = math.inf


class Session:
    """One client, from its magic to its end."""

    def __init__(self, host: Host, address: str, ip: str, now: float, wall: float) -> None:
        """address: `ip:port`, or `@` for a Unix socket. wall: seconds since the epoch."""
        options = host.options
        self._host = host
        self.address = address
        self.ip = ip
        self.ends: tuple[Any, Any] = (None, None)
        """The names of the connection's two sockets, the client's first."""
        self.uid: int | None = None
        """Of the process at the other end of a Unix socket; None: it is no Unix socket."""
        self.connected_at = wall
        self.now = now
        # for the driver
        self.output: list[bytes] = []
        self.flush = False
        self.closing = False
        """Close the connection when the output was written."""
        self.aborted = False
        """Close the connection at once."""
        self.job: Job | None = None
        self.need = 0
        """Bytes of input that the session needs together to go on; 0: a line."""
        self.behind = False
        """More commands could be executed at once: call `receive` again soon."""
        self.upgrades: list[str] = []
        """Layers to be added below the session, in this order; call `upgraded` after each."""
        self.layers: list[str] = []
        """Layers that were added."""
        self.tls: Any = None
        """The TLS layer; None before it is added."""
        # the state of the protocol
        self.settings = Settings(
            ip, ip, options.msg_timeout, options.output_buffer_timeout, _CLIENT_TIMEOUT / 2
        )
        self.publishing = Publishing(host)
        self.delivery = Delivery(host, self.settings)
        self.leasing: Leasing | None = None
        """None: the client has not negotiated leases."""
        self.command = b""
        """The command whose body is read, or was read last."""
        self.reader: Reader | None = Session._read_magic
        """Reads the rest of the present command; None: a line comes next."""
        self.grant: Grant | None = None
        self._has_sent_auth = self._told_to_auth = False
        self._secret = b""
        self._must_tls = options.tls_required != "false" or options.tls_client_auth_policy != ""
        # time
        self._heartbeat_every = self.settings.heartbeat
        self._heartbeat_at = _NEVER
        self._read_until = now + _CLIENT_TIMEOUT  # for the magic and the first command

    @property
    def goes_on(self) -> bool:
        """Whether the session waits for the next command: no job, no upgrade, not closing."""
        return self.job is None and not self.closing and not self.upgrades and not self.behind

    @property
    def held(self) -> int:
        """Bytes of the input that the session keeps."""
        leasing = self.leasing
        return len(self._secret) + (leasing.held if leasing is not None else 0)

    @property
    def patience(self) -> float:
        """Seconds that a client may take to read its output."""
        return self.settings.heartbeat or _CLIENT_TIMEOUT

    @property
    def waits(self) -> bool:
        """Whether the client can take a message, but the channel has none."""
        delivery = self.delivery
        return delivery.ready > 0 and not self.closing and delivery.pump_at == _NEVER

    # ---- input ----

    def receive(self, data: bytearray, start: int, end: int) -> int:
        """Execute the commands in data[start:end]. Returns where the rest begins; pass the rest
        again together with the input that follows it. Set `now` before."""
        waits = self.behind = False  # waits: a command has ended, the next may take its time
        left = _COMMANDS_MOST
        delivery = self.delivery
        try:
            while self.job is None and not self.closing and not self.upgrades:
                reader = self.reader
                if reader is not None:
                    start = reader(self, data, start, end)
                    if self.reader is not None:
                        break
                    self.need = 0
                    waits = True
                    continue
                if start >= end:
                    break
                at = self.publish_run(data, start, end)
                if at != start:
                    start = at
                    continue
                if delivery.window is not None and data[start] == 0x46:  # F
                    at = delivery.finish_run(self, data, start, end)
                    if at != start:
                        start = at
                        waits = True
                        continue
                stop = data.find(b"\n", start, min(end, start + MAX_LINE))
                if stop < 0:
                    if end - start >= MAX_LINE:
                        self.abort()
                    break
                if not left:
                    self.behind = True
                    break
                left -= 1
                line = bytes(data[start : stop - 1 if data[stop - 1] == 0x0D else stop])
                if stop == start:
                    line = b""
                start = stop + 1
                self._execute(line.split(b" "))
                if self.reader is None:  # a body shares the deadline of its line
                    waits = True
        except ProtocolError as error:
            self.fail(error)
        except (OSError, MemoryError) as error:  # no descriptor or no memory to map a queue
            self.fail(protocol.no_means(error))
        if self.job is None:
            self._read_by(waits, start < end)
        return start

    def publish_run(self, data: bytearray, start: int, end: int) -> int:
        """Execute the complete PUB commands at `start` that publish to the same topic as the last
        one, or one such MPUB. Returns as `receive`; `start` itself if there is none or if one is
        not valid. Call it only while the session `goes_on`."""
        if data[start] not in _MAY_PUBLISH:
            return start
        run, options = self.run, self._host.options
        if run is None:
            return start
        producer, line = run
        try:
            at, count, answers = producer.publish_run(
                data, start, end, line, options.max_msg_size, options.max_body_size
            )
        except (ShmqError, OSError):
            return start
        if count:
            self.say(protocol.OK if answers == 1 else protocol.OK * answers)
            self.published(count, self.now)
        return int(at)

    @property
    def run(self) -> tuple[Any, bytes] | None:
        """The producer of the last topic and `MPUB <topic>\\n`; None if there is no producer, the
        client must show its permission for each command, or a command is not complete."""
        line = self.publishing.run_line
        if not line or self.reader is not None:
            return None
        producer = self._host.producers.get(line[5:-1])
        return None if producer is None else (producer, line)

    def published(self, count: int, now: float) -> None:
        """Messages to the topic of `run` were published. now: when the last command came."""
        if not count:
            return
        counts, topic = self.publishing.counts, self.publishing.run_line[5:-1]
        counts[topic] = counts.get(topic, 0) + count
        heartbeat = self.settings.heartbeat
        if heartbeat:
            self._read_until = now + 2 * heartbeat

    def _read_by(self, waits: bool, begun: bool) -> None:
        """Set the deadline of the next command. waits: a command has just ended. begun: a part of
        the next command has arrived."""
        heartbeat = self.settings.heartbeat
        if heartbeat:
            if waits:
                self._read_until = self.now + 2 * heartbeat
        elif self.reader is None and not begun:
            self._read_until = _NEVER  # without heartbeats a client may be silent for ever
        elif waits or self._read_until == _NEVER:
            self._read_until = self.now + _CLIENT_TIMEOUT

    def end(self) -> None:
        """The client will send no more: answer an incomplete command with its error, and close."""
        if self._is_in_body and self.job is None and not self.closing:
            self.fail(self._unread())
        self.closing = True
        self.flush = True

    def _execute(self, params: list[bytes]) -> None:
        name = params[0]
        if name == b"IDENTIFY":
            self._identify()
            return
        if self._must_tls and self.tls is None:
            raise ProtocolError("E_INVALID", b"cannot %b in current state (TLS required)" % name)
        if (of_delivery := DELIVERY_COMMANDS.get(name)) is not None:
            of_delivery(self.delivery, self, params)
        elif (of_publishing := PUBLISH_COMMANDS.get(name)) is not None:
            of_publishing(self.publishing, self, params)
        elif self.leasing is not None and name in LEASE_COMMANDS:
            if self.delivery.state != CONNECTED:
                raise ProtocolError("E_INVALID", b"cannot %b in current state" % name)
            self.leasing.begin(self, params)
        elif name == b"AUTH":
            self._auth(params)
        elif name != b"NOP":
            raise ProtocolError("E_INVALID", b"invalid command " + name)

    def _read_magic(self, data: bytearray, start: int, end: int) -> int:
        self.need = 4
        if end - start < 4:
            return start
        self.reader = None
        if data[start : start + 4] != protocol.MAGIC:
            self.say(protocol.BAD_PROTOCOL)
            self.closing = True
            return start + 4
        self._heartbeat_at = self.now + self.settings.heartbeat
        return start + 4

    # ---- bodies ----

    @property
    def _is_in_body(self) -> bool:
        return self.reader is not None and self.reader is not Session._read_magic

    def expect(self, command: bytes, reader: Reader) -> None:
        """Pass the following input to `reader` until it sets `reader` to None."""
        self.command = command
        self.reader = reader
        self.need = 4

    def _whole(self, data: bytearray, start: int, end: int) -> bytes | None:
        """Read the size and the body of IDENTIFY or AUTH. Returns None if some of it is missing."""
        name = self.command.decode()
        if end - start < 4:
            self.need = 4
            return None
        (size,) = _SIZE.unpack_from(data, start)
        most = self._host.options.max_body_size
        if size > most:
            raise ProtocolError("E_BAD_BODY", f"{name} body too big {size} > {most}")
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"{name} invalid body size {size}")
        if end - start - 4 < size:
            self.need = size + 4
            return None
        return bytes(data[start + 4 : start + 4 + size])

    def _unread(self) -> ProtocolError:
        """Return nsqd's error for a command whose body does not arrive."""
        if self.command == b"MPUB" and (error := self.publishing.unread(self.need)) is not None:
            return error
        name = self.command.decode()
        code = "E_BAD_MESSAGE" if self.command in (b"PUB", b"DPUB") else "E_BAD_BODY"
        what = "message body" if code == "E_BAD_MESSAGE" else "body"
        size = " size" if self.need <= 4 else ""
        return ProtocolError(code, f"{name} failed to read {what}{size}")

    # ---- output ----

    def say(self, data: bytes) -> None:
        """Send a frame to the client."""
        self.output.append(data)
        self.flush = True

    def fail(self, error: ProtocolError) -> None:
        """Send an error to the client and close."""
        self.say(error.frame)
        self.reader = None
        self.closing = True

    def refuse(self, code: str, reason: str) -> None:
        """Close with an error. If `code` is empty, it is the error of the command whose body is
        being read."""
        self.job = None
        name = self.command.decode()
        if not code and name and self.reader is not None:
            code, reason = f"E_{name}_FAILED", f"{name} failed {reason}"
        self.fail(ProtocolError(code or "E_INVALID", reason))

    def ask(self) -> None:
        """Send a heartbeat, which every client accepts at any time, to probe the connection."""
        if not self.closing and not self.upgrades:
            self.say(protocol.HEARTBEAT)

    def abort(self) -> None:
        """Close without a message to the client."""
        self.aborted = self.closing = True
        self.reader = None

    def written(self) -> None:
        """The driver has taken the output."""
        self.output.clear()
        self.flush = False
        delivery = self.delivery
        if delivery.buffered:
            delivery.flushed_at = self.now
        delivery.buffered = 0
        delivery.flush_at = _NEVER

    # ---- time ----

    @property
    def wake_at(self) -> float:
        """The latest time for the next `tick`."""
        delivery = self.delivery
        return min(self._heartbeat_at, self._read_until, delivery.flush_at, delivery.pump_at)

    def tick(self) -> None:
        """Act on the time `now`: heartbeat, flush, deadline of the client's next command."""
        now, delivery = self.now, self.delivery
        if now >= self._read_until and self.job is None and not self.upgrades and not self.behind:
            if self._is_in_body:
                self.fail(self._unread())
            else:
                self.abort()
            return
        if now >= self._read_until:
            self._read_until = now + (2 * self.settings.heartbeat or _CLIENT_TIMEOUT)
        if now >= self._heartbeat_at:
            every = self._heartbeat_every
            self._heartbeat_at += every * (1 + (now - self._heartbeat_at) // every)
            if not self.upgrades:
                self.say(protocol.HEARTBEAT)
        if now >= delivery.flush_at:
            self.flush = True
            delivery.flush_at = _NEVER
        if now >= delivery.pump_at:
            delivery.pump(self)

    # ---- jobs ----

    def done(self, result: Any, error: BaseException | None) -> None:
        """Pass the result of the job to the session; then call `receive` with the rest."""
        job, self.job = self.job, None
        assert job is not None
        try:
            job.after(result, error)
        except ProtocolError as exc:
            self.fail(exc)
        self._read_by(self.reader is None, False)

    # ---- IDENTIFY ----

    def _identify(self) -> None:
        if self.delivery.state != CONNECTED:
            raise ProtocolError("E_INVALID", "cannot IDENTIFY in current state")
        self.expect(b"IDENTIFY", Session._read_identify)

    def _read_identify(self, data: bytearray, start: int, end: int) -> int:
        body = self._whole(data, start, end)
        if body is None:
            return start
        self.reader = None
        host = self._host
        wishes = identify.document(body)
        self.settings = identify.settings(wishes, self.settings, host.options)
        if self.delivery.configure(self.settings):
            self._heartbeat_every = self.settings.heartbeat or _NEVER
            self._heartbeat_at = self.now + self._heartbeat_every
        if not wishes.get("feature_negotiation"):
            self.say(protocol.OK)
        else:
            wanted = identify.upgrades(wishes, host.has_tls, host.options, self.layers)
            must = host.auth_enabled and not self._is_known() and host.needs_auth(wanted)
            self._told_to_auth = must
            answer = identify.answer(self.settings, wanted, must, host.options)
            if wishes.get("leases") and self.settings.user_agent not in _OLD_CLIENTS:
                self.leasing = self.leasing or Leasing(host, Asker(ends=self.ends))
                answer["leases"] = True
                self.publishing.is_whole = True
            self.say(protocol.frame(protocol.RESPONSE, _json(answer)))
            self.upgrades = wanted
        return start + 4 + len(body)

    def upgraded(self, layer: str, tls: Any = None) -> None:
        """The driver has added the first of `upgrades`."""
        assert self.upgrades.pop(0) == layer
        self.layers.append(layer)
        if layer == "tls":
            self.tls = tls
            self._leave()  # a secret that came before may be that of somebody between
            self._secret, self.publishing.run_line = b"", b""
        self.say(protocol.OK)

    def not_upgraded(self, reason: str) -> None:
        """The driver could not add the first of `upgrades`; it writes the output without it."""
        self.upgrades = []
        self.fail(ProtocolError("E_IDENTIFY_FAILED", f"IDENTIFY failed {reason}"))

    # ---- AUTH ----

    def _auth(self, params: list[bytes]) -> None:
        if self.delivery.state != CONNECTED:
            raise ProtocolError("E_INVALID", "cannot AUTH in current state")
        if len(params) != 1:
            raise ProtocolError("E_INVALID", "AUTH invalid number of parameters")
        self.expect(b"AUTH", Session._read_auth)

    def _read_auth(self, data: bytearray, start: int, end: int) -> int:
        secret = self._whole(data, start, end)
        if secret is None:
            return start
        self.reader = None
        if self._has_sent_auth:
            raise ProtocolError("E_INVALID", "AUTH already set")
        if not self._host.auth_enabled:
            raise ProtocolError("E_AUTH_DISABLED", "AUTH disabled")
        greeted = self._greeted()
        if greeted is not None and greeted.is_named(secret):
            self._let_in(greeted)  # for libraries that insist on a secret
        else:
            self._secret = secret
            self._ask_authority(self._after_auth, secret)
        return start + 4 + len(secret)

    def _ask_authority(self, after: After, proof: bytes = b"") -> None:
        call = functools.partial(self._host.query_auth, self, self._secret)
        if self._host.options.auth_http_address:
            self.job = Job(call, after, kind="login", proof=proof)
        else:
            self.job = Job(call, after, kind="password", proof=proof, user=name_in(proof))

    def _after_auth(self, grant: Grant | None, error: BaseException | None) -> None:
        if error is not None or grant is None:
            raise ProtocolError("E_AUTH_FAILED", "AUTH failed")
        if not grant.count:
            raise ProtocolError("E_UNAUTHORIZED", "AUTH no authorizations found")
        self._let_in(grant)

    def _let_in(self, grant: Grant) -> None:
        self._become(grant)
        self._has_sent_auth = True
        answer = {
            "identity": grant.identity,
            "identity_url": grant.identity_url,
            "permission_count": grant.count,
        }
        self.say(protocol.frame(protocol.RESPONSE, _json(answer)))

    def _greeted(self) -> Grant | None:
        """The rights of the client so far, also if it has sent no secret."""
        if self.grant is None and (grant := self._host.greet(self)) is not None:
            self._become(grant)
        return self.grant

    def _is_known(self) -> bool:
        """Whether anything has shown who the client is: `anonymous` is whom nothing has shown."""
        grant = self._greeted()
        return grant is not None and (grant.known is None or not grant.known.user.is_anonymous)

    def _become(self, grant: Grant) -> None:
        """The client is this user from now on."""
        before, self.grant = self.grant, None
        if before is not None:
            self._host.leave(before)
        self.publishing.run_line = b""
        if reason := self._host.enter(grant):
            raise ProtocolError("E_CONNECT_FAILED", reason)
        self.grant = grant

    def ended(self) -> None:
        """The connection has ended."""
        if self._told_to_auth and self.grant is None and not self._secret:
            self._host.turned_away(self)
        self.abort()
        self._leave()

    def _leave(self) -> None:
        if self.grant is not None:
            self._host.leave(self.grant)
            self.grant = None

    def changed(self) -> None:
        """The options or the access rules have changed. A user who was removed, or whose proof was
        replaced, is disconnected, and so is a client of what he may not use any more."""
        self.publishing.run_line = b""
        grant, host = self.grant, self._host
        if self.closing or host.options.auth_http_address or not host.auth_enabled:
            return
        try:
            if grant is None:
                if self.delivery.names is None and self.job is None:
                    return  # it is asked at its next command
                renewed = self._greeted()
            else:
                self.grant = renewed = host.again(grant)
                if renewed is None:
                    host.leave(grant)
            if renewed is None or not self._is_permitted(renewed):
                raise ProtocolError("E_UNAUTHORIZED", "the access rules have changed")
        except ProtocolError as error:
            self.job = None
            self.fail(error)

    def _is_permitted(self, grant: Grant) -> bool:
        """Whether the client may go on with what it is doing."""
        of_delivery = self.delivery.names
        if of_delivery is not None and not self._may(grant, b"SUB", *of_delivery):
            return False
        waits = self.job is not None and self.leasing is not None
        if not waits or self.command not in LEASE_COMMANDS:
            return True
        assert self.leasing is not None
        return self._may(grant, self.command, *self.leasing.where)

    @staticmethod
    def _may(grant: Grant, command: bytes, topic: bytes, channel: bytes) -> bool:
        need = acts.COMMANDS.get(command)
        return need is not None and need.held(grant.allows, topic.decode(), channel.decode())

    def authorised(self, command: bytes, topic: bytes, channel: bytes) -> bool:
        """Check the client's permission; raises ProtocolError if it has none. Returns false if the
        grant has expired: check again when the job that renews it is done. Without a topic, any
        grant will do."""
        if not self._host.auth_enabled:
            return True
        name = command.decode()
        grant = self._greeted()
        if grant is None:
            self._told_to_auth = True
            raise ProtocolError("E_AUTH_FIRST", f"AUTH required before {name}")
        if self.now >= grant.expires:
            self._ask_authority(self._after_renewal)
            return False
        if topic and not self._may(grant, command, topic, channel):
            what = f"{protocol.quoted(topic)} {protocol.quoted(channel)}"
            raise ProtocolError("E_UNAUTHORIZED", f"AUTH failed for {name} on {what}")
        return True

    def _after_renewal(self, grant: Grant | None, error: BaseException | None) -> None:
        if error is not None or grant is None:
            raise ProtocolError("E_AUTH_FAILED", "AUTH failed")
        self.grant = grant

    # ---- what the user may use ----

    @property
    def user(self) -> str:
        """The user's name in the access file; empty: it names none."""
        grant = self.grant
        return grant.identity if grant is not None and grant.known is not None else ""

    @property
    def who(self) -> str:
        """The user's name, if the access file names one, else the address."""
        return self.user or self.address

    @property
    def known(self) -> bool:
        """Whether the client has proven that it is a user, of the access file or of an
        authorisation server."""
        grant = self.grant
        if grant is None or not grant.identity:
            return False
        return grant.known is None or grant.known.proof.kind != "none"

    @property
    def origin(self) -> str:
        """Whose the client's holders, staged rows and topics are: a user's name if it is `known`,
        else its address, and on this host its uid."""
        grant = self.grant
        if self.known and grant is not None:
            return grant.identity
        uid = self.uid
        return (self.ip or "@") if uid is None else f"{self.ip or '@'} uid {uid}"

    def asker(self) -> Asker:
        """The client, for the threads that execute its requests."""
        return Asker(self.origin, self.known, self.address, self.quota, ends=self.ends)

    @property
    def quota(self) -> Quota:
        """The limits of the client's user."""
        return self.grant.quota if self.grant is not None else NO_QUOTA

    @property
    def may_run(self) -> bool:
        """Whether the next PUB to the same topic needs no question: rights do not expire, and
        nobody counts the messages."""
        if not self._host.auth_enabled:
            return True
        grant = self.grant
        return (
            grant is not None
            and grant.expires == _NEVER
            and grant.quota.messages_per_second is None
        )

    def pause(self) -> float:
        """Return the seconds until the client may publish, by its user's quota; 0: now."""
        return 0.0 if self.grant is None else self._host.pause(self.grant)

    def spend(self, messages: int) -> None:
        """Count messages that the client has published."""
        if self.grant is not None:
            self._host.spend(self.grant, messages)

    # ---- statistics ----

    def describe(self) -> dict[str, Any]:
        """Return the client as nsqd's /stats shows it, and its `session` in the channel."""
        settings, delivery, tls, grant = self.settings, self.delivery, self.tls, self.grant
        consumer, counts = delivery.consumer, self.publishing.counts
        document: dict[str, Any] = {
            "client_id": settings.client_id,
            "hostname": settings.hostname,
            "version": "V2",
            "remote_address": self.address,
            "state": delivery.state,
            "ready_count": delivery.ready,
            "in_flight_count": consumer.in_flight if consumer is not None else 0,
            "message_count": delivery.message_count,
            "finish_count": delivery.finish_count,
            "requeue_count": delivery.requeue_count,
            "connect_ts": int(self.connected_at),
            "sample_rate": settings.sample_rate,
            "deflate": "deflate" in self.layers,
            "snappy": "snappy" in self.layers,
            "user_agent": settings.user_agent,
        }
        if grant is not None:
            document["authed"] = True
            if grant.identity:
                document["auth_identity"] = grant.identity
            if grant.identity_url:
                document["auth_identity_url"] = grant.identity_url
        document["topology_zone"], document["topology_region"] = settings.zone, settings.region
        if counts:
            document["pub_counts"] = [
                {"topic": topic.decode(), "count": count} for topic, count in counts.items()
            ]
        document["tls"] = tls is not None
        document["tls_cipher_suite"] = tls.cipher_suite if tls is not None else ""
        document["tls_version"] = tls.version if tls is not None else ""
        document["tls_negotiated_protocol"] = ""
        document["tls_negotiated_protocol_is_mutual"] = tls is not None
        document["session"] = consumer.session if consumer is not None else None
        return document


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
