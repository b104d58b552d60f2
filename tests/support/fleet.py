"""Instances that are read over TCP, each served by processes of its own on a port that stays."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

import shmq
from support import processes
from support.processes import WATCHDOG, Child, eventually


class Instance:
    """An instance with a topic `t` and its channel `c`."""

    def __init__(
        self,
        name: str,
        directory: Path,
        address: str | None = None,
        before: Iterable[str] = (),
        **options: Any,
    ) -> None:
        """address: of its gateway; else a free port of 127.0.0.1. before, options: of
        `processes.serve`."""
        self.name, self._directory = name, directory
        self._before, self._options = before, options
        self._directory.mkdir()
        self.address = address or _free_address()
        self.begin()

    def begin(self) -> None:
        """Serve, and attach to it."""
        self.start()
        self.broker = shmq.attach(self.name, timeout=WATCHDOG)
        self.broker.create_channel("t", "c")

    def start(self) -> None:
        """Serve, also what a killed one left."""
        self.child: Child = processes.serve(
            self.name,
            self._directory,
            before=self._before,
            tcp_address=self.address,
            **self._options,
        )

    def publish(self, first: int, count: int) -> list[bytes]:
        """Messages with numbers in this instance's name."""
        bodies = [b"%s %05d" % (self.name.encode(), first + number) for number in range(count)]
        self.broker.producer("t").publish_many(bodies)
        return bodies

    def answers(self) -> bool:
        """Whether its gateway accepts connections."""
        host, _, port = self.address.rpartition(":")
        with socket.socket() as sock:
            return sock.connect_ex((host, int(port))) == 0

    def kill(self) -> None:
        """Kill the supervisor; its gateway ends with it."""
        self.child.close()
        eventually(lambda: not self.answers(), what=f"{self.address} is closed")

    def gateways(self) -> Sequence[int]:
        """The gateway's processes."""
        children = psutil.Process(self.child.pid).children(recursive=True)
        return [one.pid for one in children if "shmq.gateway.worker" in one.cmdline()]

    def kill_gateway(self) -> None:
        """Kill the gateway's processes; the supervisor starts others."""
        for pid in self.gateways():
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it; its memory is left to who made up its name."""
        self.broker.close()
        self.child.close()


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"
