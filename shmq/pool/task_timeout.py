"""The error of a task that ran for too long."""

from __future__ import annotations

from shmq.errors import ShmqError


class TaskTimeout(ShmqError, TimeoutError):
    """A task of `shmq.Executor` ran for longer than `timeout`, as often as the pool permits. Its
    workers were ended, and replaced."""

    def __init__(self, seconds: float, pid: int | None, attempts: int) -> None:
        """seconds: the limit. pid: the last worker. attempts: how often the task was tried."""
        self.seconds, self.pid, self.attempts = seconds, pid, attempts
        times = "once" if attempts == 1 else f"{attempts} times"
        super().__init__(
            f"run a task: it was tried {times}, and ran for more than {seconds:g} s in its last "
            f"worker (pid {pid}), which was ended; find out why, or raise `timeout`"
        )

    def __reduce__(self) -> tuple[type[TaskTimeout], tuple[float, int | None, int]]:
        return type(self), (self.seconds, self.pid, self.attempts)
