"""The part of a broker's handle that changes and reads the settings of topics and channels."""

from __future__ import annotations

import contextlib
from typing import Unpack

from shmq.client.dead_letters import check_no_cycle
from shmq.errors import Gone
from shmq.finder import Finder
from shmq.names import check_name
from shmq.option_fields import TRANSIT
from shmq.settings import KEYS, Settings, SettingWords, unknown_keyword


class Configurable(Finder):
    """The settings of a `Broker`."""

    @property
    def limits(self) -> dict[str, int]:
        """The limits in force. Raises Gone."""
        raise NotImplementedError

    def configure(
        self, topic: str, channel: str | None = None, **settings: Unpack[SettingWords]
    ) -> Settings:
        """Change settings of a channel, or (channel None) of a topic, while everything runs. Topic
        and channel are created if they are missing. Returns all settings that hold now.

        A topic's settings are those of the messages that wait in the topic itself, and those that
        its later channels begin with; the channels that exist keep theirs. `Settings` says what
        each keyword means; those that are not given stay as they are, and a text is read as on the
        command line: `broker.configure("jobs", "workers", max_messages=1000, overflow="block")`.

        Raises TypeError for a keyword that is no setting, BadArgument for a value that makes no
        sense (also for a limit below what waits in the channel), BadName for a bad name, and
        otherwise as `create_channel`.
        """
        for name in settings:
            if name not in KEYS:
                raise TypeError(unknown_keyword(name))
        check_name(topic, "topic")
        if channel is None:
            native, index, generation = self._topic(topic)
            while True:  # until nobody else has changed them since they were read
                was = native.topic_settings(index, generation)
                now = Settings.from_native(was).changed(settings).check_names(topic, None)
                if native.configure_topic(index, generation, now.to_native(), was):
                    return now
        native, queue, serial = self._queue(topic, check_name(channel, "channel"))
        while True:
            was = native.settings(queue, serial)
            now = Settings.from_native(was).changed(settings).check_names(topic, channel)
            check_no_cycle(self.views(), topic, channel, now)
            if native.configure(queue, serial, now.to_native(), was):
                return now

    def settings(self, topic: str, channel: str | None = None) -> Settings:
        """Return the settings of a channel, or (channel None) of a topic. Raises Gone if there is
        no such topic or channel, and BadName."""
        if channel is None:
            native, index, generation = self._existing_topic(topic)
            return Settings.from_native(native.topic_settings(index, generation))
        native, queue, serial = self._existing_queue(topic, channel)
        return Settings.from_native(native.settings(queue, serial))


def at_once(broker: Configurable, topic: str, rows: int, size: int) -> tuple[int, int]:
    """How many of so many messages and bytes are published to the topic together, by those who
    publish long runs in pieces: a piece never waits for more room than the broker, or a channel
    with `max_messages` or `max_bytes`, can ever have. Raises Gone."""
    limits = broker.limits
    rows = min(rows, max(limits["mem_queue_size"], TRANSIT) // 4)
    size = min(size, limits["arena_size"] // 8)
    directory = broker.views().directory
    found = directory.find_topic(topic)
    if found is None:
        raise Gone(f"there is no topic {topic!r}")
    names = {queue.channel for queue in directory.live_queues() if queue.topic == found.index}
    for channel in names - {None} or {None}:
        with contextlib.suppress(Gone):  # it was deleted just now
            settings = broker.settings(topic, channel)
            rows = min(rows, settings.max_messages or rows)
            size = min(size, settings.max_bytes or size)
    return max(rows, 1), max(size, 1)
