"""However many clients and processes there are, no client fills a table, and all of them together
leave the reserve."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest

from shmq.gateway.asker import Asker
from shmq.gateway.shares import Shares, TooManyChannels, TooManyTopics, asking
from shmq.layout import EntryState, Role, constant

MOST = constant("QUEUES")


class Tables:
    """The two tables, and what is in them."""

    def __init__(self) -> None:
        self.names: dict[tuple[str, str], int] = {}
        self.topics = np.zeros(constant("TOPICS"), [("state", "u4")])
        self.queues = np.zeros(MOST, [("state", "u4"), ("role", "u4")])

    def make(self, topic: str, channel: str = "") -> None:
        table = self.queues if channel else self.topics
        index = int(np.argmin(table["state"] != EntryState.FREE))
        assert table["state"][index] == EntryState.FREE, "the table is full"
        table["state"][index] = EntryState.LIVE
        if channel:
            table["role"][index] = Role.CHANNEL
        self.names[topic, channel] = index

    def remove(self, topic: str, channel: str = "") -> None:
        index = self.names.pop((topic, channel))
        (self.queues if channel else self.topics)["state"][index] = EntryState.FREE

    def shares(self, most: int = 1 << 30) -> Shares:
        return Shares(
            lambda: (
                int(np.count_nonzero(self.topics["state"])),
                int(np.count_nonzero(self.queues["state"])),
            ),
            lambda topic, channel: (topic, channel) in self.names,
            lambda: most,
        )

    @property
    def free_queues(self) -> int:
        """Those that stay free if every topic needs one beside those of its channels."""
        return MOST - sum(map(np.count_nonzero, (self.topics["state"], self.queues["state"])))


def take_topics(tables: Tables, shares: Shares, who: Asker, word: str, channels: int = 0) -> int:
    """Make topics with channels until that is refused. Returns how many topics."""
    made = 0
    with asking(who):
        while True:
            name = f"{word}{made}"
            try:
                shares.topic(name, None)
                tables.make(name)
                for number in range(channels):
                    shares.channel(name, f"c{number}")
                    tables.make(name, f"c{number}")
            except (TooManyTopics, TooManyChannels):
                return made
            made += 1


@pytest.mark.parametrize("channels", [0, 1, 5])
def test_one_client_makes_thousands_and_leaves_thousands(channels: int) -> None:
    tables = Tables()
    shares = tables.shares()
    first = take_topics(tables, shares, Asker("192.0.2.1"), "a", channels)
    assert first * (channels + 1) > 7000
    second = take_topics(tables, shares, Asker("192.0.2.2"), "b", channels)
    assert second * (channels + 1) > 1500
    assert take_topics(tables, shares, Asker("192.0.2.1"), "more", channels) == 0


def test_many_clients_of_many_processes_leave_the_reserve() -> None:
    tables = Tables()
    rng = random.Random(1)
    processes = [tables.shares() for _ in range(8)]
    for number in range(60):
        who = Asker(f"192.0.2.{number % 20}")
        take_topics(tables, processes[number % 8], who, f"{number}-", rng.choice((0, 1, 3)))
    assert np.count_nonzero(tables.topics["state"] == EntryState.FREE) >= MOST // 16
    assert tables.free_queues >= MOST // 16 - 1


def test_channels_of_one_topic() -> None:
    tables = Tables()
    shares = tables.shares()
    tables.make("wide")
    made = 0
    with asking(Asker("192.0.2.1")), contextlib.suppress(TooManyChannels):
        for made in range(MOST):
            shares.channel("wide", f"c{made}")
            tables.make("wide", f"c{made}")
    with asking(Asker("192.0.2.1")), pytest.raises(TooManyChannels, match="are for others"):
        shares.channel("wide", "more")
    assert MOST * 11 // 16 < made < MOST * 12 // 16
    with asking(Asker("192.0.2.2")):
        shares.channel("wide", "other")
    tables.remove("wide", "c0")
    tables.remove("wide", "c1")
    with asking(Asker("192.0.2.1")):
        shares.channel("wide", "again")


def test_small_tables_are_meant_for_few() -> None:
    for most, mine in ((1, 1), (3, 3), (4, 4), (10, 5), (64, 30)):
        tables = Tables()
        assert take_topics(tables, tables.shares(most), Asker("192.0.2.1"), "t") == mine


def test_a_quota_of_the_access_file_goes_before() -> None:
    tables = Tables()
    shares = tables.shares(100)
    with asking(Asker("user", known=True)):
        for number in range(94):
            shares.topic(f"t{number}", 94)
            tables.make(f"t{number}")
        with pytest.raises(TooManyTopics, match="6 of 100 are kept"):
            shares.topic("more", 95)


def test_what_is_made_and_deleted_in_turn_is_forgotten() -> None:
    tables = Tables()
    shares: Any = tables.shares()
    with asking(Asker("192.0.2.1")):
        for number in range(3 * MOST):
            shares.topic(f"t{number}", None)
    assert len(shares._topics.whose) <= 2 * MOST + 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::2:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("127.0.0.1", "127.9.9.9", True),
        ("127.0.0.1", "::1", True),
        ("::ffff:127.0.0.2", "127.0.0.1", True),
    ],
)
def test_which_addresses_are_one_client(one: str, other: str, same: bool) -> None:
    assert (Asker(one).whose == Asker(other).whose) == same
