"""Moves convicted messages to the dead topics of their channels, and makes those topics.

A dead topic has a channel, so its messages are where they can be listed, redriven or consumed. If
it has none, the channel `dead` is made. It keeps nsqd's rules: with a limit, a time to live or a
dead topic of its own, letters could be lost or go round in circles.

A message that cannot be moved now is put off for a second, and nothing is dropped.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from shmq._native import Broker
from shmq.errors import Busy, Gone, ShmqError
from shmq.layout import constant
from shmq.settings import NONE
from shmq.supervisor.registry import Queue, Registry, Topic

#: The channel that a dead topic gets.
CHANNEL = "dead"

_BITE = 256  # messages moved under one lock
_LATER_NS = 1_000_000_000  # until the next try
_PATIENCE_NS = 2_000_000_000  # for an answer of the request server
_SAY_EVERY = 60.0  # seconds between two complaints about one channel

_log = logging.getLogger(__name__)


class DeadLetters:
    """Moves the convicted messages of one queue after the other. Several threads may do so."""

    def __init__(self, broker: Broker, registry: Registry) -> None:
        self._broker = broker
        self._registry = registry
        self._said: dict[str, float] = {}  # when a channel was complained about last
        self.moved = 0

    def move(self, index: int) -> int:
        """Move the convicted messages of a queue whose time has come, or put them off. Returns how
        many were moved. Raises Busy and Gone."""
        queue = self._registry.queue(index)
        if queue is None or not self._broker.dead_waiting(index):
            return 0
        moved = 0
        try:
            name = self._broker.dead_topic(index, queue.serial)
            topic = self._ready(name)
            while True:
                bite = self._broker.dead_move(
                    index, queue.serial, topic.index, topic.generation, _BITE
                )
                if bite is None:
                    self._broker.request(constant("CREATE_BACKLOG"), name, None, _PATIENCE_NS)
                elif not bite:
                    break
                else:
                    moved += bite
        except Busy:
            raise
        except Gone:
            if queue.gone:
                raise
            self._put_off(queue)  # the dead topic was deleted just now
        except ShmqError as exc:
            self._complain(queue, exc)
            self._put_off(queue)
        self.moved += moved
        return moved

    def _ready(self, name: str) -> Topic:
        """The dead topic of this name, with a channel and without settings."""
        topic = self._registry.topic(name)
        if topic is None or not topic.channels:
            self._broker.request(constant("CREATE_CHANNEL"), name, CHANNEL, _PATIENCE_NS)
            topic = self._registry.topic(name)
            if topic is None:
                raise Gone(f"topic {name!r} was deleted")
        for queue in topic.channels:
            settings = queue.view.settings
            kept = NONE if settings is None else replace(NONE, sealed=settings.sealed)
            if settings is not None and settings != kept:
                _log.warning(
                    "%s: it holds dead letters of other channels, so its settings (%s) are taken "
                    "back",
                    queue,
                    settings,
                )
                self._broker.configure(queue.index, queue.serial, kept.to_native())
        return topic

    def _put_off(self, queue: Queue) -> None:
        due = time.time_ns() + _LATER_NS
        while self._broker.dead_postpone(queue.index, due, _BITE) == _BITE:
            pass

    def _complain(self, queue: Queue, exc: ShmqError) -> None:
        now = time.monotonic()
        if now - self._said.get(str(queue), -_SAY_EVERY) >= _SAY_EVERY:
            self._said[str(queue)] = now
            _log.error("%s: its dead letters wait: %s", queue, exc)
