"""nsqd's protocols: a real nsqd beside shmq's gateway, with clients in C (nsq_client.c).

Both servers live as long as the bench and keep everything in memory; the server that is measured
has the cores. nsqd: `tools/dev peers`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

from runs import (
    LINES,
    PATIENCE,
    POST,
    POSTS,
    PUB,
    PUB_2,
    PUB_8,
    PUBS,
    PUBS_NEW,
    ROUND_TRIPS,
    SUB,
    Contestant,
    Lacking,
    Outcome,
    Plan,
    compile_c,
    report_of,
)

BIN = Path(__file__).parents[2] / "build" / "peers" / "bin"
SOURCE = Path(__file__).with_name("nsq_client.c")
CHANNEL = "bench"  # the client's
MEMORY = ("--mem-queue-size=4000000", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
BRIEFLY = 0.4  # seconds in which even lists stay below that mem-queue-size
BATCHES = (PUBS, PUBS_NEW, POSTS)
LISTENING = re.compile(r"(TCP|HTTP): listening on (\S+)")
#: Line -> what the client does, and its connections.
MODES = {
    PUBS: ("mpub", 2),
    PUBS_NEW: ("mpub", 2),
    SUB: ("sub", 2),
    PUB: ("pub", 1),
    PUB_2: ("pub", 2),
    PUB_8: ("pub", 8),
    POST: ("http-pub", 2),
    POSTS: ("http-mpub", 2),
    **dict.fromkeys(ROUND_TRIPS, ("roundtrip", 1)),
}


class Server(Contestant):
    """Started when it is first needed."""

    lines: ClassVar[tuple[str, ...]] = tuple(MODES)
    note = "client in C"

    def __init__(self, scratch: Path) -> None:
        self._client = scratch / "nsq_client"
        self._data = scratch / self.name.replace(" ", "-")
        self._log = scratch / f"{self._data.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._addresses: dict[str, str] = {}
        self._numbers = itertools.count()

    def _argv(self) -> list[str]:
        raise NotImplementedError

    def address(self, protocol: str) -> str:
        """HOST:PORT of `TCP` or `HTTP`."""
        if self._process is None:
            self._start()
        return self._addresses[protocol]

    def topic(self) -> str:
        """A new name."""
        return f"t{next(self._numbers)}"

    def post(self, path: str, **params: str) -> None:
        """Make a request of nsqd's HTTP interface. Raises HTTPError."""
        url = f"http://{self.address('HTTP')}{path}?{urllib.parse.urlencode(params)}"
        urllib.request.urlopen(url, b"", PATIENCE).close()

    def run(self, plan: Plan) -> Outcome:
        mode, connections = MODES[plan.line]
        topic = self.topic()
        self.post("/topic/create", topic=topic)
        options: dict[str, Any] = {
            "address": self.address("HTTP" if mode.startswith("http") else "TCP"),
            "topic": topic,
            "connections": connections,
            "size": LINES[plan.line].size or plan.size,
            "batch": plan.count,
            "seconds": min(plan.seconds, BRIEFLY) if plan.line in BATCHES else plan.seconds,
        }
        if plan.cpus:
            options["cpus"] = "{},{}".format(*plan.cpus)
        if not self._client.exists():
            compile_c(self._client, [SOURCE], "-std=c11", "-O2", "-Wall", "-Wextra")
        try:
            if plan.line == SUB:
                self.post("/channel/create", topic=topic, channel=CHANNEL)
                self._fill(options)
                self._await_channel(topic)
            elif plan.line in (PUBS, POSTS):  # into memory that was used before
                self._fill(options)
                self.post("/topic/empty", topic=topic)
            return Outcome.reported(report_of(self._client, mode, options, plan.seconds))
        finally:
            for name in (topic, f"{topic}-back"):
                with contextlib.suppress(urllib.error.HTTPError):  # most lines have no second one
                    self.post("/topic/delete", topic=name)

    def _fill(self, options: dict[str, Any]) -> None:
        """Publish more than is measured, but no more than fits into memory."""
        options = {**options, "address": self.address("TCP"), "seconds": 2 * BRIEFLY}
        report_of(self._client, "mpub", options, 2 * BRIEFLY)

    def _await_channel(self, topic: str) -> None:
        """Wait until all messages are in the channel: nsqd moves them there one by one."""
        url = f"http://{self.address('HTTP')}/stats?format=json&topic={topic}"
        deadline = time.monotonic() + PATIENCE
        while True:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                depth = json.load(answer)["topics"][0]["depth"]
            if not depth:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} has {depth} messages that are in no channel yet")
            time.sleep(0.05)

    def _start(self) -> None:
        self._data.mkdir()
        argv = [*self._argv(), *MEMORY, f"--data-path={self._data}"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(argv, stderr=log)
        deadline = time.monotonic() + PATIENCE
        while len(self._addresses) < 2:
            said = self._log.read_text()
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not listen: {said[-500:]}")
            self._addresses = dict(LISTENING.findall(said))
            time.sleep(0.01)

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


class Nsqd(Server):
    name = "nsqd"

    def version(self) -> str:
        if not (BIN / "nsqd").exists():
            raise Lacking("no nsqd: tools/dev peers")
        return "1.3.0"

    def _argv(self) -> list[str]:
        return [str(BIN / "nsqd")]


class OurGateway(Server):
    name = "shmq gateway"

    def version(self) -> str:
        import shmq

        return shmq.__version__

    def _argv(self) -> list[str]:
        instance = f"bench-gateway-{os.getpid()}"
        return [
            sys.executable,
            "-m",
            "shmq",
            "serve",
            f"--instance={instance}",
            f"--arena-size={4 << 30}",
            "--on-stop=flush",
        ]
