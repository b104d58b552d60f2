"""The error of a task that killed its workers."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool

from shmq.errors import ShmqError


class WorkerDied(ShmqError, BrokenProcessPool):
    """The workers that ran a task of `shmq.Executor` died, as often as the pool permits.

    It is a BrokenProcessPool for programs that expect one after such a death, but the pool goes on.
    """

    def __init__(self, pid: int | None, signal: int | None, attempts: int) -> None:
        """pid: the last worker, if it is known. signal: the number of the signal that ended it;
        None: it ended in another way, or another process started it. attempts: how often the task
        was tried."""
        self.pid, self.signal, self.attempts = pid, signal, attempts
        how = f"signal {signal}" if signal is not None else "an exit in the middle of it"
        super().__init__(
            f"run a task: {attempts} workers died of it, the last one (pid {pid}) by {how}; find "
            "out why (memory, a crash in C code), or raise `attempts` if they were killed"
        )

    def __reduce__(self) -> tuple[type[WorkerDied], tuple[int | None, int | None, int]]:
        return type(self), (self.pid, self.signal, self.attempts)
