"""The counts of a channel, as a gateway tells them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class ChannelCounts:
    """Counts of a channel: those of `ChannelStats`, of the same names."""

    depth: int = 0
    """Messages that wait, in memory and on disk, without those in flight or deferred."""
    backend_depth: int = 0
    """Those of `depth` that are on disk."""
    in_flight: int = 0
    deferred: int = 0
    leased: int = 0
    """Messages in leases."""
    message_count: int = 0
    """Messages that entered the channel; redeliveries do not count."""
    message_bytes: int = 0
    """Bytes of the bodies of `message_count`."""
    delivered: int = 0
    finished: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    returned: int = 0
    """Deliveries taken back from consumers that died or closed."""
    dropped: int = 0
    expired: int = 0
    dead_lettered: int = 0
    paused: bool = False
    oldest_age: float | None = None
    """Seconds since the longest waiting message in memory was published; None if none waits."""

    @classmethod
    def of(cls, found: dict[str, Any]) -> Self:
        """From the document of an answer; other keys are ignored."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in names})
