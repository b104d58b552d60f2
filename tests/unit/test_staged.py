"""Rows that clients of the network stage: room for queues, and requests that commit them."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.deliveries import sorted_bodies

import shmq
import shmq.gateway.staged
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


# ---- commits ----


@pytest.fixture
def broker(open_broker: Callable[..., shmq.Broker]) -> shmq.Broker:
    """With a channel for the rows."""
    made = open_broker()
    made.create_channel("t", "c")
    return made


def committed(staged: StagedRows, rows: int = 5000) -> dict[str, object]:
    """Stage numbers; the request that commits them."""
    bodies = [b"%06d" % number for number in range(rows)]
    piece = (6).to_bytes(4, "little") * rows + b"".join(bodies)
    size = staged.stage("t", {**WORDS, "at": 0, "rows": rows}, piece)
    attempt = {"attempt": WORDS["attempt"], "rows": rows, "size": size}
    return {"writer": "w", "epoch": 1, "attempts": [attempt], "memory": None}


def test_a_request_publishes_for_a_limited_time_and_the_next_goes_on(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = StagedRows(broker)
    request = committed(staged)
    monkeypatch.setattr("shmq.gateway.staged._PUBLISHING", -1.0)
    found = [staged.commit("t", request) for _ in range(4)]
    assert found == [(2048, False), (2048, False), (904, True), (0, True)]
    assert sorted_bodies(broker, "t") == [b"%06d" % number for number in range(5000)]


@pytest.mark.parametrize("moment", ["_decide", "_pieces"])
def test_a_commit_that_another_request_has_ended_meanwhile_is_done(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The other one removes the files that this one is about to read."""
    first, second = StagedRows(broker), StagedRows(broker)
    request = committed(first)
    original = getattr(shmq.gateway.staged, moment)

    def late(*arguments: object) -> object:
        monkeypatch.setattr(shmq.gateway.staged, moment, original)
        assert second.commit("t", request) == (5000, True)
        return original(*arguments)

    monkeypatch.setattr(shmq.gateway.staged, moment, late)
    assert first.commit("t", request) == (0, True)
    assert len(sorted_bodies(broker, "t")) == 5000
