"""An instance with messages in every state, the page beside it, and a browser."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support import browser
from support.processes import Child, eventually

import shmq

SHMQ = [sys.executable, "-m", "shmq"]

#: A script in a body: it must be seen, and never run.
SCRIPT = b"<script>document.title = 'broken into'</script><img src=x onerror=alert(1)>"


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[shmq.Broker]:
    """A broker whose channel `orders/pack` has messages in every state, dead letters, a lease and a
    results store."""
    with shmq.Broker(tmp_path / "shop") as broker:
        broker.configure("orders", max_attempts=1)
        packers = broker.consumer("orders", "pack")
        producer = broker.producer("orders")
        for number in range(40):
            producer.publish(b'{"order": %d}' % number)
        producer.publish(b"\x00\xff" * 40)
        producer.publish(SCRIPT, properties={"trace": b"<b>bold</b>"})
        producer.publish(b"later", defer=3600)
        for _ in range(3):
            packers.take(timeout=10).reject("no such customer")
        for _ in range(5):
            packers.take(timeout=10).finish()
        held = [packers.take(timeout=10) for _ in range(2)]
        broker.results("answers").set("one", b"1")
        eventually(
            lambda: broker.stats().channel("orders", "pack").dead_lettered == 3,
            what="three letters are dead",
        )
        yield broker
        for message in held:
            with contextlib.suppress(shmq.ShmqError):  # a test may have dropped or moved them
                message.finish()


@pytest.fixture
def start_page(keep: Callable[[Any], Any]) -> Callable[..., str]:
    """`start_page(instance)`: the address of its page."""

    def start(instance: str, *words: str) -> str:
        argv = [*SHMQ, "page", f"--instance={instance}", "--port=0", *words]
        child: Child = keep(Child(argv))
        return child.said("instance").split()[-1]

    return start


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[Callable[[browser.Tab], Awaitable[None]]], browser.Page]:
    """`browse(person)`: the coroutine function `person` gets a tab; the page as it was left."""

    def run(person: Callable[[browser.Tab], Awaitable[None]]) -> browser.Page:
        async def visit() -> browser.Page:
            async with _tab(tmp_path) as tab:
                await person(tab)
                return tab.page

        return asyncio.run(visit())

    return run


@asynccontextmanager
async def _tab(directory: Path) -> AsyncIterator[browser.Tab]:
    async with browser.opened(directory) as opened:
        tab = await opened.tab()
        await tab.window(1200)
        yield tab
