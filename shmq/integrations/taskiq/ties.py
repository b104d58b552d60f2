"""The tie to an instance, for coroutines."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from shmq.errors import Gone, NotRunning
from shmq.integrations.link import PAUSE, Link

T = TypeVar("T")


class AsyncLink(Link):
    """A link whose calls in coroutines let the event loop go on while they wait."""

    async def open(self, call: Callable[[], object]) -> None:
        """Make handles in a thread: to attach, or to create something, may take seconds."""
        await anyio.to_thread.run_sync(lambda: self.retried(call))

    async def retried_async(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call that asks this link for its handles, as `retried`."""
        late = None
        while True:
            try:
                return await call()
            except (Gone, NotRunning):
                late = late or time.monotonic() + self._timeout
                if not self.may_return(late):
                    raise
            await anyio.sleep(PAUSE)
            await self.open(lambda: self.broker)

    async def publish_async(
        self, topic: str, channel: str, body: bytes, delay: float = 0.0
    ) -> None:
        """As `publish`, while the event loop goes on."""

        async def work() -> None:
            defer, due = self.terms(delay) if delay > 0 else (None, None)
            await self.producer(topic, channel).publish_async(body, defer, properties=due)

        await self.retried_async(work)
