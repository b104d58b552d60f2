"""A disk queue with small files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disk_files import LIMIT

from shmq.storage.diskqueue import DiskQueue


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[DiskQueue]:
    with DiskQueue(tmp_path, "t:c", max_bytes_per_file=200, max_msg_size=LIMIT) as it:
        yield it
