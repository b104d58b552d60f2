"""The nsqd that shmq takes the place of."""

from __future__ import annotations

from typing import Final

#: The version that `/stats` states; nsqadmin compares it with that of the other nodes.
NSQD_VERSION: Final = "1.3.0"
