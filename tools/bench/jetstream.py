"""NATS JetStream beside shmq: a nats-server on loopback TCP, a stream in its memory, a durable pull
consumer. Every publish waits for the server's acknowledgement, and every message is acknowledged.

nats-server: `tools/peers nats`. nats-py: tools/locks/bench.txt."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import queue
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar

from peers import Link, Peer
from runs import MADE, ONE, PATIENCE, ROUND_TRIPS, Lacking, Plan

BIN = Path(__file__).parents[2] / "build" / "peers" / "bin"


class JetStreamLink(Link):
    """One stream of one subject. The end that is opened has an event loop of its own."""

    def __init__(self, plan: Plan, url: str) -> None:
        self._url, self._name = url, uuid.uuid4().hex
        self._many, self._count = plan.in_lists, plan.count if plan.in_lists else 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None
        self._do(self._made())
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loop": None, "_client": None}

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(work)

    async def _stream(self) -> Any:
        import nats

        self._client = await nats.connect(self._url, connect_timeout=int(PATIENCE))
        return self._client.jetstream(timeout=PATIENCE)

    async def _made(self) -> None:
        from nats.js import api

        stream = await self._stream()
        await stream.add_stream(
            name=self._name,
            subjects=[self._name],
            storage=api.StorageType.MEMORY,
            retention=api.RetentionPolicy.WORK_QUEUE,
        )

    def sender(self) -> Callable[[Any], Any]:
        stream, name = self._do(self._stream()), self._name
        loop = self._loop
        assert loop is not None
        run = loop.run_until_complete
        if not self._many:
            return lambda body: run(stream.publish(name, body))

        async def send(bodies: list[bytes]) -> None:
            for answer in [await stream.publish_async(name, body) for body in bodies]:
                await answer

        return lambda bodies: run(send(bodies))

    def receiver(self, timeout: float) -> Callable[[], Any]:
        from nats.errors import TimeoutError as NothingCame

        async def subscribed() -> Any:
            return await (await self._stream()).pull_subscribe(self._name, "bench")

        subscription, count, many = self._do(subscribed()), self._count, self._many
        loop = self._loop
        assert loop is not None
        run = loop.run_until_complete

        async def receive() -> Any:
            try:
                messages = await subscription.fetch(count, timeout)
            except NothingCame:
                raise queue.Empty from None
            for message in messages:
                await message.ack()
            bodies = [message.data for message in messages]
            return bodies if many else bodies[0]

        return lambda: run(receive())

    def close(self) -> None:
        if self._client is not None:
            self._do(self._client.close())
            self._client = None
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def remove(self) -> None:
        async def removed() -> None:
            await (await self._stream()).delete_stream(self._name)

        self._do(removed())
        self.close()


class JetStream(Peer):
    name = "NATS JetStream"
    lines: ClassVar[tuple[str, ...]] = (ONE, MADE, *ROUND_TRIPS)
    note = "publish, its ack, fetch, ack; nats-py, TCP"
    list_note = "publish_async of all, fetch and ack of all; nats-py, TCP"

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._server: subprocess.Popen[bytes] | None = None
        self._port = 0

    def version(self) -> str:
        import nats  # noqa: F401

        program = shutil.which("nats-server", path=f"{BIN}:{os.environ['PATH']}")
        if program is None:
            raise Lacking("there is no nats-server: tools/peers nats")
        if self._server is None:
            self._start(program)
        said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stdout
        return f"{importlib.metadata.version('nats-py')}, {said.strip()}"

    def _start(self, program: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        words = [
            "-js",
            "-a",
            "127.0.0.1",
            "-p",
            str(self._port),
            "-sd",
            str(self._scratch / "nats"),
        ]
        self._server = subprocess.Popen([program, *words], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise Lacking(f"{program} does not start")
            time.sleep(0.01)

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(PATIENCE)

    @property
    def url(self) -> str:
        """Of the server, after `version`."""
        return f"nats://127.0.0.1:{self._port}"

    def link(self, plan: Plan) -> Link:
        return JetStreamLink(plan, self.url)
