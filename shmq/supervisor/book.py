"""The settings that a topic or channel gets when it is made: those it had, or the defaults.

The settings that hold are in shared memory. The book has what must survive it, as shmq.dat was read
or last written, and the defaults by pattern from the options. A channel's defaults are the settings
of its topic, changed by each pattern of `channels` that matches, in their order; a topic's are what
the patterns of `topics` give.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

from shmq.errors import BadArgument, BadName
from shmq.names import is_ephemeral
from shmq.settings import NONE, Patterns, Settings
from shmq.storage.metadata import MetadataError

_log = logging.getLogger(__name__)

#: Saved settings: {topic: (its own or None, {channel: settings})}.
Saved = dict[str, tuple[Settings | None, dict[str, Settings]]]


class SettingsBook:
    """The saved settings and the defaults. The request server and the metadata writer use it: each
    replaces whole values."""

    def __init__(self, topics: Patterns, channels: Patterns, saved: Saved | None = None) -> None:
        self._topics = topics
        self._channels = channels
        self._saved: Saved = saved or {}

    def topic(self, name: str) -> Settings:
        """The settings of a topic that is made now."""
        own, _ = self._saved.get(name, (None, {}))
        return self.topic_default(name) if own is None else own

    def channel(self, topic: str, own: Settings, channel: str) -> Settings:
        """The settings of a channel that is made now. own: those of its topic."""
        _, channels = self._saved.get(topic, (None, {}))
        found = channels.get(channel)
        return self.channel_default(topic, own, channel) if found is None else found

    def topic_default(self, name: str) -> Settings:
        """The settings of a topic that has none of its own."""
        return _applied(self._topics, NONE, name)

    def channel_default(self, topic: str, own: Settings, channel: str) -> Settings:
        """The settings of a channel that has none of its own."""
        return _applied(self._channels, own, topic, f"{topic}/{channel}")

    def forget(self, topic: str, channel: str | None = None) -> None:
        """Forget a channel that was deleted; None: the topic with all its channels."""
        if channel is None:
            self._saved = {name: item for name, item in self._saved.items() if name != topic}
        elif topic in self._saved:
            own, channels = self._saved[topic]
            rest = {name: item for name, item in channels.items() if name != channel}
            self._saved = {**self._saved, topic: (own, rest)}

    def save(self, saved: Saved) -> None:
        """Replace what is saved."""
        self._saved = saved

    def to_save(self, held: dict[str, tuple[Settings, dict[str, Settings]]]) -> Saved:
        """Those of the settings that hold which the defaults do not give. Ephemeral names are left
        out."""
        found: Saved = {}
        for topic, (own, channels) in held.items():
            differing = {
                name: settings
                for name, settings in channels.items()
                if settings != self.channel_default(topic, own, name) and not is_ephemeral(name)
            }
            is_own = own != self.topic_default(topic)
            if (is_own or differing) and not is_ephemeral(topic):
                found[topic] = (own if is_own else None, differing)
        return found


def _applied(patterns: Patterns, base: Settings, *names: str) -> Settings:
    """`base` changed by the patterns, or `base` if the result would make no sense: a channel must
    be made all the same."""
    try:
        return patterns.apply(base, *names)
    except BadArgument as exc:
        _log.error("%s: the settings of the patterns that match do not fit: %s", names[-1], exc)
        return base


def to_document(saved: Saved) -> dict[str, Any]:
    """Saved settings as shmq.dat has them; {} if there are none."""
    return {
        topic: ({} if own is None else {"settings": own.differing()})
        | {"channels": {name: item.differing() for name, item in channels.items()}}
        for topic, (own, channels) in saved.items()
    }


def from_document(path: Path, document: dict[str, Any]) -> Saved:
    """The opposite of `to_document`. Raises MetadataError if it makes no sense."""
    try:
        return {
            topic: (
                NONE.changed(entry["settings"]) if "settings" in entry else None,
                {name: NONE.changed(words) for name, words in entry["channels"].items()},
            )
            for topic, entry in document.items()
        }
    except (BadArgument, BadName, KeyError, TypeError, AttributeError) as exc:
        sentence = f"its settings make no sense: {exc}"
        raise MetadataError(errno.EINVAL, sentence, str(path)) from exc
