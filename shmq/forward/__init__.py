"""`shmq forward`: moves the messages of one channel to another system.

A lease is one batch. Into JetStream the batch and a marker that names the lease are stored together
or not at all, so a lease that was stored and not finished is finished and not stored again. A
target without markers gets every message at least once.
"""

from __future__ import annotations

from shmq.forward.forwarder import Forwarder, Progress
from shmq.forward.target import Target, open_target

__all__ = ["Forwarder", "Progress", "Target", "open_target"]
