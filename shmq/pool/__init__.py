"""A pool of processes: `shmq.Executor`, whose tasks are messages and whose workers may die."""

from shmq.pool.executor import Executor
from shmq.pool.future import Future
from shmq.pool.task_timeout import TaskTimeout
from shmq.pool.worker_died import WorkerDied

__all__ = ["Executor", "Future", "TaskTimeout", "WorkerDied"]
