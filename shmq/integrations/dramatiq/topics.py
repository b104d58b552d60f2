"""Which topics hold the messages of a queue of Dramatiq."""

from __future__ import annotations

import hashlib
import re
from typing import Final

#: The channel of each topic. All workers share it.
CHANNEL: Final = "workers"
#: With the longest addition, `.p3.workers.dead`, a topic has at most 64 characters.
_LONGEST: Final = 64 - len(".p3.workers.dead")
_AMBIGUOUS: Final = re.compile(r"\.p[0-9]\Z|\.dead\Z")
_DIGEST: Final = 12


def topic_of(namespace: str, queue: str) -> str:
    """The topic of a queue: `NAMESPACE.QUEUE`. A name that is too long for a topic, or that could
    be the topic of another queue's priority or dead letters, ends in a hash of itself."""
    name = f"{namespace}.{queue}"
    if len(name) <= _LONGEST and not _AMBIGUOUS.search(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
    return f"{name[: _LONGEST - _DIGEST - 1]}-{digest}"
