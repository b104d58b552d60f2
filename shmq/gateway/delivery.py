"""The subscription of one client: SUB, RDY, FIN, REQ, TOUCH, CLS, and the delivery of messages.

The texts of errors and the order of checks are nsqd's (nsqd/protocol_v2.go).
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

from shmq import _native
from shmq.door.telling import told
from shmq.errors import Gone, NotSealed
from shmq.gateway import protocol
from shmq.gateway.host import Host, Job, Owner
from shmq.gateway.identify import Settings
from shmq.gateway.protocol import ID_BYTES, ProtocolError
from shmq.names import valid_name

#: nsqd's numbers of a client's state, as /stats shows them.
CONNECTED, SUBSCRIBED, CLOSING = 0, 3, 4

#: Messages and bytes of one take; then the other clients of the process get their turn.
_TAKE_MOST: Final = 1024
_TAKE_BYTES: Final = 256 << 10
#: A full window also opens when messages time out; nsqd looks for those every 100 ms.
_FULL_WINDOW_EVERY: Final = 0.1
#: How often a client with RDY 0 is checked: its channel may have been deleted.
_CLOSED_WINDOW_EVERY: Final = 1.0
#: Messages wait in the output buffer at most this long for further ones. A message that arrives
#: later than this after the last flush does not wait: it is flushed once the channel has no more.
_GATHER: Final = 0.01

_NEVER: Final = math.inf


class Delivery:
    """The client's subscription, and the messages in its output buffer."""

    def __init__(self, host: Host, settings: Settings) -> None:
        self._host = host
        self.state = CONNECTED
        self.consumer: Any = None
        """The consumer; None before SUB."""
        self.names: tuple[bytes, bytes] | None = None
        """Topic and channel of SUB; None before it."""
        self.window: Any = None
        self.ready = 0
        self.message_count = self.finish_count = self.requeue_count = 0
        # from IDENTIFY: the last one sets the size of the buffer, the first one the rest
        self._is_fixed = False
        self._msg_timeout = settings.msg_timeout
        self._sample_rate = 0
        self._flush_every = settings.buffer_timeout
        self._buffer_size = settings.buffer_size
        # the output buffer
        self.buffered = 0
        """Bytes of messages in the output."""
        self.flushed_at = -_NEVER
        """The last flush of messages."""
        self.flush_at = self.pump_at = _NEVER
        """When to flush, and when to call `pump` even though no message has arrived."""

    def configure(self, settings: Settings) -> bool:
        """Apply the settings of an IDENTIFY. Returns true if it is the first: later ones are
        answered, but delivery follows the first."""
        self._buffer_size = settings.buffer_size
        if self._is_fixed:
            return False
        self._is_fixed = True
        self._msg_timeout = settings.msg_timeout
        self._sample_rate = settings.sample_rate
        self._flush_every = settings.buffer_timeout
        return True

    # ---- SUB ----

    def sub(self, session: Owner, params: list[bytes]) -> None:
        if self.state != CONNECTED:
            raise ProtocolError("E_INVALID", "cannot SUB in current state")
        if not session.settings.heartbeat:
            raise ProtocolError("E_INVALID", "cannot SUB with heartbeats disabled")
        if len(params) < 3:
            raise ProtocolError("E_INVALID", "SUB insufficient number of parameters")
        topic, channel = params[1:3]
        if not valid_name(topic.decode("latin-1")):
            name = protocol.quoted(topic)
            raise ProtocolError("E_BAD_TOPIC", f"SUB topic name {name} is not valid")
        if not valid_name(channel.decode("latin-1")):
            name = protocol.quoted(channel)
            raise ProtocolError("E_BAD_CHANNEL", f"SUB channel name {name} is not valid")
        self._subscribe(session, topic, channel)

    def _subscribe(self, session: Owner, topic: bytes, channel: bytes) -> None:
        if not session.authorised(b"SUB", topic, channel):
            assert session.job is not None
            renewed = session.job.after

            def again(grant: Any, error: BaseException | None) -> None:
                renewed(grant, error)
                self._subscribe(session, topic, channel)

            session.job.after = again
            return
        self.names = topic, channel
        call = functools.partial(self._host.open_consumer, topic, channel, self._msg_timeout)
        after = functools.partial(self._subscribed, session)
        session.job = Job(call, after, kind=self._host.kind_of(topic))

    def _subscribed(self, session: Owner, consumer: Any, error: BaseException | None) -> None:
        if error is None:
            try:
                self.window = _native.Window(consumer)
            except (Gone, OSError) as exc:  # the process is ending and has closed the consumer
                error = exc
        if isinstance(error, ProtocolError):
            raise error
        if isinstance(error, Gone):
            raise ProtocolError("E_SUB_FAILED", "SUB failed exiting")
        if error is not None:
            raise ProtocolError("E_SUB_FAILED", f"SUB failed {told(error)}")
        self.consumer = consumer
        self.state = SUBSCRIBED
        session.say(protocol.OK)

    # ---- RDY, CLS ----

    def rdy(self, session: Owner, params: list[bytes]) -> None:
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
        self._set_ready(session, count)

    def cls(self, session: Owner, params: list[bytes]) -> None:
        if self.state != SUBSCRIBED:
            raise ProtocolError("E_INVALID", "cannot CLS in current state")
        self._set_ready(session, 0)
        self.state = CLOSING
        session.say(protocol.CLOSE_WAIT)

    def _set_ready(self, session: Owner, count: int) -> None:
        self.ready = count
        try:
            self.consumer.limit(count)
        except Gone:
            session.abort()

    # ---- FIN, REQ, TOUCH ----

    def finish_run(self, session: Owner, data: bytearray, start: int, end: int) -> int:
        """Execute the consecutive FIN lines at `start`. Returns where they end; `start` itself if
        there is none. The client must have subscribed."""
        at, done, failed = self.window.finish_run(data, start, end)
        self.finish_count += done
        if failed:
            for message_id in failed:
                self._not_in_flight(session, b"FIN", message_id)
        return int(at)

    def fin(self, session: Owner, params: list[bytes]) -> None:
        message_id = self._message_id(params, 2)
        if self.window.finish(message_id):
            self.finish_count += 1
        else:
            self._not_in_flight(session, b"FIN", message_id)

    def req(self, session: Owner, params: list[bytes]) -> None:
        message_id = self._message_id(params, 3)
        delay = protocol.number(params[2])
        if delay is None:
            raise ProtocolError("E_INVALID", b"REQ could not parse timeout " + params[2])
        # the extension clamps it to max_req_timeout; a delay that overflows Go's clock is negative
        delay_ns = max(protocol.signed(delay * 10**6 % 2**64), 0)
        if self.window.requeue(message_id, delay_ns):
            self.requeue_count += 1
        else:
            self._not_in_flight(session, b"REQ", message_id)

    def touch(self, session: Owner, params: list[bytes]) -> None:
        message_id = self._message_id(params, 2)
        if not self.window.touch(message_id):
            self._not_in_flight(session, b"TOUCH", message_id)

    def _message_id(self, params: list[bytes], least: int) -> bytes:
        name = params[0].decode()
        if self.state not in (SUBSCRIBED, CLOSING):
            raise ProtocolError("E_INVALID", f"cannot {name} in current state")
        if len(params) < least:
            raise ProtocolError("E_INVALID", f"{name} insufficient number of params")
        if len(params[1]) != ID_BYTES:
            raise ProtocolError("E_INVALID", "invalid message ID")
        return params[1]

    def _not_in_flight(self, session: Owner, command: bytes, message_id: bytes) -> None:
        elsewhere = self._host.is_in_flight(self.consumer, message_id)
        reason = b"client does not own message" if elsewhere else b"ID not in flight"
        session.say(protocol.failed(command, message_id, reason))

    # ---- messages ----

    def pump(self, session: Owner) -> bool:
        """Move messages that the client may have now to the output. Returns true if there may be
        more."""
        window = self.window
        self.pump_at = _NEVER
        if window is None or session.closing:
            return False
        if not self.ready and self.buffered:
            session.flush = True
        try:
            taken = window.take(_TAKE_MOST, _TAKE_BYTES, self._sample_rate)
            full = self.consumer.in_flight >= self.ready
        except Gone:  # the channel was deleted
            session.abort()
            return False
        except NotSealed as error:  # it became the channel of a pool, or got its dead letters
            session.fail(ProtocolError("E_SUB_FAILED", told(error)))
            return False
        except (OSError, MemoryError) as error:
            session.fail(protocol.no_means(error))
            return False
        if taken is not None:
            frames, count = taken
            if count:
                session.output.append(frames)
                self.message_count += count
                self.buffered += len(frames)
        if self.buffered and (full or self.buffered >= self._buffer_size):
            session.flush = True
        elif self.buffered and self._flush_every:
            at = self.flushed_at + min(self._flush_every, _GATHER)
            if taken is None and at <= session.now:
                session.flush = True
            else:
                self.flush_at = min(self.flush_at, max(at, session.now))
        if full:
            every = _FULL_WINDOW_EVERY if self.ready else _CLOSED_WINDOW_EVERY
            self.pump_at = session.now + every
        return taken is not None and not full


DELIVERY_COMMANDS: Final = {
    b"FIN": Delivery.fin,
    b"RDY": Delivery.rdy,
    b"REQ": Delivery.req,
    b"TOUCH": Delivery.touch,
    b"SUB": Delivery.sub,
    b"CLS": Delivery.cls,
}
