"""Topics that pools and queues take: from then on nobody else may use them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from shmq.errors import Gone
from shmq.names import valid_name
from shmq.seal import Known
from shmq.settings import dead_topic

if TYPE_CHECKING:
    from shmq.views import DirectoryView

_log = logging.getLogger(__name__)


class Taking(Known, Protocol):
    """A broker, as `take_topic` needs it."""

    @property
    def configure(self) -> Callable[..., Any]:
        """Change the settings of a topic or a channel."""

    @property
    def directory(self) -> Callable[[], DirectoryView]:
        """A view of the directory."""


def take_topic(broker: Taking, topic: str, channel: str, **settings: Any) -> None:
    """Take a topic for a pool or a queue whose only channel is `channel`: close the topic and its
    dead letters to everybody else, and make the channel. Channels that others have made before get
    no more messages, and a warning names them. settings: of topic and channel. Raises as
    `Broker.configure`."""
    broker.configure(topic, sealed=True, **settings)
    broker.configure(topic, channel, sealed=True, **settings)
    with contextlib.suppress(Gone):
        letters = dead_topic(topic, channel)
        if valid_name(letters) and not broker.settings(letters).sealed:
            broker.configure(letters, sealed=True)
    found = broker.directory()
    places = {entry.index for entry in found.live_topics() if entry.name == topic}
    queues = [entry for entry in found.live_queues() if entry.topic in places]
    for other in {entry.channel for entry in queues} - {None, channel}:
        with contextlib.suppress(Gone):
            if not broker.settings(topic, other).sealed:
                _log.warning(
                    "topic %s: channel %s was there before the pool or queue that has the topic "
                    "now, and gets no more messages; delete it, or use another topic",
                    topic,
                    other,
                )


def is_taken(broker: Known, topic: str, channel: str) -> bool:
    """Whether `take_topic` was done."""
    with contextlib.suppress(Gone):
        return broker.settings(topic).sealed and broker.settings(topic, channel).sealed
    return False
