"""eCAL beside shmq: a publisher and a subscriber with a callback, over its shared memory. It drops
what a subscriber does not take in time, so only round trips can be compared."""

from __future__ import annotations

import importlib.metadata
import os
import queue
import time
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

from peers import Link, Peer
from runs import PATIENCE, ROUND_TRIPS, Plan

SETTLING = 1.0  # seconds in which the two ends, which look once a second, have found each other


class EcalLink(Link):
    """One topic."""

    def __init__(self) -> None:
        self._topic = uuid.uuid4().hex
        self._kept: list[Any] = []

    def _ecal(self) -> Any:
        from ecal import nanobind_core as ecal

        if not ecal.is_initialized():
            ecal.initialize(f"bench{os.getpid()}")
        return ecal

    def sender(self) -> Callable[[Any], Any]:
        publisher = self._ecal().Publisher(self._topic)
        self._kept.append(publisher)
        deadline = time.monotonic() + PATIENCE
        while not publisher.get_subscriber_count():
            if time.monotonic() > deadline:
                raise queue.Empty
            time.sleep(0.01)
        time.sleep(SETTLING)
        return publisher.send  # type: ignore[no-any-return]

    def receiver(self, timeout: float) -> Callable[[], Any]:
        came: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        subscriber = self._ecal().Subscriber(self._topic)
        subscriber.set_receive_callback(lambda *given: came.put(bytes(given[2].buffer)))
        self._kept.append(subscriber)
        return lambda: came.get(timeout=timeout)


class Ecal(Peer):
    name = "eCAL"
    lines: ClassVar[tuple[str, ...]] = ROUND_TRIPS
    note = "callback, queue.SimpleQueue; drops what is late"

    def version(self) -> str:
        from ecal import nanobind_core  # noqa: F401

        return importlib.metadata.version("eclipse-ecal")

    def link(self, plan: Plan) -> Link:
        return EcalLink()
