"""The part of an instance that one viewer may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from shmq.page import bodies

#: In a request: the sight of its sender; without it everything is seen.
SIGHT: Final = "shmq.sight"

#: A topic and a channel; None: the topic's backlog.
Place = tuple[str, str | None]


@dataclass(frozen=True)
class Sight:
    """Sights with the same key are the same."""

    key: object
    sees: Callable[[str, str | None], bool] = field(compare=False, repr=False)
    """Whether the counts of a channel, or of a topic's backlog, are shown."""
    reads: Callable[[str, str | None], bool] = field(compare=False, repr=False)
    """Whether what messages say is shown, and the command lines of processes there."""
    whole: bool = field(default=False, compare=False)
    """Whether everything is seen that belongs to the instance and to no channel."""

    def sees_topic(self, topic: str) -> bool:
        """Whether a topic as a whole is shown."""
        return self.sees(topic, None)

    def shown(self, topic: str, channel: str | None, found: Any) -> Any:
        """The findings at a place, without what is not shown to this viewer."""
        if not self.reads(topic, channel):
            found = bodies.without(found)
        return found if self.whole else self._without_names(found)

    def _without_names(self, found: Any) -> Any:
        """The same without the names of other topics in dead letters and settings."""
        if isinstance(found, list):
            return [self._without_names(item) for item in found]
        if not isinstance(found, dict):
            return found
        kept = {key: self._without_names(item) for key, item in found.items()}
        source = kept.get("source")
        if isinstance(source, str) and not self._sees_source(source):
            kept["source"] = None
        if kept.get("name") == "dead_letter" and not self._sees_setting(str(kept.get("text"))):
            kept["text"] = ""
        return kept

    def _sees_source(self, source: str) -> bool:
        topic, _, channel = source.partition("/")
        return self.sees(topic, channel or None)

    def _sees_setting(self, text: str) -> bool:
        return text in ("", "none", "auto") or self.sees_topic(text)


def _yes(topic: str, channel: str | None) -> bool:
    return True


def _no(topic: str, channel: str | None) -> bool:
    return False


EVERYTHING: Final = Sight("everything", _yes, _yes, True)
WITHOUT_BODIES: Final = Sight("without bodies", _yes, _no, True)


def sight_of(request: Any) -> Sight:
    """The sight of who sent a request."""
    found = request.get(SIGHT, EVERYTHING)
    assert isinstance(found, Sight)
    return found
