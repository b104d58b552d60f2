"""Leftovers of killed programs: of queues that go with their last consumer."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

import shmq
from shmq.errors import Gone
from shmq.integrations.celery import names
from shmq.integrations.celery.exchanges import Exchanges

#: For how long a queue that was declared and is not there yet may be on its way.
_YOUNG_SECONDS: Final = 10.0
#: How long a topic must be there that belongs to no queue until it is deleted.
_STRAY_SECONDS: Final = 3.0


def is_younger(known: dict[str, Any], seconds: float) -> bool:
    """Whether the last declaration of a queue with these settings is less than so long ago."""
    used: float = known.get("used", 0)
    return 0 <= time.time() - used < seconds


class Leftovers:
    """Finds and deletes them. One process may do so at any time, whatever others do.

    They are of three kinds: bindings of queues that have gone with their consumer; queues that have
    outlived their `x-expires` without a consumer, because a program that asks all workers declares
    its queue of replies, and may be killed before it takes any; and topics that belong to no queue,
    because a reply was published while the one who had asked was deleting its queue.
    """

    def __init__(self, broker: shmq.Broker, exchanges: Exchanges) -> None:
        self._broker = broker
        self._exchanges = exchanges
        self._strays: dict[str, float] = {}

    def sweep(self) -> list[str]:
        """Look, and delete. A topic that belongs to no queue is deleted when it is seen again some
        seconds later. Returns the queues that were forgotten."""
        there = {topic for topic in self._topics() if topic.endswith(names.EPHEMERAL)}
        strays, forgotten, late = set(there), [], {}
        for name in self._exchanges.ephemeral_queues():
            known = self._exchanges.queue(name) or {}
            strays.difference_update(names.topics_of(name))
            if names.topic_of(name, True) not in there:
                if self.forget(name, known):
                    forgotten.append(name)
            elif "expires" in known and not is_younger(known, known["expires"]):
                late[name] = known
        now = time.monotonic()
        self._strays = {topic: self._strays.get(topic, now) for topic in strays}
        old = [topic for topic, since in self._strays.items() if now - since >= _STRAY_SECONDS]
        if not late and not old:
            return forgotten
        taken = self._taken()
        for name, known in late.items():
            topics = names.topics_of(name)
            if not taken.intersection(topics) and self._exchanges.forget_queue(name, known):
                forgotten.append(name)
                self._delete(topics)
        self._delete([topic for topic in old if topic not in taken])
        return forgotten

    def forget(self, name: str, known: dict[str, Any]) -> bool:
        """Delete what is known of a queue that is not there, with its bindings, unless it was just
        declared. known: its settings when it was found missing. Returns whether it was deleted."""
        return not is_younger(known, _YOUNG_SECONDS) and self._exchanges.forget_queue(name, known)

    def _topics(self) -> list[str]:
        topics = self._broker.views().directory.live_topics()
        return [topic.name for topic in topics if topic.name.startswith(names.PREFIX)]

    def _taken(self) -> set[str]:
        """The topics with a consumer."""
        topics = self._broker.stats().topics
        return {topic.name for topic in topics for one in topic.channels if one.sessions}

    def _delete(self, topics: list[str]) -> None:
        for topic in topics:
            with contextlib.suppress(Gone):
                self._broker.delete_topic(topic)
