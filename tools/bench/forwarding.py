"""`shmq forward` into JetStream beside NATS' own Python client, which stores the same messages the
same way: atomic batches of 999 messages and a marker, each of which the server has acknowledged
before the next one is sent; a stream on disk.

A run is a number of messages. Theirs has them in a list, and neither takes them from a queue nor
finishes them. The time is that of the process itself, without its start."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import uuid
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from jetstream import JetStream
from runs import FORWARD, PATIENCE, Contestant, Outcome, Plan

BATCH = 999
RATE = 100_000  # messages for each second that a run is to last
FILL = 2000  # messages published at once
TOPIC, CHANNEL, SUBJECT = "t", "forward", "messages"


class Forwarding(Contestant):
    """A program that stores so many messages in a new stream and says how long it took."""

    lines: ClassVar[tuple[str, ...]] = (FORWARD,)
    package: ClassVar[str]

    def __init__(self, scratch: Path, server: JetStream) -> None:
        self._scratch, self._server = scratch, server

    def version(self) -> str:
        self._server.version()  # it starts now
        return importlib.metadata.version(self.package)

    def run(self, plan: Plan) -> Outcome:
        count, stream = int(RATE * plan.seconds), f"f{uuid.uuid4().hex}"
        try:
            said = self._said(stream, count, plan)
        finally:
            asyncio.run(self._removed(stream))
        if said["messages"] != count:
            raise RuntimeError(f"{said['messages']} of {count} messages were stored")
        return Outcome(count, said["seconds"])

    @abstractmethod
    def _said(self, stream: str, count: int, plan: Plan) -> dict[str, Any]:
        """Store so many messages; the numbers of `messages` and `seconds`."""

    async def _removed(self, stream: str) -> None:
        import nats
        from nats.js.errors import NotFoundError

        client = await nats.connect(self._server.url)
        try:
            await client.jetstream().delete_stream(stream)
        except NotFoundError:
            pass
        finally:
            await client.close()


def said_by(*words: str) -> dict[str, Any]:
    """The JSON object in the last line of a Python program."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=12 * PATIENCE, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class OurForwarder(Forwarding):
    name = "shmq forward"
    note = "leases, sends, finishes"
    package = "shmq"

    def _said(self, stream: str, count: int, plan: Plan) -> dict[str, Any]:
        import shmq

        instance, path = f"bench-{os.getpid()}-forward", self._scratch / "forward"
        path.mkdir(exist_ok=True)
        room = {"mem_queue_size": count, "in_flight_slots": 1 << 14}
        with shmq.Broker(path, instance, arena_size=count * (plan.size + 160), **room) as broker:
            broker.create_channel(TOPIC, CHANNEL)
            producer = broker.producer(TOPIC)
            for start in range(0, count, FILL):
                producer.publish_many([b"x" * plan.size] * min(FILL, count - start), timeout=60)
            target = f"{self._server.url}/{stream}?subject={stream}.{SUBJECT}"
            words = (TOPIC, CHANNEL, target, f"--instance={instance}", "--create")
            return said_by("-m", "shmq", "forward", *words, "--until-empty", "--json")


class NatsPy(Forwarding):
    name = "nats-py"
    note = "the same batches, from a list"
    package = "nats-py"

    def _said(self, stream: str, count: int, plan: Plan) -> dict[str, Any]:
        return said_by(__file__, self._server.url, stream, str(count), str(plan.size))


async def store(url: str, stream: str, count: int, size: int) -> float:
    """Make the stream and store the messages. Returns the seconds that took."""
    import nats

    bodies = [b"x" * size] * count
    marker = b"m" * (8 * BATCH + 100)
    began = time.perf_counter()
    client = await nats.connect(url)
    wish = {"name": stream, "subjects": [f"{stream}.>"], "storage": "file", "allow_atomic": True}
    answer = await client.request(f"$JS.API.STREAM.CREATE.{stream}", json.dumps(wish).encode())
    check(answer.data)
    for start in range(0, count, BATCH):
        batch, number = uuid.uuid4().hex, 0
        for number, body in enumerate(bodies[start : start + BATCH], 1):
            head = {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            await client.publish(f"{stream}.{SUBJECT}", body, headers=head)
        head = {
            "Nats-Batch-Id": batch,
            "Nats-Batch-Sequence": str(number + 1),
            "Nats-Batch-Commit": "1",
        }
        answer = await client.request(f"{stream}.marker", marker, PATIENCE, headers=head)
        if check(answer.data).get("count") != number + 1:
            raise RuntimeError(f"the server stored another number than {number + 1}")
    seconds = time.perf_counter() - began
    await client.close()
    return seconds


def check(said: bytes) -> dict[str, Any]:
    """The answer of JetStream. Raises RuntimeError if it is an error."""
    found: dict[str, Any] = json.loads(said)
    if "error" in found:
        raise RuntimeError(found["error"]["description"])
    return found


if __name__ == "__main__":
    words = sys.argv[1:]
    spent = asyncio.run(store(words[0], words[1], int(words[2]), int(words[3])))
    print(json.dumps({"messages": int(words[2]), "seconds": spent}))
