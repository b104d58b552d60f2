"""Rows that clients of the network stage, and the requests that commit them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.deliveries import sorted_bodies

import shmq
import shmq.gateway.staged
from shmq.gateway.asker import Asker
from shmq.gateway.staged import StagedRows

WORDS = {"writer": "w", "epoch": 1, "attempt": "a" * 32, "secret": "b" * 32}
ASKER = Asker()


@pytest.fixture
def broker(open_broker: Callable[..., shmq.Broker]) -> shmq.Broker:
    """With a channel for the rows."""
    made = open_broker()
    made.create_channel("t", "c")
    return made


def staged_rows(broker: shmq.Broker) -> StagedRows:
    """As each process of the gateway has one."""
    return StagedRows(broker, lambda: 3600.0)


def committed(staged: StagedRows, rows: int = 5000) -> dict[str, object]:
    """Stage numbers; the request that commits them."""
    bodies = [b"%06d" % number for number in range(rows)]
    piece = (6).to_bytes(4, "little") * rows + b"".join(bodies)
    size = staged.stage(ASKER, "t", {**WORDS, "at": 0, "rows": rows}, piece)["size"]
    attempt = {"attempt": WORDS["attempt"], "rows": rows, "size": size}
    return {**WORDS, "attempts": [attempt], "memory": None, "skip": False}


def test_a_request_publishes_for_a_limited_time_and_the_next_goes_on(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staged_rows(broker)
    request = committed(staged)
    monkeypatch.setattr("shmq.gateway.staged._PUBLISHING", -1.0)
    found = [staged.commit(ASKER, "t", request) for _ in range(4)]
    assert found == [(2048, False), (2048, False), (904, True), (0, True)]
    assert sorted_bodies(broker, "t") == [b"%06d" % number for number in range(5000)]


@pytest.mark.parametrize("moment", ["_decide", "_pieces"])
def test_a_commit_that_another_request_has_ended_meanwhile_is_done(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The other one removes the files that this one is about to read."""
    first, second = staged_rows(broker), staged_rows(broker)
    request = committed(first)
    original = getattr(shmq.gateway.staged, moment)

    def late(*arguments: object) -> object:
        monkeypatch.setattr(shmq.gateway.staged, moment, original)
        assert second.commit(ASKER, "t", request) == (5000, True)
        return original(*arguments)

    monkeypatch.setattr(shmq.gateway.staged, moment, late)
    assert first.commit(ASKER, "t", request) == (0, True)
    assert len(sorted_bodies(broker, "t")) == 5000
