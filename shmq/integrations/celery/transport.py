"""kombu's transport: `shmq://INSTANCE`."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

from kombu.transport import base, virtual

import shmq
from shmq.errors import Gone, LayoutMismatch, NotRunning, TooManyClients
from shmq.integrations.celery import attachment
from shmq.integrations.celery.channel import Channel
from shmq.integrations.celery.inbox import GreenInbox, Inbox, inbox
from shmq.integrations.celery.queues import Queues

#: How many messages an event loop is given before its other events have their turn.
_TURN: Final = 16
#: How often who takes messages tidies, in seconds.
_TIDY_SECONDS: Final = 5.0


class Transport(virtual.Transport):
    """A transport of kombu whose broker is an instance of shmq.

    The host of the URL is the name of the instance; without a host it is SHMQ_INSTANCE, or
    `default`. The connections of a process share one attachment.
    """

    Channel = Channel
    can_parse_url = True
    driver_type = "shmq"
    driver_name = "shmq"

    connection_errors = (
        *virtual.Transport.connection_errors,
        Gone,
        NotRunning,
        LayoutMismatch,
        TooManyClients,
    )
    channel_errors = (*virtual.Transport.channel_errors, shmq.ShmqError)
    # Without these kombu would give up at the second error, whatever the policy of the call says: a
    # broker that stops is there until it has stored all messages.
    recoverable_connection_errors = (*connection_errors, *channel_errors)
    recoverable_channel_errors = ()

    implements = base.Transport.implements.extend(
        asynchronous=True,
        exchange_type=frozenset(["direct", "topic", "fanout"]),
        heartbeats=False,
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._inbox: Inbox | GreenInbox | None = None
        self._queues: Queues | None = None
        self._loops: list[Any] = []
        self._timers: list[Any] = []
        self._tidy_at = time.monotonic() + _TIDY_SECONDS

    def driver_version(self) -> str:
        """shmq's version."""
        return shmq.__version__

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """The URL as people may see it: it has no secret."""
        return uri if "://" in uri else f"shmq://{uri}"

    # ---- life ----

    @property
    def queues(self) -> Queues:
        """The queues of the instance. Raises as `shmq.attach`."""
        if self._queues is None:
            self._queues = Queues(attachment.attach(self._instance))
        return self._queues

    @property
    def _instance(self) -> str | None:
        return attachment.instance_of(self.client.hostname)

    @property
    def inbox(self) -> Inbox | GreenInbox:
        """The queues that this connection takes from."""
        if self._inbox is None:
            self._inbox = inbox()
        return self._inbox

    def inbox_arm(self) -> None:
        """An acknowledgement made room in a channel."""
        if self._inbox is not None:
            self._inbox.arm()

    def establish_connection(self) -> Any:
        """Attach to the instance. If it was stopped, the task of a worker waits for its next start:
        what it sends now, a retry or the next task of a chain, would be lost. Any other program has
        the patience of its call's policy. Raises as `shmq.attach`."""
        if attachment.is_in_a_task():
            attachment.ensure(self._instance, self._attach)
        else:
            self._attach()
        return super().establish_connection()

    def _attach(self) -> None:
        self._queues = None
        attachment.not_stopping(self.queues.broker)

    def verify_connection(self, connection: Any) -> bool:
        """Whether the instance is still there, and not about to stop."""
        try:
            attachment.not_stopping(self.queues.broker)
        except (Gone, NotRunning):
            return False
        return True

    def close_connection(self, connection: Any) -> None:
        """Close the channels."""
        super().close_connection(connection)
        while self._timers:
            self._timers.pop().cancel()
        if self._inbox is not None:
            if isinstance(self._inbox, Inbox) and not self._inbox.is_inherited:
                # in a forked child the loop's descriptors are the parent's
                for loop in self._loops:
                    loop.remove_reader(self._inbox.fileno())
            self._loops.clear()
            self._inbox.close()
            self._inbox = None

    # ---- delivering ----

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message. Raises TimeoutError if none comes within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if time.monotonic() >= self._tidy_at:
                self._tidy()
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if self.inbox.deliver(left):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Have an event loop of kombu deliver."""
        if isinstance(self.inbox, Inbox):
            loop.add_reader(self.inbox.fileno(), self.on_readable)
            self._loops.append(loop)
            self._timers.append(loop.call_repeatedly(_TIDY_SECONDS, self._tidy))

    def _tidy(self) -> None:
        """Delete what killed programs left, and have all priorities of the queues that are served
        follow the settings that somebody changed."""
        self._tidy_at = time.monotonic() + _TIDY_SECONDS
        if self._queues is None:
            return
        with contextlib.suppress(shmq.ShmqError):  # the connection's own calls meet it, too
            self._queues.sweep()
            self._queues.follow({name for each in self.channels for name in each.consumed()})

    def on_readable(self) -> None:
        """Deliver what has come, a few messages at a time."""
        for _ in range(_TURN):
            if not self.inbox.deliver(0):
                return
