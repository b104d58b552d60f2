"""The leases that a stop of the broker has returned: `shmq.leases`.

A stop writes the messages of open leases to disk, and the memory that knew the leases is gone. A
holder that has processed a lease could not tell its end from that of one which it finished. So the
stop writes down, before it returns anything, which leases of a channel were open, and under which
names. The file is JSON: from the identity of a channel, which no later memory has, to
{name: [lease, ...]}. A channel that ever had leases is there also if none was open.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Final

from shmq.storage import own_files
from shmq.storage.metadata import atomic_write

NAME: Final = "shmq.leases"
#: The channels that are remembered: those of the last stops.
_MOST: Final = 4096
_MOST_BYTES: Final = 16 << 20

_log = logging.getLogger(__name__)

Returned = dict[str, dict[str, list[int]]]


def load(data_path: Path | str) -> Returned:
    """The leases that stops have returned, the last stop's last. Raises OSError."""
    try:
        fd = own_files.open_file(Path(data_path) / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    with open(fd, "rb") as file:
        text = file.read(_MOST_BYTES)
    try:
        found: Returned = json.loads(text)
    except ValueError:
        _log.error(
            "%s: damaged, so holders of leases that a stop returned learn only that these are gone",
            Path(data_path) / NAME,
        )
        return {}
    return found


def add(data_path: Path | str, returned: Returned) -> None:
    """Write down the leases that a stop returns. A stop that was cut short has written down its own
    already. Raises OSError."""
    found = load(data_path)
    for identity, names in returned.items():
        before = found.pop(identity, {})
        found[identity] = {
            name: sorted({*before.get(name, ()), *names.get(name, ())})
            for name in (*before, *names)
        }
    newest = dict(list(found.items())[-_MOST:])
    atomic_write(Path(data_path) / NAME, json.dumps(newest).encode())
