"""The topics that hold AMQP's queues.

A queue `celery` is the topic `kombu.celery` with one channel, `queue`. Messages of lower priority
are in the topics `kombu.celery.p3`, `.p6` and `.p9`. A queue that goes with its last consumer is an
ephemeral topic. A queue whose name is no name of a topic (`celery@host.pidbox`) has a readable part
of it and a hash in its place.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

PREFIX: Final = "kombu."
CHANNEL: Final = "queue"
EPHEMERAL: Final = "#ephemeral"
PRIORITIES: Final = 10

#: The prefix, a lane, `.queue.dead` of a dead topic and this are the 64 characters of a name.
_MOST: Final = 64 - len(PREFIX) - len(".p9*") - len(f".{CHANNEL}.dead")
_PLAIN: Final = re.compile(rf"[.a-zA-Z0-9_-]{{1,{_MOST}}}\Z")
#: Plain names that could be taken for another queue's topic.
_MISTAKABLE: Final = re.compile(r".*(~?-[0-9a-f]{16}|\.p[0-9]|\.dead)\Z")
_FOREIGN: Final = re.compile(r"[^a-zA-Z0-9_-]")
_DIGITS: Final = 16


def encoded(queue: str) -> str:
    """The part of a topic's name for a queue. Different queues have different ones."""
    if _PLAIN.match(queue) and not _MISTAKABLE.match(queue):
        return queue
    digest = hashlib.sha256(queue.encode()).hexdigest()[:_DIGITS]
    return f"{_FOREIGN.sub('_', queue)[: _MOST - _DIGITS - 1]}-{digest}"


def topic_of(queue: str, ephemeral: bool, step: int = 0) -> str:
    """The topic of a queue, or of those of its messages that have this step of priority."""
    lower = f".{lane(step)}" if step else ""
    return f"{PREFIX}{encoded(queue)}{lower}{EPHEMERAL if ephemeral else ''}"


def topics_of(queue: str) -> list[str]:
    """The topics that a queue may have that goes with its last consumer."""
    return [topic_of(queue, True, step) for step in range(PRIORITIES)]


def pattern(topic: str) -> str:
    """A pattern that only this topic matches: a consumer of it does not create the topic."""
    plain = topic.removesuffix(EPHEMERAL)
    return f"{plain}*{topic[len(plain) :]}"


def channel_of(ephemeral: bool) -> str:
    """The channel of each topic."""
    return f"{CHANNEL}{EPHEMERAL}" if ephemeral else CHANNEL


def lane(step: int) -> str | None:
    """The priority, as `Producer.publish` takes it, of a step. None: the topic itself."""
    return f"p{step}" if step else None
