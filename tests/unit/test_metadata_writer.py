"""The names in nsqd.dat has, when the writer looks amid a change."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shmq.settings import Settings
from shmq.supervisor.metadata_writer import MetadataWriter


def names(data_path: Path) -> list[str]:
    found = json.loads((data_path / "nsqd.dat").read_text())
    return [topic["name"] for topic in found["topics"] or []]


def test_a_name_that_the_registry_has_later_than_the_directory_is_written(tmp_path: Path) -> None:
    generation = 1
    directory = SimpleNamespace(
        read=lambda _: generation, topics=[{"paused": 0}], topic_settings=lambda _: Settings()
    )
    registry: Any = SimpleNamespace(
        directory=directory, changes=0, topics=(), highest_clock=lambda: 0
    )
    broker: Any = SimpleNamespace(names_written=lambda before, written: None)
    writer = MetadataWriter(broker, registry, tmp_path, 0)
    writer.flush()
    assert names(tmp_path) == []
    generation = 2  # the core has made a topic ...
    writer.flush()
    assert names(tmp_path) == []
    topic = SimpleNamespace(name="t", index=0, channels=())
    registry.topics, registry.changes = (topic,), 1  # ... which the supervisor enters only now
    writer.flush()
    assert names(tmp_path) == ["t"]
    inode = (tmp_path / "nsqd.dat").stat().st_ino
    writer.flush()
    assert (tmp_path / "nsqd.dat").stat().st_ino == inode  # nothing has changed since
