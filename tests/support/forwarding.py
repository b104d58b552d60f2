"""Questions that tests of `shmq forward` ask, whatever the target."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

import shmq
from support.processes import WATCHDOG, Child

#: How many forwarders are killed; SHMQ_FORWARD_KILLS=100 makes the deep tests deeper.
KILLS = [
    pytest.param(3, marks=pytest.mark.shallow),
    pytest.param(
        int(os.environ.get("SHMQ_FORWARD_KILLS", "20")),
        marks=[pytest.mark.deep, pytest.mark.timeout(3600)],
    ),
]


def publish(broker: shmq.Broker, count: int, first: int = 0) -> list[bytes]:
    """Publish numbers to t, which has a channel c."""
    broker.create_channel("t", "c")
    bodies = [b"%06d" % number for number in range(first, first + count)]
    broker.producer("t").publish_many(bodies)
    return bodies


def taken(broker: shmq.Broker, topic: str = "t", channel: str = "c") -> list[bytes]:
    """All messages of a channel, in their order; they are finished."""
    found: list[bytes] = []
    with broker.consumer(topic, channel) as consumer:
        while broker.channel_depth(topic, channel):  # some may be on disk
            with consumer.take_many(1000, timeout=WATCHDOG) as batch:
                found += batch.bodies()
    return found


def wrong(bodies: Iterable[bytes], expected: Sequence[bytes]) -> dict[bytes, int]:
    """How often each message is there that is not there once."""
    found, wanted = Counter(bodies), set(expected)
    return {body: found[body] for body in {*found, *wanted} if found[body] != (body in wanted)}


def summary(child: Child) -> dict[str, int]:
    """The counts of a forwarder that has ended well."""
    found: dict[str, int] = json.loads(child.succeed()[-1])
    return found
