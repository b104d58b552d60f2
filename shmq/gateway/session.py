"""One client of nsqd's TCP protocol as a state machine: bytes in, bytes out.

No socket and no clock: the driver (`tcp`) says what time it is, passes what came in to `receive`,
writes `output` when `flush` is set, and calls `tick` at `wake_at`. What takes longer than a look at
shared memory (making a topic, asking an authorisation server) is left as a `job`; until it is
`done` no further command is read, so commands are executed strictly one after the other.

Commands, their order of checks and the texts of their errors are nsqd's (nsqd/protocol_v2.go).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from shmq import _native
from shmq.errors import Full, Gone, MessageTooBig, ShmqError
from shmq.gateway import protocol
from shmq.gateway.protocol import ID_BYTES, MAX_LINE, ProtocolError
from shmq.names import valid_name
from shmq.options import Options
from shmq.stats import NSQD_VERSION

#: nsqd's numbers of a client's state, as /stats shows them.
CONNECTED, SUBSCRIBED, CLOSING = 0, 3, 4

#: nsqd's client timeout, which has no option: half of it is the default heartbeat interval. Where
#: nsqd waits for ever (the magic, the rest of a command while heartbeats are off) it is the limit.
_CLIENT_TIMEOUT: Final = 60.0
_DEFAULT_BUFFER: Final = 16384
_DEFAULT_DEFLATE: Final = 6

#: Messages and bytes of one take. Whoever has more to get waits for the others of the process.
_TAKE_MOST: Final = 1024
_TAKE_BYTES: Final = 256 << 10
#: A window that is full opens by timeouts too; nsqd notices those every 100 ms.
_FULL_WINDOW_EVERY: Final = 0.1
#: How often a client that wants nothing is looked after: its channel may have been deleted.
_CLOSED_WINDOW_EVERY: Final = 1.0
#: Messages wait at most so long for others that could go with them, and a lone one does not: what
#: comes more than this after the last flush is flushed as soon as the channel has no more.
_GATHER: Final = 0.01
#: Seconds between two tries to publish to a queue that is full.
_ROOM_EVERY: Final = 0.002
#: Commands of one `receive`, other than runs of PUB or FIN: some milliseconds' worth. Then the
#: others of the process have their turn, however many NOPs a few compressed bytes stand for.
_COMMANDS_MOST: Final = 1024

_MAY_PUBLISH: Final = b"MP"

_SIZE = struct.Struct(">i")
_NEVER: Final = math.inf


After = Callable[[Any, BaseException | None], None]


@dataclass
class Job:
    """Something that may take long. call: to be made in a thread, None: only wait for `seconds`.
    after: gets its result, or the exception it raised, in the session's thread."""

    call: Callable[[], Any] | None
    after: After
    seconds: float = 0.0
    login: bool = False
    """It asks an authorisation server: it waits for others of its address, and for no others."""


@dataclass(frozen=True)
class Grant:
    """What an authorisation server said; `auth.query` has the rules."""

    identity: str
    identity_url: str
    count: int
    expires: float
    allows: Callable[[str, str, str], bool]
    """(permission, topic, channel)"""


class Host(Protocol):
    """What the sessions of a process share; `hub.Hub`."""

    options: Options
    producers: dict[bytes, Any]

    @property
    def has_tls(self) -> bool:
        """Whether clients may ask for TLS."""

    @property
    def auth_enabled(self) -> bool:
        """Whether clients must say AUTH before they publish or subscribe."""

    def open_producer(self, topic: bytes) -> Any:
        """Into `producers`; the topic is made if it is missing. May take long."""

    def open_consumer(self, topic: bytes, channel: bytes, msg_timeout: float) -> Any:
        """A consumer that may take nothing yet. May take long. ProtocolError, Gone, ShmqError."""

    def query_auth(self, session: Session, secret: bytes) -> Grant | None:
        """Ask the authorisation servers; None if they refuse. May take long."""

    def no_room(self) -> str:
        """Why a queue that is full will stay so; empty if it need not."""

    def is_in_flight(self, consumer: Any, message_id: bytes) -> bool:
        """Whether the message is in flight to anybody on the consumer's channel."""


class Session:
    """One connection, from its magic to its end."""

    def __init__(self, host: Host, address: str, ip: str, now: float, wall: float) -> None:
        """address: `ip:port`, or `@` for a Unix socket. wall: seconds since the epoch."""
        options = host.options
        self._host = host
        self.address = address
        self.ip = ip
        self.connected_at = wall
        self.now = now
        # what the driver looks at
        self.output: list[bytes] = []
        self.flush = False
        self.closing = False
        """Close when everything was written."""
        self.aborted = False
        """Close at once."""
        self.job: Job | None = None
        self.need = 0
        """Bytes that must be together before the session can go on; 0: a line."""
        self.behind = False
        """Commands are left that could be executed at once: call `receive` again soon."""
        self.upgrades: list[str] = []
        """Layers to be put under the session, in this order, each followed by `upgraded`."""
        # what the client said
        self.client_id = self.hostname = ip
        self.user_agent = ""
        self.region = self.zone = ""
        self.sample_rate = 0
        self.deflate_level = _DEFAULT_DEFLATE
        self.snappy = self.deflate = False
        self.tls: Any = None
        """The TLS layer once there is one."""
        self.msg_timeout = options.msg_timeout
        self.buffer_size = _DEFAULT_BUFFER
        self.buffer_timeout = options.output_buffer_timeout
        self.heartbeat: float = _CLIENT_TIMEOUT / 2  # 0: off
        self._fixed: tuple[float, int] | None = None  # (msg_timeout, sample_rate) of the first
        # where it is
        self.state = CONNECTED
        self.topic = self.channel = b""
        self.consumer: Any = None
        self._window: Any = None
        self.ready = 0
        self.grant: Grant | None = None
        self._secret = b""
        self.message_count = self.finish_count = self.requeue_count = 0
        self.pub_counts: dict[bytes, int] = {}
        self._body: Callable[[bytearray, int, int], int] | None = self._read_magic
        self._command = self._subject = b""
        self._line = b""
        """`MPUB <topic>\\n`, of what was published to last; empty: step by step."""
        self._defer: float | None = None
        self._count = self._scanned = self._sent = self._piece = 0
        self._at = self._sent_at = self._step = 0
        # time
        self._buffered = 0
        self._flushed_at = -_NEVER  # messages, to the client
        self._flush_every = self.buffer_timeout
        self._heartbeat_every = self.heartbeat
        self._flush_at = self._heartbeat_at = self._pump_at = _NEVER
        self._read_until = now + _CLIENT_TIMEOUT  # for the magic and the first command
        self._must_tls = options.tls_required != "false" or options.tls_client_auth_policy != ""

    @property
    def goes_on(self) -> bool:
        """Whether it waits for the next command: no job, no upgrade, not at its end."""
        return self.job is None and not self.closing and not self.upgrades and not self.behind

    @property
    def held(self) -> int:
        """Bytes that it keeps of what came in."""
        return len(self._secret)

    @property
    def patience(self) -> float:
        """Seconds that a client may take to read what it gets."""
        return self.heartbeat or _CLIENT_TIMEOUT

    # ---- in ----

    def receive(self, data: bytearray, start: int, end: int) -> int:
        """Execute the commands in data[start:end]; where the rest begins, to be passed again with
        what comes behind it. Set `now` before."""
        waits = self.behind = False  # waits: a command has ended, so it waits for the next
        left = _COMMANDS_MOST
        try:
            while self.job is None and not self.closing and not self.upgrades:
                body = self._body
                if body is not None:
                    start = body(data, start, end)
                    if self._body is not None:
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
                if self._window is not None and data[start] == 0x46:  # F
                    at = self._finish_run(data, start, end)
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
                if self._body is None:  # a body shares the deadline of its line
                    waits = True
        except ProtocolError as error:
            self._fail(error)
        except OSError as error:  # no descriptor or no memory to map what a command needs
            self._fail(self._no_means(error))
        if self.job is None:
            self._read_by(waits, start < end)
        return start

    def _read_by(self, waits: bool, begun: bool) -> None:
        """Set the deadline of the next command. waits: one has just ended. begun: bytes of the next
        are there, but not all."""
        if self.heartbeat:
            if waits:
                self._read_until = self.now + 2 * self.heartbeat
        elif self._body is None and not begun:
            self._read_until = _NEVER  # without heartbeats a client may be silent for ever
        elif waits or self._read_until == _NEVER:
            self._read_until = self.now + _CLIENT_TIMEOUT

    def end(self) -> None:
        """The client will send no more. What it began is answered, then the session ends."""
        if self._body not in (None, self._read_magic) and self.job is None and not self.closing:
            self._fail(self._unread())
        self.closing = True
        self.flush = True

    def _execute(self, params: list[bytes]) -> None:
        name = params[0]
        if name == b"IDENTIFY":
            self._identify()
            return
        if self._must_tls and self.tls is None:
            raise ProtocolError("E_INVALID", b"cannot %b in current state (TLS required)" % name)
        command = _COMMANDS.get(name)
        if command is None:
            raise ProtocolError("E_INVALID", b"invalid command " + name)
        command(self, params)

    def _read_magic(self, data: bytearray, start: int, end: int) -> int:
        self.need = 4
        if end - start < 4:
            return start
        self._body = None
        if data[start : start + 4] != protocol.MAGIC:
            self._say(protocol.BAD_PROTOCOL)
            self.closing = True
            return start + 4
        self._heartbeat_at = self.now + self.heartbeat
        return start + 4

    # ---- out ----

    def _say(self, data: bytes) -> None:
        self.output.append(data)
        self.flush = True

    def _fail(self, error: ProtocolError) -> None:
        self._say(error.frame)
        self._body = None
        self.closing = True

    def refuse(self, code: str, reason: str) -> None:
        """End with a word. code: empty: what was begun has failed."""
        self.job = None
        name = self._command.decode()
        if not code and name and self._body is not None:
            code, reason = f"E_{name}_FAILED", f"{name} failed {reason}"
        self._fail(ProtocolError(code or "E_INVALID", reason))

    def ask(self) -> None:
        """Send a frame that every client takes at any time."""
        if not self.closing and not self.upgrades:
            self._say(protocol.HEARTBEAT)

    def abort(self) -> None:
        """End without a word."""
        self.aborted = self.closing = True
        self._body = None  # a method of ours: without it nothing waits for the garbage collector

    def written(self) -> None:
        """The driver has taken the output."""
        self.output.clear()
        self.flush = False
        if self._buffered:
            self._flushed_at = self.now
        self._buffered = 0
        self._flush_at = _NEVER

    # ---- time ----

    @property
    def wake_at(self) -> float:
        """When `tick` must be called at the latest."""
        return min(self._heartbeat_at, self._read_until, self._flush_at, self._pump_at)

    def tick(self) -> None:
        """It is `now`: heartbeat, flush, deadline."""
        now = self.now
        if now >= self._read_until and self.job is None and not self.upgrades and not self.behind:
            if self._body not in (None, self._read_magic):
                self._fail(self._unread())
            else:
                self.abort()
            return
        if now >= self._read_until:
            self._read_until = now + (2 * self.heartbeat or _CLIENT_TIMEOUT)
        if now >= self._heartbeat_at:
            every = self._heartbeat_every
            self._heartbeat_at += every * (1 + (now - self._heartbeat_at) // every)
            if not self.upgrades:
                self._say(protocol.HEARTBEAT)
        if now >= self._flush_at:
            self.flush = True
            self._flush_at = _NEVER
        if now >= self._pump_at:
            self._pump_at = _NEVER
            self.pump()

    # ---- jobs ----

    def _let(self, call: Callable[[], Any], after: After) -> None:
        self.job = Job(call, after)

    def done(self, result: Any, error: BaseException | None) -> None:
        """The job is done. Then `receive` goes on with what is left."""
        job, self.job = self.job, None
        assert job is not None
        try:
            job.after(result, error)
        except ProtocolError as exc:
            self._fail(exc)
        self._read_by(self._body is None, False)

    # ---- bodies ----

    def _unread(self) -> ProtocolError:
        """What nsqd says when a body does not come."""
        name = self._command.decode()
        code = "E_BAD_MESSAGE" if self._command in (b"PUB", b"DPUB") else "E_BAD_BODY"
        if self._command == b"MPUB" and self._step == 1:
            return ProtocolError(code, "MPUB failed to read message count")
        if self._command == b"MPUB" and self._step == 2:
            which = f"message({self._scanned})"
            return ProtocolError("E_BAD_MESSAGE", f"MPUB failed to read {which} body size")
        if self._command == b"MPUB" and self._step == 3:
            return ProtocolError("E_BAD_MESSAGE", "MPUB failed to read message body")
        what = "message body" if code == "E_BAD_MESSAGE" else "body"
        size = " size" if self.need <= 4 else ""
        return ProtocolError(code, f"{name} failed to read {what}{size}")

    def _no_means(self, error: OSError) -> ProtocolError:
        """What it says when this process lacks something."""
        return ProtocolError("E_INVALID", f"cannot go on: {_sentence(error)}")

    def _expect(self, command: bytes, body: Callable[[bytearray, int, int], int]) -> None:
        self._command = command
        self._body = body
        self.need = 4
        self._step = 0

    def _whole(self, data: bytearray, start: int, end: int) -> bytes | None:
        """The body of IDENTIFY or AUTH with its size before it; None: it is not all there."""
        name = self._command.decode()
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

    # ---- IDENTIFY ----

    def _identify(self) -> None:
        if self.state != CONNECTED:
            raise ProtocolError("E_INVALID", "cannot IDENTIFY in current state")
        self._expect(b"IDENTIFY", self._read_identify)

    def _read_identify(self, data: bytearray, start: int, end: int) -> int:
        body = self._whole(data, start, end)
        if body is None:
            return start
        self._body = None
        wishes = _identify_document(body)
        self._apply(wishes)
        if not wishes.get("feature_negotiation"):
            self._say(protocol.OK)
        else:
            self._negotiate(wishes)
        return start + 4 + len(body)

    def _apply(self, wishes: dict[str, Any]) -> None:
        """Everything but the upgrades. What is not in the document is as if it were 0."""
        options = self._host.options
        self.client_id = wishes.get("client_id", "")
        self.hostname = wishes.get("hostname", "") or self.client_id
        self.user_agent = wishes.get("user_agent", "")
        self.region, self.zone = wishes.get("topology_region", ""), wishes.get("topology_zone", "")

        asked = wishes.get("heartbeat_interval", 0)
        if asked == -1:
            self.heartbeat = 0.0
        elif asked == 0:
            pass
        elif 1000 <= asked <= _ms(options.max_heartbeat_interval):
            self.heartbeat = asked / 1000
        else:
            raise _identify_error(f"heartbeat interval ({asked})")

        asked = wishes.get("output_buffer_timeout", 0)
        least, most = options.min_output_buffer_timeout, options.max_output_buffer_timeout
        if asked == -1:
            self.buffer_timeout = 0.0
        elif asked == 0:
            pass
        elif _ms(least) <= asked <= _ms(most):
            self.buffer_timeout = asked / 1000
        else:
            raise _identify_error(f"output buffer timeout ({asked})")

        asked = wishes.get("output_buffer_size", 0)
        if asked == -1:
            self.buffer_size, self.buffer_timeout = 1, 0.0
        elif asked == 0:
            pass
        elif 64 <= asked <= options.max_output_buffer_size:
            self.buffer_size = asked
        else:
            raise _identify_error(f"output buffer size ({asked})")

        asked = wishes.get("sample_rate", 0)
        if not 0 <= asked <= 99:
            raise _identify_error(f"sample rate ({asked})")
        self.sample_rate = asked

        asked = wishes.get("msg_timeout", 0)
        if asked == 0:
            pass
        elif 1000 <= asked <= _ms(options.max_msg_timeout):
            self.msg_timeout = asked / 1000
        else:
            raise _identify_error(f"msg timeout ({asked})")

        if self._fixed is None:  # later ones are answered, but delivery goes by the first
            self._fixed = (self.msg_timeout, self.sample_rate)
            self._heartbeat_every = self.heartbeat or _NEVER
            self._heartbeat_at = self.now + self._heartbeat_every
            self._flush_every = self.buffer_timeout

    def _negotiate(self, wishes: dict[str, Any]) -> None:
        options = self._host.options
        tls = self._host.has_tls and bool(wishes.get("tls_v1"))
        deflate = options.deflate and bool(wishes.get("deflate"))
        snappy = options.snappy and bool(wishes.get("snappy"))
        self._check_once(wishes)
        level = wishes.get("deflate_level", 0)
        level = level if level > 0 else _DEFAULT_DEFLATE
        self.deflate_level = min(level, options.max_deflate_level)
        if deflate and snappy:
            raise ProtocolError(
                "E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression"
            )
        answer = {
            "max_rdy_count": options.max_rdy_count,
            "version": NSQD_VERSION,
            "max_msg_timeout": _ms(options.max_msg_timeout),
            "msg_timeout": _ms(self.msg_timeout),
            "tls_v1": tls,
            "deflate": deflate,
            "deflate_level": self.deflate_level,
            "max_deflate_level": options.max_deflate_level,
            "snappy": snappy,
            "sample_rate": self.sample_rate,
            "auth_required": self._host.auth_enabled,
            "output_buffer_size": self.buffer_size,
            "output_buffer_timeout": _ms(self.buffer_timeout),
            "topology_region": options.topology_region,
            "topology_zone": options.topology_zone,
        }
        self._say(protocol.frame(protocol.RESPONSE, _json(answer)))
        wanted = {"tls": tls, "snappy": snappy, "deflate": deflate}
        self.upgrades = [layer for layer, wish in wanted.items() if wish]

    def _check_once(self, wishes: dict[str, Any]) -> None:
        """Each layer is put in once. A second compression over the first would let a few bytes of a
        client become gigabytes of commands; nsqd begins the streams anew, which no client does."""
        options = self._host.options
        layers = {
            "tls_v1": (self._host.has_tls, self.tls is not None),
            "snappy": (options.snappy, self.snappy or self.deflate),
            "deflate": (options.deflate, self.snappy or self.deflate),
        }
        for wish, (has, done) in layers.items():
            if has and done and wishes.get(wish):
                raise ProtocolError(
                    "E_INVALID", f"cannot IDENTIFY with {wish} in current state (already upgraded)"
                )

    def upgraded(self, layer: str, tls: Any = None) -> None:
        """The first of `upgrades` is in place."""
        assert self.upgrades.pop(0) == layer
        if layer == "tls":
            self.tls = tls
        else:
            setattr(self, layer, True)
        self._say(protocol.OK)

    def not_upgraded(self, reason: str) -> None:
        """The first of `upgrades` cannot be; the driver writes the output below it."""
        self.upgrades = []
        self._fail(ProtocolError("E_IDENTIFY_FAILED", f"IDENTIFY failed {reason}"))

    # ---- AUTH ----

    def _auth(self, params: list[bytes]) -> None:
        if self.state != CONNECTED:
            raise ProtocolError("E_INVALID", "cannot AUTH in current state")
        if len(params) != 1:
            raise ProtocolError("E_INVALID", "AUTH invalid number of parameters")
        self._expect(b"AUTH", self._read_auth)

    def _read_auth(self, data: bytearray, start: int, end: int) -> int:
        secret = self._whole(data, start, end)
        if secret is None:
            return start
        self._body = None
        if self.grant is not None:
            raise ProtocolError("E_INVALID", "AUTH already set")
        if not self._host.auth_enabled:
            raise ProtocolError("E_AUTH_DISABLED", "AUTH disabled")
        self._secret = secret
        self._ask_authority(self._after_auth)
        return start + 4 + len(secret)

    def _ask_authority(self, after: After) -> None:
        secret = self._secret
        self.job = Job(lambda: self._host.query_auth(self, secret), after, login=True)

    def _after_auth(self, grant: Grant | None, error: BaseException | None) -> None:
        if error is not None or grant is None:
            raise ProtocolError("E_AUTH_FAILED", "AUTH failed")
        if not grant.count:
            raise ProtocolError("E_UNAUTHORIZED", "AUTH no authorizations found")
        self.grant = grant
        answer = {
            "identity": grant.identity,
            "identity_url": grant.identity_url,
            "permission_count": grant.count,
        }
        self._say(protocol.frame(protocol.RESPONSE, _json(answer)))

    def _authorised(self, command: bytes, topic: bytes, channel: bytes) -> bool:
        """ProtocolError if not; False: asked again first, come back when the job is done."""
        if not self._host.auth_enabled:
            return True
        name = command.decode()
        if self.grant is None:
            raise ProtocolError("E_AUTH_FIRST", f"AUTH required before {name}")
        if self.now >= self.grant.expires:
            self._ask_authority(self._after_renewal)
            return False
        permission = "subscribe" if command == b"SUB" else "publish"
        if not self.grant.allows(permission, topic.decode(), channel.decode()):
            what = f"{protocol.quoted(topic)} {protocol.quoted(channel)}"
            raise ProtocolError("E_UNAUTHORIZED", f"AUTH failed for {name} on {what}")
        return True

    def _after_renewal(self, grant: Grant | None, error: BaseException | None) -> None:
        if error is not None or grant is None:
            raise ProtocolError("E_AUTH_FAILED", "AUTH failed")
        self.grant = grant

    # ---- PUB, DPUB, MPUB ----

    def _check_topic(self, command: str, topic: bytes, prefix: str = "") -> None:
        if topic not in self._host.producers and not _valid(topic):
            name = protocol.quoted(topic)
            raise ProtocolError("E_BAD_TOPIC", f"{prefix}{command} topic name {name} is not valid")

    def _pub(self, params: list[bytes]) -> None:
        if len(params) < 2:
            raise ProtocolError("E_INVALID", "PUB insufficient number of parameters")
        self._check_topic("PUB", params[1])
        self._subject = params[1]
        self._defer = None
        self._expect(b"PUB", self._read_message)

    def publish_run(self, data: bytearray, start: int, end: int) -> int:
        """As `receive`, but only PUB commands to the topic of the last, as many as are whole, or
        one such MPUB. `start` itself if there is none to see, or anything is wrong with them. Only
        while it `goes_on`."""
        line = self._line
        if not line or self._body is not None or data[start] not in _MAY_PUBLISH:
            return start
        topic, host = line[5:-1], self._host
        producer, options = host.producers.get(topic), host.options
        if producer is None:
            return start
        try:
            at, count, answers = producer.publish_run(
                data, start, end, line, options.max_msg_size, options.max_body_size
            )
        except (ShmqError, OSError):
            return start
        if count:
            self.pub_counts[topic] = self.pub_counts.get(topic, 0) + count
            self._say(protocol.OK if answers == 1 else protocol.OK * answers)
            if self.heartbeat:
                self._read_until = self.now + 2 * self.heartbeat
        return int(at)

    def _dpub(self, params: list[bytes]) -> None:
        if len(params) < 3:
            raise ProtocolError("E_INVALID", "DPUB insufficient number of parameters")
        self._check_topic("DPUB", params[1])
        delay = protocol.number(params[2])
        if delay is None:
            raise ProtocolError("E_INVALID", b"DPUB could not parse timeout " + params[2])
        most = self._host.options.max_req_timeout
        if not 0 <= protocol.signed(delay * 10**6 % 2**64) <= round(most * 1e9):
            raise ProtocolError("E_INVALID", f"DPUB timeout {delay} out of range 0-{_ms(most)}")
        self._subject = params[1]
        self._defer = protocol.signed(delay * 10**6 % 2**64) / 1e9 or None
        self._expect(b"DPUB", self._read_message)

    def _read_message(self, data: bytearray, start: int, end: int) -> int:
        if end - start < 4:
            return start
        (size,) = _SIZE.unpack_from(data, start)
        if size <= 0:
            name = self._command.decode()
            raise ProtocolError("E_BAD_MESSAGE", f"{name} invalid message body size {size}")
        most = self._host.options.max_msg_size
        if size > most:
            name = self._command.decode()
            raise ProtocolError("E_BAD_MESSAGE", f"{name} message too big {size} > {most}")
        if end - start - 4 < size:
            self.need = size + 4
            return start
        if not self._authorised(self._command, self._subject, b""):
            return start
        if not self._publish(data, start, 1):
            return start
        self._published(1)
        return start + 4 + int(size)

    def _publish(self, data: bytearray, start: int, count: int) -> bool:
        """False: there is a job to be done first."""
        topic = self._subject
        producer = self._host.producers.get(topic)
        if producer is None:
            self._let(lambda: self._host.open_producer(topic), self._after_producer)
            return False
        try:
            producer.publish_framed(data, start, count, self._defer, 0)
        except Full:
            reason = self._host.no_room()
            if reason:
                self._refuse(reason)
            self.job = Job(None, lambda result, error: None, _ROOM_EVERY)
            return False
        except MessageTooBig:
            if count == 1:
                self._refuse("message too big for memory")
            return False
        except Gone:  # deleted; a publish makes it anew
            self._host.producers.pop(topic, None)
            return self._publish(data, start, count)
        except (ShmqError, OSError) as error:
            self._refuse(_sentence(error))
        return True

    def _refuse(self, reason: str) -> None:
        name = self._command.decode()
        raise ProtocolError(f"E_{name}_FAILED", f"{name} failed {reason}")

    def _after_producer(self, result: Any, error: BaseException | None) -> None:
        if isinstance(error, Gone):
            self._refuse("exiting")
        if error is not None:
            self._refuse(_sentence(error))

    def _published(self, count: int) -> None:
        counts = self.pub_counts
        counts[self._subject] = counts.get(self._subject, 0) + count
        if not self._host.auth_enabled:
            self._line = b"MPUB %b\n" % self._subject
        self._body = None
        self._say(protocol.OK)

    def _mpub(self, params: list[bytes]) -> None:
        if len(params) < 2:
            raise ProtocolError("E_INVALID", "MPUB insufficient number of parameters")
        self._check_topic("MPUB", params[1], "E_BAD_TOPIC ")
        self._subject = params[1]
        self._defer = None
        self._expect(b"MPUB", self._read_batch)
        self._count = -1

    def _read_batch(self, data: bytearray, start: int, end: int) -> int:
        """Everything from the size to the last message stays in the buffer till it is published;
        `_at` and `_sent_at` are distances from the size."""
        if self._count < 0:
            if not self._authorised(b"MPUB", self._subject, b""):
                return start
            if self._subject not in self._host.producers:
                topic = self._subject
                self._let(lambda: self._host.open_producer(topic), self._after_producer)
                return start
            if not self._read_count(data, start, end):
                return start
        if not self._scan(data, start, end):
            return start
        while self._sent < self._count:
            if not self._publish_some(data, start):
                return start
        self._published(self._count)
        return start + self._at

    def _read_count(self, data: bytearray, start: int, end: int) -> bool:
        if end - start < 4:
            return False
        (size,) = _SIZE.unpack_from(data, start)
        most = self._host.options.max_body_size
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"MPUB invalid body size {size}")
        if size > most:
            raise ProtocolError("E_BAD_BODY", f"MPUB body too big {size} > {most}")
        self._step = 1
        if end - start < 8:
            self.need = 8
            return False
        (count,) = _SIZE.unpack_from(data, start + 4)
        if not 0 < count <= (most - 4) // 5:
            raise ProtocolError("E_BAD_BODY", f"MPUB invalid message count {count}")
        self._count = count
        self._scanned = self._sent = 0
        self._at = self._sent_at = 8
        self._piece = count
        self._step = 2
        return True

    def _scan(self, data: bytearray, start: int, end: int) -> bool:
        """Whether all messages of the batch are there."""
        left = self._count - self._scanned
        if not left:
            return True
        options = self._host.options
        at, whole, bad = _native.scan_bodies(
            data, start + self._at, end, left, options.max_msg_size
        )
        self._at = at - start
        self._scanned += whole
        if bad is not None and bad <= 0:
            raise ProtocolError(
                "E_BAD_MESSAGE", f"MPUB invalid message({self._scanned}) body size {bad}"
            )
        if bad is not None:
            raise ProtocolError(
                "E_BAD_MESSAGE", f"MPUB message too big {bad} > {options.max_msg_size}"
            )
        if whole == left:
            return True
        self._step = 3 if end - at >= 4 else 2
        missing = _SIZE.unpack_from(data, at)[0] if self._step == 3 else 0
        need = self._at + 4 + missing
        if need > options.max_body_size + 8 + MAX_LINE:
            # the size before the batch is not used for framing, but memory has a limit
            raise ProtocolError(
                "E_BAD_BODY", f"MPUB body too big {need - 4} > {options.max_body_size}"
            )
        self.need = need
        return False

    def _publish_some(self, data: bytearray, start: int) -> bool:
        """The whole batch; if that can never fit into memory, in halves. False: wait."""
        count = min(self._piece, self._count - self._sent)
        first = start + self._sent_at
        if self._publish(data, first, count):
            self._sent += count
            if self._sent < self._count:
                self._sent_at = (
                    _native.scan_bodies(
                        data, first, start + self._at, count, self._host.options.max_msg_size
                    )[0]
                    - start
                )
            return True
        if self.job is not None:
            return False
        self._piece = max(count // 2, 1)
        return True

    # ---- SUB ----

    def _sub(self, params: list[bytes]) -> None:
        if self.state != CONNECTED:
            raise ProtocolError("E_INVALID", "cannot SUB in current state")
        if not self.heartbeat:
            raise ProtocolError("E_INVALID", "cannot SUB with heartbeats disabled")
        if len(params) < 3:
            raise ProtocolError("E_INVALID", "SUB insufficient number of parameters")
        topic, channel = params[1:3]
        if not _valid(topic):
            name = protocol.quoted(topic)
            raise ProtocolError("E_BAD_TOPIC", f"SUB topic name {name} is not valid")
        if not _valid(channel):
            name = protocol.quoted(channel)
            raise ProtocolError("E_BAD_CHANNEL", f"SUB channel name {name} is not valid")
        self.topic, self.channel = topic, channel
        self._subscribe()

    def _subscribe(self) -> None:
        topic, channel = self.topic, self.channel
        if not self._authorised(b"SUB", topic, channel):
            assert self.job is not None
            renewed = self.job.after

            def again(grant: Any, error: BaseException | None) -> None:
                renewed(grant, error)
                self._subscribe()

            self.job.after = again
            return
        timeout = self._fixed[0] if self._fixed else self.msg_timeout
        self._let(lambda: self._host.open_consumer(topic, channel, timeout), self._after_subscribe)

    def _after_subscribe(self, consumer: Any, error: BaseException | None) -> None:
        if error is None:
            try:
                self._window = _native.Window(consumer)
            except (Gone, OSError) as exc:  # closed since it was opened: the process is ending
                error = exc
        if isinstance(error, ProtocolError):
            raise error
        if isinstance(error, Gone):
            raise ProtocolError("E_SUB_FAILED", "SUB failed exiting")
        if error is not None:
            raise ProtocolError("E_SUB_FAILED", f"SUB failed {_sentence(error)}")
        self.consumer = consumer
        self.state = SUBSCRIBED
        self._say(protocol.OK)

    # ---- RDY, FIN, REQ, TOUCH, CLS, NOP ----

    def _rdy(self, params: list[bytes]) -> None:
        if self.state == CLOSING:
            return
        if self.state != SUBSCRIBED:
            raise ProtocolError("E_INVALID", "cannot RDY in current state")
        count = 1
        if len(params) > 1:
            given = protocol.number(params[1])
            if given is None:
                raise ProtocolError("E_INVALID", b"RDY could not parse count " + params[1])
            count = protocol.signed(given)
        most = self._host.options.max_rdy_count
        if not 0 <= count <= most:
            raise ProtocolError("E_INVALID", f"RDY count {count} out of range 0-{most}")
        self._set_ready(count)

    def _set_ready(self, count: int) -> None:
        self.ready = count
        try:
            self.consumer.limit(count)
        except Gone:
            self.abort()

    def _cls(self, params: list[bytes]) -> None:
        if self.state != SUBSCRIBED:
            raise ProtocolError("E_INVALID", "cannot CLS in current state")
        self._set_ready(0)
        self.state = CLOSING
        self._say(protocol.CLOSE_WAIT)

    def _nop(self, params: list[bytes]) -> None:
        pass

    def _message_id(self, params: list[bytes], least: int) -> bytes:
        name = params[0].decode()
        if self.state not in (SUBSCRIBED, CLOSING):
            raise ProtocolError("E_INVALID", f"cannot {name} in current state")
        if len(params) < least:
            raise ProtocolError("E_INVALID", f"{name} insufficient number of params")
        if len(params[1]) != ID_BYTES:
            raise ProtocolError("E_INVALID", "invalid message ID")
        return params[1]

    def _fin(self, params: list[bytes]) -> None:
        message_id = self._message_id(params, 2)
        if self._window.finish(message_id):
            self.finish_count += 1
        else:
            self._not_in_flight(b"FIN", message_id)

    def _finish_run(self, data: bytearray, start: int, end: int) -> int:
        """FIN lines that follow one another; `start` itself if there is none to see."""
        at, done, failed = self._window.finish_run(data, start, end)
        self.finish_count += done
        if failed:
            for message_id in failed:
                self._not_in_flight(b"FIN", message_id)
        return int(at)

    def _req(self, params: list[bytes]) -> None:
        message_id = self._message_id(params, 3)
        delay = protocol.number(params[2])
        if delay is None:
            raise ProtocolError("E_INVALID", b"REQ could not parse timeout " + params[2])
        # the extension clamps it to max_req_timeout; what overflows Go's clock is negative
        delay_ns = max(protocol.signed(delay * 10**6 % 2**64), 0)
        if self._window.requeue(message_id, delay_ns):
            self.requeue_count += 1
        else:
            self._not_in_flight(b"REQ", message_id)

    def _touch(self, params: list[bytes]) -> None:
        message_id = self._message_id(params, 2)
        if not self._window.touch(message_id):
            self._not_in_flight(b"TOUCH", message_id)

    def _not_in_flight(self, command: bytes, message_id: bytes) -> None:
        elsewhere = self._host.is_in_flight(self.consumer, message_id)
        reason = b"client does not own message" if elsewhere else b"ID not in flight"
        self._say(protocol.failed(command, message_id, reason))

    # ---- what /stats shows ----

    def describe(self) -> dict[str, Any]:
        """As nsqd shows a client; `session` says which of its channel's it is."""
        consumer, tls, grant = self.consumer, self.tls, self.grant
        document: dict[str, Any] = {
            "client_id": self.client_id,
            "hostname": self.hostname,
            "version": "V2",
            "remote_address": self.address,
            "state": self.state,
            "ready_count": self.ready,
            "in_flight_count": consumer.in_flight if consumer is not None else 0,
            "message_count": self.message_count,
            "finish_count": self.finish_count,
            "requeue_count": self.requeue_count,
            "connect_ts": int(self.connected_at),
            "sample_rate": self.sample_rate,
            "deflate": self.deflate,
            "snappy": self.snappy,
            "user_agent": self.user_agent,
        }
        if grant is not None:
            document["authed"] = True
            if grant.identity:
                document["auth_identity"] = grant.identity
            if grant.identity_url:
                document["auth_identity_url"] = grant.identity_url
        document["topology_zone"], document["topology_region"] = self.zone, self.region
        if self.pub_counts:
            document["pub_counts"] = [
                {"topic": topic.decode(), "count": count}
                for topic, count in self.pub_counts.items()
            ]
        document["tls"] = tls is not None
        document["tls_cipher_suite"] = tls.cipher_suite if tls is not None else ""
        document["tls_version"] = tls.version if tls is not None else ""
        document["tls_negotiated_protocol"] = ""
        document["tls_negotiated_protocol_is_mutual"] = tls is not None
        document["session"] = consumer.session if consumer is not None else None
        return document

    # ---- delivery ----

    def pump(self) -> bool:
        """Take what the client may have now into the output; True: there may be more."""
        window = self._window
        self._pump_at = _NEVER
        if window is None or self.closing:
            return False
        if not self.ready and self._buffered:
            self.flush = True
        rate = self._fixed[1] if self._fixed else 0
        try:
            taken = window.take(_TAKE_MOST, _TAKE_BYTES, rate)
            full = self.consumer.in_flight >= self.ready
        except Gone:  # the channel was deleted
            self.abort()
            return False
        except OSError as error:
            self._fail(self._no_means(error))
            return False
        if taken is not None:
            frames, count = taken
            if count:
                self.output.append(frames)
                self.message_count += count
                self._buffered += len(frames)
        if self._buffered and (full or self._buffered >= self.buffer_size):
            self.flush = True
        elif self._buffered and self._flush_every:
            at = self._flushed_at + min(self._flush_every, _GATHER)
            if taken is None and at <= self.now:
                self.flush = True
            else:
                self._flush_at = min(self._flush_at, max(at, self.now))
        if full:
            every = _FULL_WINDOW_EVERY if self.ready else _CLOSED_WINDOW_EVERY
            self._pump_at = self.now + every
        return taken is not None and not full

    @property
    def waits(self) -> bool:
        """Whether it would take a message if there were one."""
        return self.ready > 0 and not self.closing and self._pump_at == _NEVER


_COMMANDS: Final = {
    b"FIN": Session._fin, b"RDY": Session._rdy, b"REQ": Session._req, b"PUB": Session._pub,
    b"MPUB": Session._mpub, b"DPUB": Session._dpub, b"NOP": Session._nop,
    b"TOUCH": Session._touch, b"SUB": Session._sub, b"CLS": Session._cls, b"AUTH": Session._auth,
}  # fmt: skip


# ---- helpers ----


def _valid(name: bytes) -> bool:
    return valid_name(name.decode("latin-1"))


def _sentence(error: BaseException) -> str:
    """For a client: a system's error without the name of what it was about."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _identify_error(what: str) -> ProtocolError:
    return ProtocolError("E_BAD_BODY", f"IDENTIFY {what} is invalid")


#: Characters of a name that are kept: it is shown, in /stats and in the log, and nothing else.
_SHOWN: Final = 512
_LONE_SURROGATES: Final = re.compile("[\ud800-\udfff]")


def shown(text: str) -> str:
    """A name that a client gave, so that it can be shown: without what is no character, and not
    longer than a name is."""
    return without_surrogates(text[:_SHOWN])


def without_surrogates(text: str) -> str:
    """The text of a JSON document as Go's decoder has it: no UTF-8 can say a lone surrogate."""
    return _LONE_SURROGATES.sub("\ufffd", text)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _identify_document(body: bytes) -> dict[str, Any]:
    """The fields that are looked at, as Go's decoder reads them: names in any letter case, null
    leaves a field alone, types must be right."""
    error = ProtocolError("E_BAD_BODY", "IDENTIFY failed to decode JSON body")
    try:
        text = body.decode("utf-8", "replace")
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise error from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise error
    kinds = protocol.IDENTIFY_FIELDS
    found: dict[str, Any] = {}
    for key, value in document.items():
        name = key.lower()
        if name not in kinds or value is None:
            continue
        if type(value) is not kinds[name]:
            raise error
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise error
        found[name] = shown(value) if isinstance(value, str) else value
    if not -(2**31) <= found.get("sample_rate", 0) < 2**31:
        raise error
    return found
