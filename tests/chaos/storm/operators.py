"""Actors that operate: they pause, make, empty and delete channels, and change settings."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

from chaos.storm.actors import Actor, Requeuer
from chaos.storm.history import Settings, Verb

import shmq
from shmq import sources
from shmq.errors import Gone, LayoutMismatch, NotRunning
from shmq.settings import KEYS, NONE

SIDE = "s"  # how the names of channels that come and go begin


class Operator(Actor):
    """Pauses and unpauses the topic and its channels, makes and deletes channels beside them."""

    role = "operator"
    most_side_channels = 3

    def work(self) -> None:
        assert self.broker is not None
        broker, topic = self.broker, self.place.topic
        made = itertools.count()
        while not self.over:
            way = self.choice.random()
            side = side_channels(self.place.instance, topic)
            if way < 0.25:
                self.ask(Verb.PAUSE, "", lambda: broker.pause_topic(topic))
                time.sleep(self.choice.expovariate(1 / 0.1))
                self.ask(Verb.UNPAUSE, "", lambda: broker.unpause_topic(topic))
            elif way < 0.5:
                name = self.choice.choice("abc")
                self.ask(Verb.PAUSE, name, lambda n=name: broker.pause_channel(topic, n))
                time.sleep(self.choice.expovariate(1 / 0.15))
                self.ask(Verb.UNPAUSE, name, lambda n=name: broker.unpause_channel(topic, n))
            elif way < 0.75 and len(side) < self.most_side_channels:
                name = f"{SIDE}{self.number}_{next(made) % 10}"
                self.ask(Verb.CREATE, name, lambda n=name: broker.create_channel(topic, n))
            elif side and way < 0.95:
                name = self.choice.choice(side)
                self.ask(Verb.DELETE, name, lambda n=name: broker.delete_channel(topic, n))
            elif side:
                name = self.choice.choice(side)
                self.ask(Verb.EMPTY, name, lambda n=name: broker.empty_channel(topic, n))
            time.sleep(self.choice.expovariate(1 / 0.05))


def side_channels(instance: str, topic: str) -> list[str]:
    """Those that come and go."""
    names: list[str] = []
    with (
        contextlib.suppress(Gone, NotRunning, LayoutMismatch),  # while the broker is restarted
        sources.open_readonly(instance) as source,
    ):
        found = source.directory.find_topic(topic)
        queues = [] if found is None else source.directory.live_queues()
        names = [queue.channel or "" for queue in queues if found and queue.topic == found.index]
    return [name for name in names if name.startswith(SIDE)]


class Unpauser(Operator):
    """At the end: nothing is paused any more."""

    role = "unpauser"

    def work(self) -> None:
        assert self.broker is not None
        broker, topic = self.broker, self.place.topic
        self.ask(Verb.UNPAUSE, "", lambda: broker.unpause_topic(topic))
        for channel in ["a", "b", "c", *side_channels(self.place.instance, topic)]:
            self.ask(Verb.UNPAUSE, channel, lambda n=channel: broker.unpause_channel(topic, n))


class Wanderer(Requeuer):
    """Consumes a channel that comes and goes, makes it if it has just gone. Its file bears the
    channel's name, so each is one actor of its own."""

    role = "wanderer"

    def work(self) -> None:
        assert self.broker is not None
        broker = self.broker
        if not self.place.channel:
            return
        until = time.monotonic() + self.choice.uniform(0.2, 2)
        made: list[shmq.Consumer] = []
        timeout = self.timeout_ns / 1e9

        def open_() -> None:
            made.append(
                broker.consumer(
                    self.place.topic, self.place.channel, max_in_flight=100, msg_timeout=timeout
                )
            )

        self.ask(Verb.CREATE, self.place.channel, open_)
        while made and not self.over and time.monotonic() < until:
            self.one_round(made[0], 100)
        if made:
            self.close(made[0])


class Tuner(Actor):
    """Changes the settings of the topic's channels while everything runs."""

    role = "tuner"

    def work(self) -> None:
        assert self.broker is not None
        broker, topic = self.broker, self.place.topic
        settings = Settings.load(self.place.directory)
        while not self.over:
            time.sleep(self.choice.expovariate(1 / 0.3))
            channels = sorted(settings.tuned)
            if not channels:
                continue
            name = self.choice.choice(channels)
            number = self.choice.choice(settings.tuned[name])
            words = whole(settings.palette[number])
            self.ask(
                Verb.CONFIGURE,
                name,
                lambda n=name, w=words: broker.configure(topic, n, **w),
                number,
            )


def whole(settings: dict[str, Any]) -> dict[str, Any]:
    """All keywords of `Broker.configure`, those that are not named with their defaults."""
    defaults = {name: getattr(NONE, name) for name in KEYS}
    return {**defaults, **settings}
