"""Serves the clients' requests to create and delete topics and queues.

The loop also deletes ephemeral channels without consumers and replaces queues that something has
overwritten. A request that fails is logged and answered with a status; it never ends the loop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shmq import audit
from shmq._native import CONSTANTS, STATUS, Broker
from shmq.claims import released
from shmq.errors import BadArgument, BadName, Full, Gone, NotRunning, ShmqError
from shmq.layout import ClientKind
from shmq.names import base_name
from shmq.supervisor.loops import Bell, Pace
from shmq.supervisor.registry import Registry
from shmq.supervisor.results import ResultsKeeper
from shmq.supervisor.topics import TopicManager

_TICK = 1.0  # seconds without a ring
_LONGEST_REASON = 158  # bytes; the room that `answer` has for one
_SHARE = 0.002  # of a core's time, at most, to look for ephemeral channels without consumers

_CLAIMS_EVERY = 0.5  # seconds between two looks at what nobody claims any more, at least

#: Names in the audit log of the kinds of requests that people make.
_ACTIONS = {
    CONSTANTS["CREATE_TOPIC"]: "create_topic",
    CONSTANTS["CREATE_CHANNEL"]: "create_channel",
    CONSTANTS["JOIN_CHANNEL"]: "create_channel",
    CONSTANTS["DELETE_TOPIC"]: "delete_topic",
    CONSTANTS["DELETE_CHANNEL"]: "delete_channel",
    CONSTANTS["CREATE_STORE"]: "create_results",
    CONSTANTS["DELETE_STORE"]: "delete_results",
}

_log = logging.getLogger(__name__)


class RequestServer:
    """The loop that serves requests."""

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        manager: TopicManager,
        results: ResultsKeeper,
        data_path: Path,
    ) -> None:
        self._broker = broker
        self._registry = registry
        self._manager = manager
        self._results = results
        self._data_path = data_path
        self._claims = Pace(_CLAIMS_EVERY, _SHARE)
        self._ephemeral = Pace(0.0, _SHARE)
        self.broken: deque[int] = deque()
        """Indices of overwritten queues, which this loop replaces."""
        self._requests: dict[int, Callable[[str, str, tuple[int, int]], object]] = {
            CONSTANTS["CREATE_TOPIC"]: lambda topic, *_: manager.create_topic(topic),
            CONSTANTS["CREATE_CHANNEL"]: lambda topic, channel, _: manager.create_channel(
                topic, channel
            ),
            CONSTANTS["JOIN_CHANNEL"]: lambda topic, channel, _: manager.join_channel(
                topic, channel
            ),
            CONSTANTS["CREATE_BACKLOG"]: lambda topic, *_: manager.create_backlog(topic),
            CONSTANTS["DELETE_TOPIC"]: lambda topic, *_: manager.delete_topic(topic),
            CONSTANTS["DELETE_CHANNEL"]: lambda topic, channel, _: manager.delete_channel(
                topic, channel
            ),
            CONSTANTS["CREATE_STORE"]: lambda name, _, limits: results.create(name, *limits),
            CONSTANTS["DELETE_STORE"]: lambda name, *_: results.delete(name),
        }

    def run(self, bell: Bell) -> None:
        """Serve requests until the bell is stopped."""
        while not bell.check():
            request = self._broker.next_request()
            if request is not None:
                ticket, kind, topic, channel, client, numbers = request
                self._broker.answer(ticket, *self._serve(kind, topic, channel, client, numbers))
                continue
            if self.broken:
                self._manager.replace(self.broken.popleft())
                continue
            now = time.monotonic()
            if self._claims.is_due(now):
                self.drop_unclaimed()
                self._claims.did(now)
            if self._ephemeral.is_due(now):
                self._drop_ephemeral()
                self._ephemeral.did(now)
                bell.wait(_TICK)
            else:
                bell.wait(self._ephemeral.left(now))

    def _serve(
        self, kind: int, topic: str, channel: str, client: int, numbers: tuple[int, int]
    ) -> tuple[int, str | None]:
        """Serve one request. Returns the status to answer with, and the reason of a refusal that no
        status names."""
        try:
            if kind not in self._requests:
                return STATUS["INVALID"][0], None
            with self._on_behalf(client) as noting:
                try:
                    self._requests[kind](topic, channel, numbers)
                except Exception as exc:
                    if noting:
                        _note_refusal(kind, topic, channel, exc)
                    raise
            return 0, None
        except Exception as exc:
            status = status_of(exc)
            what = f"request {kind} of client {client} for {base_name(topic, channel or None)!r}"
            if isinstance(exc, ShmqError | OSError):
                _log.warning("%s refused: %s", what, exc)
            else:
                _log.exception("%s crashed", what)
            return status, _reason(exc) if status == STATUS["REFUSED"][0] else None

    @contextlib.contextmanager
    def _on_behalf(self, client: int) -> Iterator[bool]:
        """Attribute actions in this context to the client in the audit log. Yields whether they are
        noted: a gateway process writes its own entries, because it knows whom it serves."""
        entry = self._registry.directory.clients[client]
        noting = int(entry["kind"]) != ClientKind.GATEWAY
        with (
            audit.acting(audit.by_process(int(entry["pid"]))),
            self._manager.serving(noting=noting),
        ):
            yield noting

    def _drop_ephemeral(self) -> None:
        """Delete the ephemeral channels whose last consumer has left."""
        for queue in list(self._registry.ephemeral.values()):
            sessions = queue.view.sessions
            queue.had_consumer = queue.had_consumer or bool(np.any(sessions["since"]))
            if queue.channel is not None and queue.had_consumer and not np.any(sessions["client"]):
                _log.info("%s: its last consumer has left", queue)
                try:  # the core checks again, under the queue's lock, that it has no consumer
                    self._manager.delete_channel(queue.topic.name, queue.channel, idle=True)
                except (ShmqError, OSError) as exc:
                    _log.error("%s: cannot delete it: %s", queue, exc)

    def drop_unclaimed(self) -> None:
        """Delete the topics and stores that no process claims any more."""
        for topics, stores in released(self._data_path):
            try:
                for delete, names in (
                    (self._results.delete, stores),
                    (self._manager.delete_topic, topics),
                ):
                    for name in names:
                        with contextlib.suppress(Gone):
                            delete(name)
            except (ShmqError, OSError) as exc:  # the claim stays for the next look
                _log.error("cannot delete %s, which nobody has any more: %s", topics[0], exc)
                return
            _log.info("nobody has %s any more: it was deleted", topics[0])


def _note_refusal(kind: int, topic: str, channel: str, exc: Exception) -> None:
    action = _ACTIONS.get(kind)
    if action is not None:
        audit.note(action, topic, channel, audit.result_of(exc))


def status_of(exc: BaseException) -> int:
    """The core's status number for an exception."""
    text = str(exc)
    for number, _, sentence in STATUS.values():
        if number < 0 and sentence in text:
            return number
    names = [(Gone, "GONE"), (BadName, "BAD_NAME"), (Full, "NO_SPACE"), (NotRunning, "NOT_RUNNING")]
    for kind, name in names:
        if isinstance(exc, kind):
            return STATUS[name][0]
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return STATUS["NO_SPACE"][0]
    if isinstance(exc, MemoryError) or (isinstance(exc, OSError) and exc.errno == errno.ENOMEM):
        return STATUS["NO_MEMORY"][0]
    if isinstance(exc, BadArgument):
        return STATUS["INVALID"][0]
    return STATUS["REFUSED"][0]


def _reason(exc: BaseException) -> str:
    """The reason of a refusal, as far as an answer has room for it."""
    if isinstance(exc, OSError) and exc.strerror:
        text = f"{exc.strerror} ({exc.filename})" if exc.filename else exc.strerror
    elif isinstance(exc, ShmqError):
        text = str(exc)
    else:
        text = f"it failed: {type(exc).__name__}"
    # a space makes it no name, for a supervisor that finds it where names were
    data = "".join(letter if letter.isprintable() else "?" for letter in text).encode()
    if b" " not in data:
        data = b"it said: " + data
    if len(data) > _LONGEST_REASON:
        data = data[: _LONGEST_REASON - 3].decode(errors="ignore").encode() + b"..."
    return data.decode()
