"""The topics of queues. Each queue has four lanes, one for each range of priorities, and each lane
is a topic: `django.ALIAS.LANE.QUEUE`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: The channel of every topic.
CHANNEL: Final = "workers"

#: The lanes, first the one that is served first, each with its lowest priority.
LANES: Final = (("urgent", 50), ("high", 1), ("normal", 0), ("low", -100))


def topic(alias: str, queue: str, priority: int) -> str:
    """The topic for a task of this priority, from -100 to 100."""
    lane = next(name for name, least in LANES if priority >= least)
    return f"django.{alias}.{lane}.{queue}"


def entries(alias: str, queues: Sequence[str] | None) -> list[str]:
    """The topics and patterns that a worker takes from, in the order of service. queues: None for
    all queues of the alias, which take turns; otherwise they are served in this order."""
    names = ["**"] if queues is None else queues
    return [f"django.{alias}.{lane}.{name}" for lane, _ in LANES for name in names]
