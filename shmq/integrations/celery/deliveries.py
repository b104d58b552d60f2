"""The messages that a channel has delivered and that were not acknowledged yet."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import shmq
from shmq.errors import NotInFlight

_log = logging.getLogger(__name__)


class Deliveries:
    """The prefetch limit, and the effect of an acknowledgement; kombu's name for it is QoS.

    Any thread may acknowledge. A message that nobody acknowledges stays with this process as long
    as the process lives, and goes back to its queue when the channel is closed or the process ends.
    """

    def __init__(self, on_room: Callable[[], None], dead_letters: bool) -> None:
        """on_room: called when an acknowledgement made room below the limit. dead_letters: whether
        a message that is rejected goes to the dead letters instead of being dropped."""
        self._on_room = on_room
        self._dead_letters = dead_letters
        self._held: dict[Any, shmq.Message] = {}
        self._pid = os.getpid()
        self._limit = 0

    @property
    def prefetch_count(self) -> int:
        """The number of messages that may be held at a time; 0: no limit."""
        return self._limit

    @prefetch_count.setter
    def prefetch_count(self, count: int | None) -> None:
        self._limit = count or 0
        self._on_room()

    def can_consume(self) -> bool:
        """Whether one more message may be delivered."""
        return not self._limit or len(self._held) < self._limit

    def __len__(self) -> int:
        """How many messages are held."""
        return len(self._held)

    def __bool__(self) -> bool:
        return True

    def hold(self, tag: Any, message: shmq.Message) -> None:
        """A message was delivered."""
        self._held[tag] = message

    def ack(self, tag: Any) -> None:
        """Finish a message. Raises Gone if the broker was stopped."""
        self._settle(tag, lambda message: message.finish())

    def reject(self, tag: Any, requeue: bool = False) -> None:
        """Give a message back to its queue, or drop it. Raises Gone if the broker was stopped."""
        if requeue:
            self._settle(tag, lambda message: message.requeue())
        elif self._dead_letters:
            self._settle(tag, lambda message: message.reject("rejected by its consumer"))
        else:
            self.ack(tag)

    def restore_unacked(self) -> None:
        """Give back all messages that are held."""
        for tag in list(self._held):
            self._settle(tag, lambda message: message.requeue(failed=False))

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Give back all messages that are held, at the end of the channel."""
        try:
            self.restore_unacked()
        except shmq.ShmqError as exc:  # the broker was stopped, and has them already
            _log.debug("the messages of a closed channel are with their broker: %s", exc)

    def _settle(self, tag: Any, how: Callable[[shmq.Message], None]) -> None:
        message = self._held.pop(tag, None)
        if message is None or self._pid != os.getpid():
            return  # answered before; in a forked child the message is the parent's
        full = self._limit and len(self._held) == self._limit - 1
        try:
            how(message)
        except NotInFlight:
            _log.warning("message %s had left its queue before it was answered", message.id)
        finally:
            if full:
                self._on_room()
