"""Rows that clients of the network stage leave room for queues."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

import shmq
from shmq.gateway.staged import StagedRows

WORDS = {"writer": "w", "epoch": 1, "attempt": "a" * 32}


def test_a_quarter_of_shared_memory_is_kept_for_queues(
    open_broker: Callable[..., shmq.Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = StagedRows(open_broker())
    piece = (96).to_bytes(4, "little") + b"x" * 96
    left = SimpleNamespace(f_blocks=100, f_bavail=26, f_frsize=100)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: left)
    size = staged.stage("t", {**WORDS, "at": 0, "rows": 1}, piece)
    assert size == len(piece) + 8
    left.f_bavail = 25
    with pytest.raises(shmq.Full, match="a quarter of /dev/shm is kept"):
        staged.stage("t", {**WORDS, "at": size, "rows": 1}, piece)
    staged.abandon("t", WORDS)
