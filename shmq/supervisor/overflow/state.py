"""The spiller's own state of each queue, beside the queue's header."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shmq.supervisor.registry import Queue

STARVING = 0.050  # seconds for which consumers that were seen to wait are assumed to


@dataclass(slots=True)
class QueueState:
    """The spiller's notes on a queue. Times are monotonic seconds."""

    seen_read: int  # read position up to which files were deleted
    seen_kept: int = -1  # if nothing is kept in memory alone: position before which none is needed
    retry_at: dict[str, float] = field(default_factory=dict)
    """By kind of work (write, read, tidy): after an error, not before this time."""
    asked_at: float = -math.inf  # when a publisher last rang for room
    spilled_at: float = 0.0  # when a spill last made room
    restored_at: float = 0.0  # when messages were last read from disk
    starved_at: float = -math.inf  # when consumers were last seen to wait for the disk
    filled: int = 0  # messages in the requeue ring after the last restore
    credit: int = 0  # messages read from disk that no spill has paid with (`Mover.spill`)
    delivered: tuple[float, int] = (0.0, 0)  # a time, and the number delivered by then
    checked: tuple[int, int] = (-1, -1)  # positions that were last found possible
    batch_bytes: int = 4 << 20  # bytes to write at once; fewer while the disk is nearly full
    record_bytes: int = 512  # average size of the records that were last read
    no_room: int = -1  # free_tail when no message from disk fitted: none will until it moves
    no_room_until: float = 0.0  # or until then, if /dev/shm was full

    def is_starved(self, now: float) -> bool:
        """True if consumers wait for messages on disk. now: monotonic seconds."""
        return now - self.starved_at < STARVING


class States(dict[Queue, QueueState]):
    """The notes on all queues; they begin at the first look at a queue."""

    def __missing__(self, queue: Queue) -> QueueState:
        state = self[queue] = QueueState(queue.first_read)
        return state

    def forget_gone(self) -> None:
        """Drop the notes on deleted queues."""
        for queue in [queue for queue in self if queue.gone]:
            del self[queue]
