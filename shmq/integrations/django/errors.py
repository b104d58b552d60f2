"""The errors of the backend, beside those of shmq."""

from __future__ import annotations

import shmq


class WorkersDied(shmq.ShmqError):
    """The workers that ran a task died, as often as `max_attempts` permits."""

    def __init__(self, times: int) -> None:
        super().__init__(
            f"run a task: {times} workers died of it; find out why (memory, a crash in C code), or "
            "raise max_attempts in OPTIONS if they were killed by somebody"
        )
