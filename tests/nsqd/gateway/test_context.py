"""Subscriptions through a gateway process's context, on a broker whose channels are deleted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shmq.errors import Gone
from shmq.gateway import context
from shmq.gateway.protocol import ProtocolError
from shmq.options import Options


class Consumer:
    """Of a channel that may have been deleted just after it was opened."""

    def __init__(self, gone: bool) -> None:
        self._gone = gone
        self.closed = False

    def limit(self, most: int) -> None:
        if self._gone:
            raise Gone("deleted")

    def close(self) -> None:
        self.closed = True


class Broker:
    """Its channels go `times` times, before or after they were opened."""

    def __init__(self, times: int) -> None:
        self._times = times
        self.opened: list[Consumer] = []

    def limit(self, name: str) -> int:
        return 10**9

    ended = False
    instance = "none"

    def supervisor_alive(self) -> bool:
        return True

    def native(self) -> Any:
        """Every topic and channel seems to be there already."""
        return SimpleNamespace(find_topic=lambda topic: (0, 0), find_queue=lambda *_: (0, 0))

    def settings(self, topic: str) -> Any:
        return SimpleNamespace(sealed=False)

    def consumer(self, topic: str, channel: str, most: int, timeout: float) -> Consumer:
        self._times -= 1
        if self._times >= 0 and self._times % 2:
            raise Gone("deleted")
        self.opened.append(Consumer(self._times >= 0))
        return self.opened[-1]


def context_of(broker: Broker) -> context.Context:
    control = cast(Any, None)
    return context.Context(
        Options(), cast(Any, broker), control, ports={}, start_time=0, argv=[], tls_context=None
    )


def test_sub_outlasts_deletions() -> None:
    """Others leave an ephemeral channel again and again while a client comes to it."""
    broker = Broker(5)
    found = context_of(broker).open_consumer(b"t", b"c#ephemeral", 1.0)
    assert cast(Any, found) is broker.opened[-1]
    assert [consumer.closed for consumer in broker.opened] == [True, True, True, False]


def test_sub_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_REQUEST_SECONDS", 0.05)
    broker = Broker(10**6)
    with pytest.raises(ProtocolError) as caught:
        context_of(broker).open_consumer(b"t", b"c#ephemeral", 1.0)
    assert caught.value.args == ("E_SUB_FAILED", "SUB failed to deleted topic/channel")
    assert all(consumer.closed for consumer in broker.opened)
