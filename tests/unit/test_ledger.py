"""What names nsqd.dat has, when the ledger looks amid a change."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shmq.supervisor.ledger import Ledger


def names(data_path: Path) -> list[str]:
    found = json.loads((data_path / "nsqd.dat").read_text())
    return [topic["name"] for topic in found["topics"] or []]


def test_a_name_that_the_roster_has_later_than_the_directory_is_written(tmp_path: Path) -> None:
    generation = 1
    directory = SimpleNamespace(read=lambda _: generation, topics=[{"paused": 0}])
    roster: Any = SimpleNamespace(
        directory=directory, changes=0, topics=(), highest_clock=lambda: 0
    )
    broker: Any = SimpleNamespace(names_written=lambda before, written: None)
    ledger = Ledger(broker, roster, tmp_path, 0)
    ledger.flush()
    assert names(tmp_path) == []
    generation = 2  # the core has made a topic ...
    ledger.flush()
    assert names(tmp_path) == []
    topic = SimpleNamespace(name="t", index=0, channels=())
    roster.topics, roster.changes = (topic,), 1  # ... which the creator enters only now
    ledger.flush()
    assert names(tmp_path) == ["t"]
    inode = (tmp_path / "nsqd.dat").stat().st_ino
    ledger.flush()
    assert (tmp_path / "nsqd.dat").stat().st_ino == inode  # nothing has changed since
