"""Faults that the machine must find. Each is put into this process, and a row or cell shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import shmq
from limits.site import MESSAGE
from shmq.queues.item import Room
from shmq.remote.producer import RemoteProducer


class Plant(NamedTuple):
    """put: puts the fault in. row: which shows it. found: a regular expression for a fault that the
    sheet then has."""

    put: Callable[[pytest.MonkeyPatch], None]
    row: str
    found: str


def stale_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit is believed from a stale value."""
    real = shmq.Broker.limit
    monkeypatch.setattr(
        shmq.Broker, "limit", lambda self, name: real(self, name) * (1 + (name[:5] == "max_m"))
    )


def cut_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body is cut in silence."""
    whole = RemoteProducer.publish

    def cut(self: RemoteProducer, body: Any, *words: Any) -> None:
        whole(self, body[:MESSAGE], *words)

    monkeypatch.setattr(RemoteProducer, "publish", cut)


def no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program waits for room, and does not look at it."""
    monkeypatch.setattr(Room, "is_short", lambda self, length, look: False)


PLANTS = {
    "stale_limit": Plant(stale_limit, "times", r"^msg_timeout by consumer:"),
    "cut_body": Plant(cut_body, "a_body", rf"{MESSAGE + 1} by remote: it is not refused"),
    "no_look": Plant(no_look, "kept_items", r"^item \d+ of Queue: (Full|Empty)"),
}
