"""Heat maps and charts of one channel: what the server keeps, and what a browser shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from support.browser import Page, Tab
from support.page import login
from support.processes import WATCHDOG, eventually

import shmq
from shmq import history, layout
from shmq.page import past
from shmq.page.heat import COLUMNS, WIDTH, HeatMaps

Browse = Callable[[Callable[[Tab], Awaitable[None]]], Page]
StartPage = Callable[..., str]


class Counted:
    """A queue with counts that a test sets."""

    def __init__(self, serial: int) -> None:
        self.header = {"segment": {"serial": serial}}
        self.latency = np.zeros(1, layout.dtype("latency"))

    def finish(self, wait: int, processing: int, messages: int = 1) -> None:
        """Count messages in these buckets (0: shorter than the clock can tell)."""
        taken = self.latency[0]
        taken["total"]["count"] += messages
        if not processing and wait:
            taken["total"]["buckets"][97 + 4 * (wait - 1)] += messages
        if processing:
            every = max(wait, processing)
            taken["total"]["buckets"][97 + 4 * (every - 1)] += messages
            taken["held_total"][every - 1] += messages
            taken["processing"][processing - 1] += messages
        if processing and wait:
            taken["held_wait"][wait - 1] += messages

    @property
    def view(self) -> Any:
        return SimpleNamespace(header=self.header, latency=self.latency[0])


def seen(found: dict[str, Any]) -> list[tuple[int, dict[int, int], dict[int, int]]]:
    """The columns, with the buckets that are not empty."""
    used = lambda counts: {place: count for place, count in enumerate(counts) if count}  # noqa: E731
    return [(begin, used(wait), used(processing)) for begin, wait, processing in found["columns"]]


def test_a_column_has_what_was_finished_between_two_looks() -> None:
    queue, maps = Counted(7), HeatMaps()
    queue.finish(3, 4, 1000)
    first = maps.look(queue.view, 0, 100.0)
    assert first["columns"] == []  # nobody knows when these were
    queue.finish(0, 2, 5)
    queue.finish(9, 0)
    assert seen(maps.look(queue.view, 0, 102.0)) == [(100, {0: 5, 9: 1}, {0: 1, 2: 5})]
    queue.finish(1, 1)
    second = maps.look(queue.view, 0, 104.0)
    assert seen(second) == [(100, {0: 5, 1: 1, 9: 1}, {0: 1, 1: 1, 2: 5})]
    queue.finish(1, 1)
    assert seen(maps.look(queue.view, second["number"], 106.0)) == [(105, {1: 1}, {1: 1})]


def test_what_was_finished_while_nobody_looked_is_in_no_column() -> None:
    queue, maps = Counted(7), HeatMaps()
    maps.look(queue.view, 0, 100.0)
    maps.look(queue.view, 0, 101.0)
    queue.finish(1, 1, 1000)
    maps.look(queue.view, 0, 200.0)
    queue.finish(2, 2)
    assert seen(maps.look(queue.view, 0, 202.0)) == [(100, {}, {}), (200, {2: 1}, {2: 1})]
    queue.finish(1, 1, 1000)
    assert len(maps.look(queue.view, 0, 50.0)["columns"]) == 2  # the clock was set back


def test_counts_that_pass_their_end_go_on() -> None:
    queue, maps = Counted(7), HeatMaps()
    queue.finish(1, 1, (1 << 32) - 2)
    maps.look(queue.view, 0, 100.0)
    for name in ("held_total", "held_wait", "processing"):
        queue.latency[0][name][0] = 3
    queue.latency[0]["total"]["count"] += 5
    queue.latency[0]["total"]["buckets"][97] += 5
    assert seen(maps.look(queue.view, 0, 101.0)) == [(100, {1: 5}, {1: 5})]


def test_what_is_kept_is_bounded() -> None:
    maps = HeatMaps()
    queues = [Counted(serial) for serial in range(40)]
    for queue in queues:
        for second in range(0, (COLUMNS + 20) * WIDTH, WIDTH):
            found = maps.look(queue.view, 0, float(second))
        assert len(found["columns"]) == COLUMNS
    assert maps.look(queues[0].view, 0, 1e6)["columns"] == []  # forgotten: others came after it
    assert len(maps.look(queues[-1].view, 0, 1e6)["columns"]) == COLUMNS


def test_gaps_of_the_history_are_gaps() -> None:
    when = np.array([100, 101, 105, 106], np.int64) * 10**9
    zeros = np.zeros(4, np.int64)
    columns = dict.fromkeys(history.Series.__dataclass_fields__, zeros)
    columns |= {"time": when, "span": np.ones(4), "oldest": np.array([np.nan, 1, 2, 3])}
    columns["finished"] = np.array([1, 2, 3, 4])
    found = past._columns(history.Series(**columns), 1, 0)
    assert found["time"] == [100, 101, 102, 105, 106]
    assert found["finished"] == [1, 2, None, 3, 4]
    assert found["oldest"] == [0, 1, None, 2, 3]
    later = past._columns(history.Series(**columns), 1, 90.0)
    assert later["time"][:2] == [91, 100]
    assert later["ready"][:2] == [None, 0]


@pytest.mark.parametrize("query", ["since=-1", "since=x", "since=1e3", "since=" + "9" * 30])
def test_a_wrong_number_is_said(query: str, shop: shmq.Broker, start_page: StartPage) -> None:
    url = start_page(shop.instance)

    async def ask() -> None:
        base, headers = login(url)
        async with aiohttp.ClientSession(headers=headers) as session:
            for path in ("heat", "history"):
                where = f"{base}{path}?topic=orders&channel=pack&{query}"
                async with session.get(where) as answer:
                    assert answer.status == 400
                    assert "since is a number" in await answer.text()

    asyncio.run(ask())


@pytest.mark.deep
def test_a_channels_view_has_its_past_and_its_heat_maps(
    shop: shmq.Broker, start_page: StartPage, browse: Browse
) -> None:
    key = ("orders", "pack")
    eventually(lambda: len(history.read(shop.instance, only=key).channels.get(key, ())) > 1)
    url = start_page(shop.instance)
    producer, consumer = shop.producer("orders"), shop.consumer("orders", "pack")

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("orders/pack")
        await tab.run("location.hash = '#/channel/orders/pack'")
        await tab.shows("Age of the oldest waiting message", "Redeliveries and dead letters")
        await tab.shows("seconds of the last hour. A gap is a time")
        maps = "[...document.querySelectorAll('canvas[role=img]')]"
        await tab.until(f"{maps}.length === 2", "two heat maps")
        label = f"{maps}.map((map) => map.getAttribute('aria-label')).join()"
        deadline = time.monotonic() + WATCHDOG
        while "messages in 15 minutes" not in await tab.run(label):
            producer.publish(b"{}")  # again: the first look only begins a column
            for message in consumer.take_many(10, 10):
                message.finish()
            await asyncio.sleep(0.1)
            assert time.monotonic() < deadline, await tab.text()
        counted = await tab.run(
            "[...document.querySelectorAll('.summary tbody tr:first-child td:last-child')]"
            ".map((cell) => Number(cell.textContent.replace(',', '')))"
        )
        assert counted[0] == counted[1] > 0
        painted = f"""{maps}.every((map) => {{
            const pixels = map.getContext('2d').getImageData(0, 0, map.width, map.height).data;
            const colours = new Set();
            for (let at = 0; at < pixels.length; at += 4)
                colours.add(pixels.slice(at, at + 3).join());
            return colours.size > 2;
        }})"""
        assert await tab.run(painted)
        await tab.run(
            "(() => { const period = document.getElementById('channel-period'); "
            "period.value = 'minute'; period.dispatchEvent(new Event('change')); })()"
        )
        await tab.shows("of the last day")

    assert not browse(person).errors


def test_a_channel_without_a_past_says_so(
    open_broker: Callable[..., shmq.Broker], start_page: StartPage, browse: Browse
) -> None:
    broker = open_broker(history_bytes=0)
    broker.create_channel("letters", "read")
    url = start_page(broker.instance)

    async def person(tab: Tab) -> None:
        await tab.go(url)
        await tab.shows("letters/read")
        await tab.run("location.hash = '#/channel/letters/read'")
        await tab.shows("Nothing was recorded of this channel in the last hour")
        await tab.shows("it was none of the busiest")

    browse(person)
