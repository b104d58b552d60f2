"""Channels with limits and times to live against a plain model: random settings, publishes, takes,
settlements, sweeps and deaths, in one process. After each operation both hold the same messages,
and an independent recount of the segment finds nothing wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support import recount
from support.in_process_broker import World

from shmq.errors import Full, MessageTooBig, Rejected
from shmq.layout import State
from shmq.settings import OVERFLOWS, Settings

TOPIC, CHANNELS = "t", ("a", "b", "c")
NO_TIME = 1e-9  # seconds to live: expired when anybody looks
SIZES = st.integers(1, 60)
IN_MEMORY = 400  # messages of a channel


@dataclass(eq=False)
class Msg:
    """A message in one channel."""

    body: bytes
    expires: bool
    native: Any = None


@dataclass(eq=False)
class Channel:
    """A channel, as the model sees it."""

    index: int
    serial: int
    settings: Settings = field(default_factory=Settings)
    ready: list[Msg] = field(default_factory=list)
    back: list[Msg] = field(default_factory=list)
    in_flight: list[Msg] = field(default_factory=list)
    dropped: int = 0
    dropped_oldest: int = 0
    rejected: int = 0
    expired: int = 0

    def lacks(self, bodies: list[bytes]) -> str:
        """ "big", "full" or "" for a publish."""
        n, size, limits = len(bodies), sum(map(len, bodies)), self.settings
        if (limits.max_messages and n > limits.max_messages) or (
            limits.max_bytes and size > limits.max_bytes
        ):
            return "big"
        if limits.overflow == "drop-oldest" and not self.ready:
            return ""
        full = limits.max_messages and len(self.ready) + len(self.back) + n > limits.max_messages
        full = full or (limits.max_bytes and self.ready_bytes + size > limits.max_bytes)
        return "full" if full else ""

    @property
    def ready_bytes(self) -> int:
        return sum(len(msg.body) for msg in self.ready)


class Machine(RuleBasedStateMachine):
    """The rules."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(mem_queue_size=IN_MEMORY, in_flight_slots=400, arena_size=1 << 20)
        self.topic, _ = self.world.create_topic(TOPIC)
        self.channels = [Channel(*self.world.create_channel(TOPIC, name)) for name in CHANNELS]
        self.publisher = self.world.attach()
        self.producer = self.publisher.producer(TOPIC)
        self.consumers = [self.consumer(name) for name in CHANNELS]
        self.made = 0
        self.buried: list[Any] = []  # a dead consumer that is dropped would close its successor

    def teardown(self) -> None:
        self.consumers.clear()
        self.world.close()

    def consumer(self, name: str) -> Any:
        client = self.world.attach()
        return client, client.consumer(TOPIC, name, 100, 0)

    # ---- settings ----

    @rule(
        which=st.integers(0, 2),
        overflow=st.sampled_from(OVERFLOWS),
        messages=st.none() | st.integers(1, 12),
        nbytes=st.none() | st.integers(50, 400),
    )
    def somebody_configures(
        self, which: int, overflow: str, messages: int | None, nbytes: int | None
    ) -> None:
        channel = self.channels[which]
        if overflow == "disk":
            messages = nbytes = None
        elif overflow.startswith("drop") and messages is nbytes is None:
            messages = 5
        chosen = Settings(max_messages=messages, max_bytes=nbytes, overflow=overflow)
        self.sync()
        try:
            self.world.supervisor.configure(channel.index, channel.serial, chosen.to_native())
        except ValueError:
            assert messages is not None
            assert messages < len(channel.ready) + len(channel.back)
            assert overflow != "drop-oldest"
            return
        channel.settings = chosen
        native = self.world.supervisor.settings(channel.index, channel.serial)
        assert Settings.from_native(native) == chosen

    # ---- publish ----

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=15), expires=st.booleans())
    def somebody_publishes(self, sizes: list[int], expires: bool) -> None:
        if any(len(channel.ready) + len(sizes) > IN_MEMORY for channel in self.channels):
            return  # nobody writes to disk here
        bodies = []
        for size in sizes:
            self.made += 1
            bodies.append(self.made.to_bytes(4, "big") + bytes(size))
        self.sync()
        lacks = [channel.lacks(bodies) for channel in self.channels]
        ttl = NO_TIME if expires else None
        try:
            if len(bodies) == 1:
                self.producer.publish(bodies[0], None, 0, ttl=ttl)
            else:
                self.producer.publish_many(bodies, None, 0, ttl=ttl)
        except MessageTooBig:
            assert "big" in lacks
            return
        except Rejected:
            first = self.first_refusal(lacks)
            assert first.settings.overflow == "reject"
            first.rejected += 1
            return
        except Full:
            assert self.first_refusal(lacks).settings.overflow == "block"
            return
        for channel, lack in zip(self.channels, lacks, strict=True):
            self.enter(channel, lack, bodies, expires)

    def first_refusal(self, lacks: list[str]) -> Channel:
        """The first channel that does not drop."""
        return next(
            channel
            for channel, lack in zip(self.channels, lacks, strict=True)
            if lack and not channel.settings.overflow.startswith("drop")
        )

    def enter(self, channel: Channel, lack: str, bodies: list[bytes], expires: bool) -> None:
        if lack == "full" and channel.settings.overflow == "drop-newest":
            channel.dropped += len(bodies)
            return
        if lack:
            assert (lack, channel.settings.overflow) == ("full", "drop-oldest")
        while channel.settings.overflow == "drop-oldest" and channel.lacks(bodies):
            channel.ready.pop(0)
            channel.dropped_oldest += 1
        channel.ready += [Msg(body, expires) for body in bodies]

    # ---- consume ----

    @rule(which=st.integers(0, 2), n=st.integers(1, 20))
    def somebody_takes(self, which: int, n: int) -> None:
        channel = self.channels[which]
        batch = self.consumers[which][1].take_many(n, 0)
        self.sync()
        for message in batch:
            found = next((msg for msg in channel.back if msg.body == message.body), None) or next(
                (msg for msg in channel.ready if not msg.expires), None
            )
            assert found is not None
            assert found.body == message.body
            assert not found.expires
            (channel.back if found in channel.back else channel.ready).remove(found)
            found.native = message
            channel.in_flight.append(found)
        if len(batch) < n and len(channel.in_flight) < 100:
            assert not [msg for msg in channel.ready + channel.back if not msg.expires]

    @rule(which=st.integers(0, 2), n=st.integers(1, 8), finish=st.booleans())
    def somebody_settles(self, which: int, n: int, finish: bool) -> None:
        channel = self.channels[which]
        for msg in channel.in_flight[:n]:
            if finish:
                msg.native.finish()
            else:
                msg.native.requeue()
                channel.back.append(msg)
        del channel.in_flight[:n]

    @rule(which=st.integers(0, 2))
    def a_consumer_dies(self, which: int) -> None:
        channel = self.channels[which]
        self.consumers[which][0].die()
        assert sum(self.world.reap().values()) == len(channel.in_flight)
        channel.back += channel.in_flight
        channel.in_flight = []
        self.buried.append(self.consumers[which])
        self.consumers[which] = self.consumer(CHANNELS[which])

    # ---- expiry ----

    @rule(which=st.integers(0, 2))
    def the_supervisor_sweeps(self, which: int) -> None:
        channel = self.channels[which]
        self.sync()
        over = [msg for msg in channel.ready if msg.expires]
        assert self.world.supervisor.sweep(channel.index) == len(over)
        self.sync()
        assert not [msg for msg in channel.ready if msg.expires]

    def sync(self) -> None:
        """Which of the expired messages have gone is the core's affair: the oldest first."""
        for channel in self.channels:
            gone = self.world.queue_view(channel.index).read("expired") - channel.expired
            over = [msg for msg in channel.ready if msg.expires][:gone]
            assert len(over) == gone
            channel.ready = [msg for msg in channel.ready if msg not in over]
            channel.expired += gone

    # ---- compare ----

    @invariant()
    def core_and_model_agree(self) -> None:
        self.sync()
        for channel in self.channels:
            view = self.world.queue_view(channel.index)
            count = recount.count(self.world.directory, view)
            assert not count.problems, count.problems
            arena, slots = view.arena, count.slots

            def bodies(rows: Any, slots: Any = slots, arena: Any = arena) -> list[bytes]:
                return [
                    arena[int(row["body"]) : int(row["body"]) + int(row["length"])].tobytes()
                    for row in slots[rows]
                ]

            assert bodies(view.ready) == [msg.body for msg in channel.ready]
            assert sorted(bodies(view.requeue)) == sorted(msg.body for msg in channel.back)
            assert sorted(bodies(count.of[State.IN_FLIGHT])) == sorted(
                msg.body for msg in channel.in_flight
            )
            for name in ("dropped", "dropped_oldest", "rejected", "expired"):
                assert view.read(name) == getattr(channel, name), name
            if channel.settings.max_bytes is not None:
                counted = view.read("ready_bytes_in") - view.read("ready_bytes_out")
                assert counted == channel.ready_bytes


def test_channels_with_limits_and_the_model_agree() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
