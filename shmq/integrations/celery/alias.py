"""The name `shmq` for kombu's table of transports.

kombu has no entry points for transports, only a table. It does load those of the group
`kombu.serializers` when it is imported, so a serializer of this module is one of them, and the
import adds the name to the table. The module imports nothing that makes kombu slower to start.
"""

from __future__ import annotations

from typing import Final

from kombu.transport import TRANSPORT_ALIASES

TRANSPORT_ALIASES.setdefault("shmq", "shmq.integrations.celery.transport:Transport")

#: A serializer for kombu: the name `shmq` is for bodies that are bytes already.
SERIALIZER: Final = (bytes, bytes, "application/x-shmq-bytes", "binary")
