"""A small /dev/shm of a child's own, which can be filled up: for children whose words begin with
`mounted`, and which get the helpers' path."""

from __future__ import annotations

from pathlib import Path

import shmq

BALLAST = Path("/dev/shm/ballast")


def mounted(size: str) -> list[str]:
    """Words before a command: run it with a /dev/shm of this size."""
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ["unshare", "-Urm", "sh", "-c", script, "sh"]


def fill() -> None:
    """Leave no page, until the ballast is unlinked."""
    with BALLAST.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


def drain(broker: shmq.Broker, topic: str, channel: str, count: int) -> list[int]:
    """The numbers of the messages there, in their order: at least so many, and all there are."""
    came: list[int] = []
    with broker.consumer(topic, channel, max_in_flight=1000) as consumer:
        while batch := consumer.take_many(500, 30 if len(came) < count else 0):
            came += [int(bytes(body[:6])) for body in batch.bodies()]
            batch.finish()
    return came
