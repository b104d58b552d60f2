"""Seals: what tells that a process which may attach has written something, so that it may be
unpickled.

To unpickle is to run code that the writer chose. A process that may attach to an instance may run
code as its user anyway; everybody else comes in by a gateway, or by a file in the data path. So the
messages of pools and queues are sealed (`Producer.seal`): in memory by a bit that only attached
processes can set, on disk by a tag that only who knows the instance's key can make. The outcomes of
durable pools begin with a secret that is derived from the key. `Message.sealed` and `objects` check
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from shmq.errors import BadName, Gone, NotInFlight, NotSealed, ShmqError

#: The error of a dead letter that was refused, which `shmq dead` shows.
REASON: Final = (
    "not sealed: it was not put by a process that may attach (or by a version of shmq without "
    "seals, or its seal is of another key), so it was not unpickled; submit it again"
)

#: Bytes of the secret before an outcome.
RESULTS_BYTES: Final = 16
#: Seconds between two lines of the log on one topic.
_QUIET: Final = 60.0

_log = logging.getLogger(__name__)
_lock = threading.Lock()
#: Topic -> when the last line was logged, and how many messages were refused since.
_refused: dict[str, tuple[float, int]] = {}


class Taken(Protocol):
    """A message in flight, as `refuse` needs it."""

    @property
    def topic(self) -> str:
        """Its topic."""

    @property
    def reject(self) -> Callable[..., None]:
        """Make it a dead letter."""

    def finish(self) -> None:
        """Remove it."""


def results_seal(key: bytes, topic: str) -> bytes:
    """The secret with which the outcomes of a topic's durable pool begin. key: of the instance.
    Raises ShmqError if it has none."""
    if not any(key):
        raise ShmqError(f"open the results of {topic!r}: the instance has no key for its seals")
    made = hashlib.blake2b(
        topic.encode(), key=key[16:], digest_size=RESULTS_BYTES, person=b"shmq-results"
    )
    return made.digest()


class _Settings(Protocol):
    @property
    def sealed(self) -> bool:
        """Whether only pools and queues may use the topic."""


class Known(Protocol):
    """A broker, as `check_open` needs it."""

    @property
    def settings(self) -> Callable[..., _Settings]:
        """The settings of a topic, or of a channel. Raises Gone if there is none."""


def check_open(broker: Known, topic: str, tried: str) -> None:
    """Raise NotSealed if the topic is that of a pool or a queue, or has its dead letters: no client
    of a network may read what is there, or take it away."""
    base = topic.removesuffix(".dead")
    names = (topic,) if base == topic else (topic, base.rpartition(".")[0])
    for name in filter(None, names):
        with contextlib.suppress(Gone):
            if broker.settings(name).sealed:
                raise NotSealed(
                    f"{tried}: {name!r} is the topic of a pool or a queue, whose items only "
                    "processes that may attach may put and take; use another topic"
                )


def refuse(message: Taken) -> None:
    """Make a message that is not sealed a dead letter of its channel, with the reason, and log it
    once for each burst. Raises Gone."""
    topic = message.topic
    with contextlib.suppress(NotInFlight):
        try:
            message.reject(REASON)
        except BadName:  # the name of the dead topic would be too long
            message.finish()
    with _lock:
        now = time.monotonic()
        since, count = _refused.get(topic, (-_QUIET, 0))
        count += 1
        if now - since < _QUIET:
            _refused[topic] = since, count
            return
        _refused[topic] = now, 0
    _log.warning("topic %s: %d messages are dead letters: %s", topic, count, REASON)


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held the parent's


os.register_at_fork(after_in_child=_in_child)
