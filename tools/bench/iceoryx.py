"""iceoryx2 beside shmq: bodies in shared memory, from a publisher to a subscriber that polls."""

from __future__ import annotations

import ctypes
import os
import queue
import time
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

from peers import Link, Peer
from runs import LARGE, ONE, PATIENCE, ROUND_TRIPS, Plan

POLLS = 100  # looks before the processor is offered to others


class IceoryxLink(Link):
    """One service. The publisher waits while the subscriber's buffer is full."""

    def __init__(self, plan: Plan) -> None:
        self._service_name = uuid.uuid4().hex
        self._size = plan.size
        self._waiting = 16 if plan.line == LARGE else plan.capacity
        self._kept: list[Any] = []  # ports and the node end with their Python objects

    def _service(self) -> Any:
        import iceoryx2

        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        service = (
            node.service_builder(iceoryx2.ServiceName.new(self._service_name))
            .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(self._waiting)
            .max_publishers(1)
            .max_subscribers(1)
            .open_or_create()
        )
        self._kept += [node, service]
        return service

    def sender(self) -> Callable[[Any], Any]:
        import iceoryx2

        service = self._service()
        publisher = (
            service.publisher_builder()
            .initial_max_slice_len(self._size)
            .backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._kept.append(publisher)
        deadline = time.monotonic() + PATIENCE
        while not service.dynamic_config.number_of_subscribers:
            if time.monotonic() > deadline:
                raise queue.Empty
            time.sleep(0.001)
        loan, copy = publisher.loan_slice_uninit, ctypes.memmove

        def send(body: bytes) -> None:
            sample = loan(len(body))
            copy(sample.payload_ptr, body, len(body))
            sample.assume_init().send()

        return send

    def receiver(self, timeout: float) -> Callable[[], Any]:
        subscriber = self._service().subscriber_builder().create()
        self._kept.append(subscriber)
        look, copy = subscriber.receive, ctypes.string_at

        def receive() -> bytes:
            deadline = time.monotonic() + timeout
            while True:
                for _ in range(POLLS):
                    sample = look()
                    if sample is not None:
                        body = copy(sample.payload_ptr, sample.header.number_of_elements)
                        sample.delete()
                        return body
                os.sched_yield()
                if time.monotonic() > deadline:
                    raise queue.Empty

        return receive


class Iceoryx(Peer):
    name = "iceoryx2"
    lines: ClassVar[tuple[str, ...]] = (ONE, LARGE, *ROUND_TRIPS)
    note = "polls; nothing is acknowledged"

    def version(self) -> str:
        import importlib.metadata

        import iceoryx2  # noqa: F401

        return importlib.metadata.version("iceoryx2")

    def link(self, plan: Plan) -> Link:
        return IceoryxLink(plan)
