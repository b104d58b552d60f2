"""Rows of Taskiq: a broker that listens, results, schedules, a worker. The module is the
application, too."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import Any

from lifecycle.handles import Held, Site, handle
from lifecycle.rows_of_programs import ENDS, Program, held, worker
from taskiq import AsyncBroker, BrokerMessage

from shmq.integrations.taskiq import Broker, ResultBackend, ScheduleSource

worker()
broker: AsyncBroker = Broker()


@broker.task(task_name="nap")
async def nap() -> None:
    """Nothing."""


class Loop:
    """Something of Taskiq, and the event loop that it lives in."""

    def __init__(self, thing: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self.thing = thing
        self.run(thing.startup())

    def run(self, work: Awaitable[Any]) -> Any:
        """The result of a coroutine."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """As a program does at its end."""
        self.run(self.thing.shutdown())
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.close()


def message() -> BrokerMessage:
    text = b'{"task_id":"id","task_name":"nap","labels":{},"args":[],"kwargs":{}}'
    return BrokerMessage(task_id="id", task_name="nap", message=text, labels={})


@handle(Broker, warm=True)
def taskiq_listener(site: Site) -> Held:
    owner = Broker(site.instance, queue_name="listener")
    made = Loop(owner)
    counts = owner.attachment.channel_stats("listener", "workers")
    if not counts.depth + counts.in_flight:
        made.run(owner.kick(message()))
    listening = owner.listen()
    return Held(made, None, (listening, made.run(anext(listening))))


@handle(ResultBackend, warm=True)
def taskiq_results(site: Site) -> Held:
    return Held(Loop(ResultBackend(site.instance)))


@handle(ScheduleSource, warm=True)
def taskiq_schedules(site: Site) -> Held:
    return Held(Loop(ScheduleSource(site.instance)))


@handle(ends=ENDS, warm=True)
def taskiq_worker(site: Site) -> Held:
    words = [sys.executable, "-m", "taskiq", "worker", f"{__name__}:broker", "--workers=1"]
    made = Program(words, {"SHMQ_INSTANCE": site.instance})
    made.until(lambda: "Listening started" in made.said)
    sender = Broker(site.instance)
    loop = Loop(sender)
    loop.run(sender.kick(message()))
    made.until(lambda: _is_idle(sender))
    loop.close()
    return held(made)


def _is_idle(sender: Broker) -> bool:
    counts = sender.attachment.channel_stats("taskiq", "workers")
    return not counts.depth + counts.in_flight
