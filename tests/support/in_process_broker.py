"""A broker without a supervisor process: its segments are anonymous memory, and the test itself is
the supervisor and all the clients. Deterministic, and quick enough to be made for every example."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any

from shmq import _native, layout
from shmq.client import Batch, Consumer, Producer
from shmq.sources import NativeSource
from shmq.views import DirectoryView, QueueView

SECOND = 10**9

LIMITS: dict[str, int] = {
    "msg_timeout": 60 * SECOND,
    "max_msg_timeout": 900 * SECOND,
    "max_req_timeout": 3600 * SECOND,
    "max_msg_size": 150_000,
    "arena_size": 256 << 10,
    "node_id": 7,
    "mem_queue_size": 16,
    "in_flight_slots": 16,
}

CLIENT, SUPERVISOR = 0, 1


class World:
    """The shared memory of an instance, its supervisor's attachment, and the clients that
    attach."""

    def __init__(self, **limits: int) -> None:
        self.limits = LIMITS | limits
        self._segments: dict[int, int] = {}  # serial -> descriptor
        self._directory_fd = os.memfd_create("directory")
        _native.create_directory(self._directory_fd, **self.limits)
        self._clients: list[Client] = []
        self.supervisor = self.attach_native(SUPERVISOR)
        self.supervisor.supervise(**self.limits)
        self.directory = DirectoryView(self.supervisor.view())

    def attach_native(self, kind: int = CLIENT) -> _native.Broker:
        return _native.Broker(self._directory_fd, self._open, kind, "world")

    def attach(self) -> Client:
        """A client that can die."""
        client = Client(self)
        self._clients.append(client)
        return client

    def _open(self, serial: int) -> int:
        if serial not in self._segments:
            raise FileNotFoundError(serial)
        return os.dup(self._segments[serial])

    def new_file(self, serial: int) -> int:
        """The descriptor of a new segment."""
        self._segments[serial] = os.memfd_create(f"segment {serial}")
        return self._segments[serial]

    def drop_file(self, serial: int) -> None:
        """Close the descriptor of a segment."""
        os.close(self._segments.pop(serial))

    def fd_of(self, serial: int) -> int:
        """The descriptor of a segment."""
        return self._segments[serial]

    # ---- what the supervisor does ----

    def create_topic(self, topic: str) -> tuple[int, int]:
        return self.supervisor.create_topic(topic, 0)

    def create_queue(self, topic: str, channel: str | None, **how: Any) -> tuple[int, int]:
        """A queue of its own for the channel, or (None) a backlog."""
        index, _ = self.create_topic(topic)
        queue, serial = self.supervisor.reserve_queue()
        self._segments[serial] = os.memfd_create(f"queue {serial}")
        base = topic if channel is None else f"{topic}:{channel}"
        self.supervisor.create_queue(self._segments[serial], queue, serial, index, base, **how)
        self.supervisor.enter_queue(queue, serial, index, channel)
        return queue, serial

    def create_channel(self, topic: str, channel: str) -> tuple[int, int]:
        """As the supervisor does: the first one gets the backlog."""
        index, _ = self.create_topic(topic)
        found = self.supervisor.find_queue(index, channel)
        if found is None:
            found = self.supervisor.take_over(index, channel)
            if found is not None:
                self.supervisor.renamed(found[0], f"{topic}:{channel}")
        return found or self.create_queue(topic, channel, ephemeral=channel.endswith("#ephemeral"))

    def remove_queue(self, queue: int, serial: int) -> None:
        self.supervisor.remove_queue(queue, serial)
        os.close(self._segments.pop(serial))

    def queue_view(self, queue: int) -> QueueView:
        return QueueView(self.supervisor.view(queue), f"queue {queue}")

    def reap(self) -> dict[int, int]:
        """Give back what the dead held; how many messages of each client."""
        found = self.supervisor.reap_scan()
        return {row[0]: self.supervisor.reap(row[0], row[1]) for row in found}

    def source(self) -> NativeSource:
        return NativeSource("world", self.supervisor)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.supervisor.detach()
        for fd in (self._directory_fd, *self._segments.values()):
            os.close(fd)
        self._segments.clear()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Client:
    """An attachment of its own. A thread holds its life lock, so it can die alone."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._end = threading.Event()
        attached: list[_native.Broker | BaseException] = []
        self._thread = threading.Thread(target=self._live, args=(attached,), daemon=True)
        self._thread.start()
        while not attached:
            self._thread.join(0.0005)
        if isinstance(attached[0], BaseException):
            raise attached[0]
        self.native = attached[0]
        self.index = self.native.client

    def _live(self, attached: list[_native.Broker | BaseException]) -> None:
        try:
            attached.append(self.world.attach_native())
        except BaseException as exc:
            attached.append(exc)
            return
        self._end.wait()

    def producer(self, topic: str) -> Producer:
        index, generation = self.world.create_topic(topic)
        backlog = functools.partial(self._backlog, topic)
        return Producer(self.native, index, generation, topic, backlog, _no_fork)

    def _backlog(self, topic: str) -> None:
        index, _ = self.world.create_topic(topic)
        if self.world.supervisor.find_queue(index, None) is None:
            self.world.create_queue(topic, None)

    def consumer(
        self, topic: str, channel: str, max_in_flight: int = 200, msg_timeout: int = 0
    ) -> Consumer:
        """msg_timeout in ns; 0: the queue's, -1: never."""
        queue, serial = self.world.create_channel(topic, channel)
        return Consumer(
            self.native, queue, serial, topic, channel, max_in_flight, msg_timeout, Batch, _no_fork
        )

    def die(self) -> None:
        """As a kill would: the life lock's holder ends, nothing is given back."""
        self._end.set()
        self._thread.join()
        while os.path.exists(f"/proc/self/task/{self._thread.native_id}"):  # join comes before
            time.sleep(0)

    def close(self) -> None:
        """Detach."""
        try:
            self.native.detach()
        finally:
            self.die()


def _no_fork() -> Any:
    raise AssertionError("nobody forks here")


def constant(name: str) -> int:
    return layout.constant(name)
