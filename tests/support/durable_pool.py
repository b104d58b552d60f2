"""A durable pool for `shmq worker support.durable_pool:pool`. SHMQ_INSTANCE names its broker."""

from __future__ import annotations

import os

import shmq
from support import pool_tasks

pool = shmq.Executor(topic="jobs", attempts=int(os.environ.get("POOL_ATTEMPTS", "2")))
private = shmq.Executor(1)
broken = shmq.Executor(topic="jobs", initializer=pool_tasks.refuse)
