"""`shmq forward`: moves the messages of one channel to another system, or of another to a topic.

A lease is one batch. Into JetStream and Kafka the batch and a marker that names the lease are
stored together or not at all, so a lease that was stored and not finished is finished and not
stored again. A target without markers gets every message at least once. Back, the publish of a
batch and a mark that says how far the source was read are one store in shared memory.
"""

from __future__ import annotations

from shmq.forward.forwarder import Forwarder
from shmq.forward.loop import Loop, Progress
from shmq.forward.origin import Origin, open_origin
from shmq.forward.receiver import Receiver
from shmq.forward.refusal import POLICIES, Stopped
from shmq.forward.target import Target, open_target

__all__ = ["Forwarder", "Loop", "Origin", "Progress", "Receiver", "Stopped", "Target"]
__all__ += ["POLICIES", "open_origin", "open_target"]
