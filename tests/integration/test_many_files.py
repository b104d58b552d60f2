"""A data path with very many files: of queues, and of others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import Child

import shmq

FILES = 100_000
TOPICS = 50


@pytest.mark.deep
def test_a_data_path_with_very_many_files(
    instance: str, data_path: Path, serve: Callable[..., Child]
) -> None:
    """The broker starts, is looked at, and ends when it is told to."""
    for number in range(FILES // 2):
        topic, file = number % TOPICS, number // TOPICS
        (data_path / f"topic{topic}:c.diskqueue.{file:06d}.dat").touch()
        (data_path / f"note-{number}.txt").touch()
    server = serve()
    with shmq.attach(instance, timeout=600) as broker:
        assert len(broker.stats().topics) == TOPICS
    assert asked("stat", instance).returncode == 0
    assert "Traceback" not in asked("doctor", instance).stderr
    server.process.terminate()
    assert server.wait() == 0
    assert "Traceback" not in server.errors
    assert sum(path.suffix == ".txt" for path in data_path.iterdir()) == FILES // 2


def asked(command: str, instance: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "shmq", command, f"--instance={instance}"]
    return subprocess.run(words, capture_output=True, text=True, check=False)
