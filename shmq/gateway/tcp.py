"""Sockets and timers around sessions."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import logging
import select
import time
from collections.abc import Callable
from typing import Any, Final

from shmq import _native, audit
from shmq.door.peer import peer_of, uid_of
from shmq.door.seats import Seat
from shmq.door.shortage import shortage
from shmq.gateway.codecs import PACKED, Deflate, LayerError, Snappy, Stack, Tls
from shmq.gateway.connections import Connections
from shmq.gateway.context import Context
from shmq.gateway.outlet import Outlet
from shmq.gateway.session import Session
from shmq.gateway.shares import asking

#: Sizes of a connection's input buffer: small while it is idle, larger while reads fill it.
_FIRST_BUFFER: Final = 4 << 10
_BUSY_BUFFER: Final = 256 << 10
_HANDSHAKE_SECONDS: Final = 5.0
#: How long a closing connection waits until the client has taken its last bytes.
_LAST_WORDS_SECONDS: Final = 5.0
#: While the commands in a client's compressed bytes take longer than this, the client is probed
#: once in that time.
_ASK_EVERY: Final = 1.0
#: Bytes of one read from the socket if there is a layer.
_SCRATCH: Final = 64 << 10
#: Takes for one connection before the process's other connections get their turn.
_ROUNDS: Final = 4
#: Decoded pieces of one connection's input before the others get their turn.
_PIECES: Final = 4

_log = logging.getLogger(__name__)


class Connection(asyncio.BufferedProtocol):
    """One client's connection: its socket, its timer and its session."""

    session: Session
    peer: str
    """Whose connections it counts among: an IP address, or `uid:N` on a Unix socket."""

    def __init__(self, context: Context, connections: Connections, seat: Seat) -> None:
        self._seat = seat
        self._context = context
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._data = bytearray(_FIRST_BUFFER)
        self._view = memoryview(self._data)
        self._start = self._end = 0
        self._stack: Stack | None = None  # None: the bytes on the socket are plain
        self._scratch = memoryview(bytearray(0))
        self._tls: Tls | None = None  # during its handshake only
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._full_since = 0.0  # since when the socket accepts no more output; 0: it does
        self._eof = self._lost = self._stopped = self._again = self._watched = False
        self._working = self._pulled = self._paused = self._behind = False
        self._shed = False
        self._job: Any = None
        self._outlet: Outlet | None = None  # while a job sends, and nobody else may
        self._drop: Callable[[], object] | None = None  # forgets the present job, if it waits
        self.held = 0
        """Bytes in its buffers, as last reported."""
        self._pushed_at = self._asked_at = -_ASK_EVERY
        self._peer: select.poll | None = None  # made when input first takes more than one turn
        # While the client does nothing but publish to one topic, the extension has its input
        # (`_direct`). It is given the next input if the last was such (`_plain`).
        self._intake = intake = _native.Intake(
            self._get_buffer,
            self._buffer_updated,
            self._unsent,
            connections.waiter.waiter,
            connections.waiter.rung,
        )
        self.get_buffer = intake.get_buffer  # type: ignore[assignment,method-assign]
        self.buffer_updated = intake.buffer_updated  # type: ignore[assignment,method-assign]
        self._direct = self._plain = False

    # ---- called by asyncio ----

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        ip, address = "", "@"
        if isinstance(peer, tuple):
            ip = peer[0]
            address = f"[{ip}]:{peer[1]}" if ":" in ip else f"{ip}:{peer[1]}"
        self.session = Session(self._context, address, ip, self._loop.time(), time.time())
        self.session.uid = uid_of(transport)
        self.session.ends = (peer, transport.get_extra_info("sockname"))
        self._by = audit.by_peer(transport)
        self.peer = peer_of(transport)
        self._fd = transport.get_extra_info("socket").fileno()
        self._connections.enter(self)
        self._seat.close, self._seat.silent = self.stop, self._is_silent
        _log.info("TCP: new client(%s)", address)
        self.count()
        self._arm()

    def _get_buffer(self, sizehint: int) -> memoryview:
        if self._stack is not None:
            return self._scratch
        return self._view[self._end :]

    def _buffer_updated(self, nbytes: int) -> None:
        if self._direct:
            self._end_direct()
        elif self._plain and not self._end and self._begin_direct():
            if self._intake.publishes(nbytes):
                return
            self._end_direct()
        self._plain = False
        if self._stack is not None:
            self._stack.push(bytes(self._scratch[:nbytes]))
            self._pushed_at = self._loop.time()
            self._work()
            return
        self._end += nbytes
        session = self.session
        if session.delivery.consumer is not None and self._is_calm():
            session.now = self._loop.time()
            self._start = session.receive(self._data, self._start, self._end)
            if self._start == self._end < len(self._data):
                self._start = self._end = 0
                self._deliver()
            else:
                self._work()
            return
        if session.delivery.consumer is not None or session.job is not None or self._full_since:
            self._work()
            return
        # a shortcut for what `_work` does for a producer: publish, answer, wait for nothing
        session.now = self._loop.time()
        self._plain = not self._start
        self._start = session.publish_run(self._data, self._start, self._end)
        if self._start != self._end:
            self._plain = False
            self._start = session.receive(self._data, self._start, self._end)
            if not session.goes_on or self._timer is None:
                self._work()
                return
            self._arm()
        if self._end == len(self._data):
            self._work()
            return
        if self._start == self._end:
            self._start = self._end = 0
        if session.flush:
            self._write()

    def eof_received(self) -> bool:
        self._eof = True
        self._work()
        return True  # keep the connection open until the remaining output was written

    def pause_writing(self) -> None:
        self._full_since = self._loop.time()
        self._arm()

    def resume_writing(self) -> None:
        self._full_since = 0.0
        self._soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._end_direct()
        self._intake.close()
        if self._outlet is not None:
            self._outlet.end()
        self._connections.leave(self)
        self._seat.leave()
        self._connections.hold(-self.held)
        self.held = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._drop is not None:
            self._drop()
        consumer, leasing = self.session.delivery.consumer, self.session.leasing
        self.session.ended()
        if leasing is not None:
            leasing.asker.gone = True
            self._context.later(functools.partial(self._context.leases.leave, leasing.asker))
        if consumer is not None:
            self._connections.waiter.unwatch(consumer)
            with contextlib.suppress(RuntimeError):  # the process is ending
                self._context.later(consumer.close)
        self._view.release()
        _log.info("PROTOCOL(V2): [%s] exiting", self.session.address)

    # ---- called by `Connections` ----

    def stop(self) -> None:
        """Close the connection because the process ends."""
        self._end_direct()
        self.session.abort()
        self._settle()

    def _is_silent(self) -> bool:
        """Whether the client has asked for nothing yet."""
        session = self.session
        worked = self._direct or session.publishing.counts or session.grant is not None
        return not (worked or session.delivery.consumer is not None or session.leasing is not None)

    def changed(self) -> None:
        """The process's options have changed."""
        self._end_direct()
        session = self.session
        if self._lost or self._stopped:
            return
        session.changed()
        if session.closing and self._outlet is not None:  # an answer is on its way
            session.abort()
            self._transport.abort()
        self._settle()

    @property
    def user(self) -> str:
        """The user of the access file; empty: there is none."""
        return self.session.user

    def published(self) -> dict[bytes, int]:
        """Topic -> messages that were published over this connection so far."""
        self._end_direct()
        return self.session.publishing.counts

    def describe(self) -> dict[str, Any]:
        """Return `Session.describe`."""
        self._end_direct()
        return self.session.describe()

    def count(self) -> None:
        """Report the size of the buffers."""
        if self._lost:
            return
        held = len(self._data)
        if not self._shed:
            held += self._transport.get_write_buffer_size() + self.session.held
        if held != self.held:
            more, self.held = held - self.held, held
            self._connections.hold(more)

    def trim(self) -> None:
        """Shrink an idle input buffer to its first size."""
        if self._end == self._start and len(self._data) > _FIRST_BUFFER and not self._working:
            self._start = self._end = 0
            self._resize(_FIRST_BUFFER)
            self.count()

    def shed(self, reason: str) -> bool:
        """Close the connection because the process's buffers exceed their limit. Returns true if
        that frees memory."""
        if self._lost or self._shed:
            return False
        self._shed = True
        self._end_direct()
        _log.error(
            "PROTOCOL(V2): [%s] %s: %d of them are its", self.session.address, reason, self.held
        )
        if self._transport.get_write_buffer_size() or self._outlet is not None:
            self.session.abort()  # it does not read, so an error frame would not be sent either
            self._transport.abort()
        else:
            self.session.refuse("", reason)
        self._settle()
        self._start = self._end = 0
        self._resize(_FIRST_BUFFER)
        self.count()
        return True

    # ---- called when messages have arrived ----

    @property
    def gathers(self) -> bool:
        """Whether messages that were taken wait for more, so that another one is in no hurry."""
        return self.session.delivery.buffered > 0

    def ring(self) -> None:
        """Take messages: there may be some in the channel."""
        self._watched = False
        if self._is_calm() and self._start == self._end:
            self.session.now = self._loop.time()
            self._deliver()
        else:
            self._work()

    # ---- a client that only publishes ----

    def _begin_direct(self) -> bool:
        """Give the extension the input. Returns false if the client cannot publish now, or if
        output is on its way, which answers must not overtake."""
        session, transport = self.session, self._transport
        if self._full_since or not session.goes_on or transport.get_write_buffer_size():
            return False
        run = session.run
        if run is None:
            return False
        producer, line = run
        options = self._context.options
        room = self._view[:]  # `_view` is released while the transport still holds this
        self._intake.begin(
            self._fd, room, producer, line, options.max_msg_size, options.max_body_size
        )
        self._direct = True
        return True

    def _end_direct(self) -> None:
        """Take the input back, before anything else is done for the client."""
        if self._direct:
            self._direct = False
            self.session.published(*self._intake.end())

    def _unsent(self, data: bytes) -> None:
        """Write the answers that the socket did not take."""
        self.session.say(data)
        self._write()

    # ---- work ----

    def _soon(self) -> None:
        if not self._again and not self._lost:
            self._again = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._again = False
        if self._behind and self._stack is not None and self._stack.packed and not self._lost:
            self._look_after_peer()
        self._work()

    def _look_after_peer(self) -> None:
        """Find out whether the client is still there. While the session works on earlier input,
        nothing is read from the socket, so its end would not be noticed. POLLRDHUP is not enough:
        a client that has only shut down its sending side still waits for its answers. But if the
        client has closed the socket, its system answers a frame with a reset."""
        if self._peer is None:
            self._peer = select.poll()
            self._peer.register(self._transport.get_extra_info("socket"), select.POLLRDHUP)
        events = sum(events for _, events in self._peer.poll(0))
        now = self._loop.time()
        if events & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            self.session.abort()
        elif (events or now - self._pushed_at >= _ASK_EVERY) and now - self._asked_at >= _ASK_EVERY:
            self._asked_at = now
            self.session.ask()

    def _is_calm(self) -> bool:
        """Whether the client's bytes are plain, and nothing is under way for it."""
        if self._lost or self._working or self._stopped or self._eof or self._full_since:
            return False
        return self._stack is None and not self._behind and self.session.goes_on

    def _deliver(self) -> None:
        """A shortcut for what `_work` does for a subscriber that sent no more: messages, output,
        and then what to wait for."""
        session = self.session
        try:
            more = session.delivery.pump(session)
            if session.flush:
                self._write()
        except Exception as exc:  # as in `_work`
            self._failed(exc)
            more = False
        if more or self._full_since or not session.goes_on:
            self._work()
            return
        self._settle()

    def _work(self) -> None:
        """Do all work that is possible now: input, delivery, output; then set what to wait for."""
        if self._lost or self._working:
            return
        self._end_direct()
        self._working = True
        try:
            self.session.now = self._loop.time()
            if self._tls is not None:
                self._shake_hands()
            else:
                self._go_on()
        except LayerError as error:
            _log.error("PROTOCOL(V2): [%s] %s", self.session.address, error)
            self.session.abort()
        except Exception as exc:  # a defect ends this connection only, and leaves no client waiting
            self._failed(exc)
        finally:
            self._working = False
        self._settle()

    def _failed(self, error: Exception) -> None:
        what, shown = (
            (f"cannot go on: {short}", None) if (short := shortage(error)) else ("failed", error)
        )
        _log.error("PROTOCOL(V2): [%s] %s", self.session.address, what, exc_info=shown)
        self.session.abort()

    def _go_on(self) -> None:
        session = self.session
        if not self._full_since:
            self._read()
            delivery = session.delivery
            for _ in range(_ROUNDS if delivery.consumer is not None else 0):
                if not delivery.pump(session):
                    break
                if session.flush:
                    self._write()
                if self._full_since:
                    break
            else:
                if delivery.consumer is not None:
                    self._soon()
        if session.flush:
            self._write()
        if session.upgrades and not session.closing and self._tls is None:
            self._upgrade()

    def _read(self) -> None:
        """Pass the input that is available to the session."""
        session = self.session
        self._behind = False
        for turn in itertools.count():
            if turn == _PIECES:  # the other connections get their turn
                self._behind = True
                self._soon()
                return
            if (
                self._stack is not None
                and session.job is None
                and self._tls is None
                and not session.behind
            ):
                self._pull()
            # returns at once if the session still waits for the rest of a body
            self._start = session.receive(self._data, self._start, self._end)
            if session.job is not None:
                self._begin(session.job)
                break
            if session.behind:
                self._behind = True
                self._soon()
                return
            self._make_room()
            if self._stack is None or session.closing or session.upgrades or not self._pulled:
                break
        if self._eof and session.job is None and not session.closing:
            session.end()

    def _pull(self) -> None:
        assert self._stack is not None
        data = self._stack.pull()
        self._pulled = bool(data)
        if data:
            self._reserve(len(data))
            self._data[self._end : self._end + len(data)] = data
            self._end += len(data)
        elif self._stack.ended:
            self._eof = True

    # ---- the input buffer ----

    def _make_room(self) -> None:
        """Make room in the buffer for the next read."""
        held = self._end - self._start
        size = len(self._data)
        if not held:
            filled = self._end == size
            self._start = self._end = 0
            if filled and size < _BUSY_BUFFER:
                self._resize(size * 4)
            elif size > _BUSY_BUFFER:
                self._resize(_BUSY_BUFFER)
            return
        if self._end < size:
            return
        if self._start * 2 > size:
            self._resize(size)
        else:
            self._resize(size * 2)  # not to the declared size, which may be false

    def _reserve(self, nbytes: int) -> None:
        size = len(self._data)
        while size - (self._end - self._start) < nbytes:
            size *= 2
        if size != len(self._data) or self._end + nbytes > size:
            self._resize(size)

    def _resize(self, size: int) -> None:
        self._end_direct()
        held = self._end - self._start
        data = bytearray(size)
        data[:held] = self._view[self._start : self._end]
        self._view.release()
        self._data, self._view = data, memoryview(data)
        self._start, self._end = 0, held

    # ---- output ----

    def _write(self) -> None:
        self._end_direct()
        session = self.session
        if self._outlet is not None:  # when it is done
            return
        if session.output:
            data = session.output[0] if len(session.output) == 1 else b"".join(session.output)
            session.written()
            if self._stack is not None:
                data = self._stack.send(data)
            self._transport.write(data)
        else:
            session.written()

    # ---- jobs ----

    def _begin(self, job: Any) -> None:
        if self._job is job:
            return
        self._job = job
        if job.call is None:
            self._loop.call_later(job.seconds, self._done, job, None, None)
            return
        call = job.call
        if job.stream is not None and self._may_send():
            with contextlib.suppress(OSError):  # no descriptor: the event loop sends
                self._outlet = Outlet(self._fd)
                call = functools.partial(job.stream, self._outlet.send)
        with audit.acting(self._by, self.session.user), asking(self.session.asker()):
            call = functools.partial(contextvars.copy_context().run, call)
        if job.kind in ("login", "password"):
            task = self._loop.create_task(self._context.login(self.peer, job, call))
            self._drop = task.cancel
            future: asyncio.Future[Any] = task
        else:
            pool = self._context.pools.of(job.kind)
            future = pool.ask(self.peer, call)
            self._drop = functools.partial(pool.forget, future)
        future.add_done_callback(lambda done: self._finished(job, done))

    def _may_send(self) -> bool:
        """Whether a job may send to the socket now: the bytes there are plain, and no output is on
        its way that it would overtake."""
        waits = self.session.output or self._transport.get_write_buffer_size()
        return self._stack is None and not waits

    def _finished(self, job: Any, future: asyncio.Future[Any]) -> None:
        if future.cancelled():  # the connection has ended before the job's turn
            self._close_outlet()
            return
        error = future.exception()
        self._done(job, None if error is not None else future.result(), error)

    def _done(self, job: Any, result: Any, error: BaseException | None) -> None:
        self._job = self._drop = None
        self._close_outlet()
        session = self.session
        if self._lost or session.job is not job:
            if error is None and hasattr(result, "close") and hasattr(result, "in_flight"):
                with contextlib.suppress(RuntimeError):  # the process is ending
                    self._context.later(result.close)  # a consumer that was opened too late
            return
        session.now = self._loop.time()
        session.done(result, error)
        self._work()

    def _close_outlet(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None

    # ---- upgrades ----

    def _upgrade(self) -> None:
        """Add the layers that were agreed on, after the answer to IDENTIFY was written without
        them."""
        session = self.session
        if self._stack is None:
            self._stack = Stack()
            self._stack.push(bytes(self._view[self._start : self._end]))
            self._start = self._end = 0
            self._scratch = memoryview(bytearray(_SCRATCH))
        while session.upgrades:
            layer = session.upgrades[0]
            if layer == "tls":
                tls_context = self._context.tls_context
                assert tls_context is not None
                if not self._context.handshakes.begin(self.peer):
                    self._no_handshake("tls: too many handshakes have failed", b"")
                    return
                self._tls = Tls(tls_context, session.now + _HANDSHAKE_SECONDS)
                self._shake_hands()
                return
            if layer == "snappy":
                self._stack.layers.append(Snappy())
            else:
                self._stack.layers.append(Deflate(session.settings.deflate_level))
            self._scratch = self._scratch[:PACKED]
            session.upgraded(layer)
            self._write()

    def _shake_hands(self) -> None:
        session, tls, stack = self.session, self._tls, self._stack
        assert tls is not None
        assert stack is not None
        while data := stack.pull():
            tls.push(data)
        try:
            done, answer = tls.handshake(self._eof, session.now)
        except LayerError as error:
            self._context.handshakes.failed(self.peer, session.address, str(error))
            self._no_handshake(str(error), tls.alert)
            return
        self._transport.write(answer)
        if done:
            self._context.handshakes.passed(self.peer)
            self._tls = None
            stack.layers.append(tls)
            session.upgraded("tls", tls)
            self._write()
            self._upgrade()
            self._soon()

    def _no_handshake(self, reason: str, alert: bytes) -> None:
        self._tls, self._stack = None, None
        self._transport.write(alert)
        self.session.not_upgraded(reason)
        self._write()

    # ---- what to wait for ----

    def _settle(self) -> None:
        """After work: close the connection, or pause or resume reading, watch the channel and set
        the timer."""
        session = self.session
        if self._lost:
            return
        self.count()
        if session.closing and not self._stopped:
            if session.aborted:
                session.output.clear()
            elif session.output:
                self._write()
            self._stopped = True
            self._transport.close()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(_LAST_WORDS_SECONDS, self._transport.abort)
        if self._stopped:
            return
        busy = session.job is not None or self._behind or bool(self._full_since)
        if busy != self._paused:
            self._paused = busy
            if busy:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
        if session.waits and not busy and not self._watched and not self._again:
            self._watched = True
            self._connections.waiter.watch(session.delivery.consumer, self)
        self._arm()

    def _arm(self) -> None:
        session = self.session
        when = session.wake_at
        if self._tls is not None:
            when = min(when, self._tls.until)
        if self._full_since:
            when = min(when, self._full_since + session.patience)
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
            self._timer = None
        if when < 1e18:
            self._timer_at = when
            self._timer = self._loop.call_at(when, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if self._lost:
            return
        self._end_direct()
        session = self.session
        now = session.now = self._loop.time()
        if self._full_since and now >= self._full_since + session.patience:
            self._transport.abort()  # the client does not read its messages
            return
        session.tick()
        self._work()
