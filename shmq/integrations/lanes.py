"""The lanes of a queue: one topic for each level of priority."""

from __future__ import annotations

from typing import Final

from shmq.arguments import counted

#: Most lanes of a queue.
LANES: Final = 4


def lanes_of(topic: str, max_priority: int | None) -> list[str]:
    """The topics of a queue, that of the lowest priority first: the topic itself, then
    `TOPIC.p1` and so on."""
    count = 1 if max_priority is None else min(LANES, max_priority + 1)
    return [topic, *(f"{topic}.p{number}" for number in range(1, count))]


def lane_number(priority: int, max_priority: int | None) -> int:
    """The lane of a priority from 0 to `max_priority`; a higher one counts as that."""
    if max_priority is None:
        return 0
    count = min(LANES, max_priority + 1)
    return min(max(priority, 0), max_priority) * count // (max_priority + 1)


def check_max_priority(max_priority: int | None) -> int | None:
    """Return it. Raises ValueError if it is neither None nor from 1 to 255, and TypeError for what
    is no whole number."""
    return None if max_priority is None else counted("max_priority", max_priority, 255)
