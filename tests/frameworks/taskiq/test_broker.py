"""Taskiq's broker on shmq, with its receiver in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from support import processes, traps
from taskiq import Context, SimpleRetryMiddleware, TaskiqDepends
from taskiq.receiver import Receiver
from taskiq.serializers import PickleSerializer

import shmq
from shmq.integrations.link import Link
from shmq.integrations.taskiq import Broker, DeadLetters, ResultBackend
from shmq.seal import REASON

WATCHDOG = processes.WATCHDOG


@asynccontextmanager
async def working(app: Broker, **options: Any) -> AsyncIterator[None]:
    """A receiver of the broker, as `taskiq worker` runs one."""
    app.is_worker_process = True
    finish = asyncio.Event()
    receiver = Receiver(app, max_async_tasks=4, run_startup=False, **options)
    listening = asyncio.create_task(receiver.listen(finish))
    try:
        yield
    finally:
        finish.set()
        await listening


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(WATCHDOG):
        while not condition():
            await asyncio.sleep(0.01)


def counts(app: Broker, number: int = 0) -> tuple[int, int, int]:
    """The numbers of messages in a lane that wait, are in flight and are deferred."""
    stats = app.attachment.channel_stats(app.topics()[number], "workers")
    return stats.depth, stats.in_flight, stats.deferred


def test_with_pickles_only_what_a_broker_has_sent_is_decoded(
    broker: shmq.Broker, tmp_path: Path
) -> None:
    trace = tmp_path / "unpickled"

    async def main() -> None:
        backend: ResultBackend[Any] = ResultBackend(broker)
        app = Broker(broker).with_result_backend(backend).with_serializer(PickleSerializer())

        @app.task
        async def add(a: int, b: int) -> int:
            return a + b

        async with app, working(app):
            broker.producer(app.topics()[0]).publish(traps.item(trace))
            task = await add.kiq(2, 3)
            assert (await task.wait_result(timeout=WATCHDOG)).return_value == 5
            dead = broker.dead(app.topics()[0], "workers")
            await eventually(lambda: [each.error for each in dead.peek()] == [REASON])

    asyncio.run(main())
    assert not trace.exists()


def test_a_task_runs_and_its_result_waits(broker: shmq.Broker) -> None:
    async def main() -> None:
        backend: ResultBackend[Any] = ResultBackend(broker)
        app = Broker(broker).with_result_backend(backend)

        @app.task
        async def add(a: int, b: int) -> int:
            return a + b

        async with app, working(app):
            task = await add.kiq(2, 3)
            assert (await backend.wait_result(task.task_id, WATCHDOG)).return_value == 5
            assert (await task.wait_result(timeout=WATCHDOG)).return_value == 5
            await eventually(lambda: counts(app) == (0, 0, 0))

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_result_that_can_never_fit_is_an_error(broker: shmq.Broker, fails: bool) -> None:
    async def main() -> None:
        backend: ResultBackend[Any] = ResultBackend(broker)
        app = Broker(broker).with_result_backend(backend)

        @app.task
        async def long() -> str:
            if fails:
                raise KeyError("x" * (2 << 20))
            return "x" * (2 << 20)

        async with app, working(app):
            task = await long.kiq()
            result = await backend.wait_result(task.task_id, WATCHDOG)
            assert result.is_err
            with pytest.raises(shmq.MessageTooBig, match="--max-msg-size") as caught:
                result.raise_for_error()
            assert fails == ("KeyError" in str(caught.value))

    asyncio.run(main())


def test_failed_tasks_are_dead_letters(broker: shmq.Broker) -> None:
    async def main() -> None:
        app = Broker(broker).with_middlewares(
            DeadLetters(), SimpleRetryMiddleware(default_retry_count=3)
        )
        runs = []

        @app.task
        async def bad() -> None:
            raise ValueError("broken")

        @app.task(retry_on_error=True)
        async def flaky() -> None:
            runs.append(1)
            raise KeyError("again")

        @app.task
        async def good() -> None: ...

        @app.task
        async def rejected(context: Annotated[Context, TaskiqDepends()]) -> None:
            context.reject()

        async with app:
            topic = app.topics()[0]
            app.attachment.producer(topic).publish(b"no message of Taskiq")
            async with working(app):
                for task in (bad, flaky, good, rejected):
                    await task.kiq()
                dead = app.attachment.dead(topic, "workers")
                await eventually(lambda: len(dead.peek(20)) == 4)
                errors = sorted(letter.error or "" for letter in dead.peek(20))
            assert len(runs) == 3
            assert errors[0] == "KeyError: 'again'"
            assert errors[1].startswith("TaskRejectedError")
            assert errors[2] == "ValueError: broken"
            assert errors[3].startswith("no task of this name")

    asyncio.run(main())


@pytest.mark.parametrize("error", [shmq.NotRunning, shmq.Gone])
def test_a_task_waits_while_the_broker_is_about_to_stop(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    app, tries, producer = Broker(broker), [], Link.producer

    def stopping(self: Link, *words: str) -> shmq.Producer:
        tries.append(words)
        if len(tries) <= 3:
            raise error("the broker is stopping")
        return producer(self, *words)

    @app.task
    async def ping() -> None: ...

    async def main() -> None:
        await app.startup()
        monkeypatch.setattr(Link, "producer", stopping)
        await ping.kiq()
        assert len(tries) == 4
        assert counts(app) == (1, 0, 0)
        await app.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["delay", "priority"])
def test_a_label_that_is_no_number_is_refused(broker: shmq.Broker, name: str) -> None:
    async def main() -> None:
        app = Broker(broker, max_priority=9)

        @app.task
        async def noop() -> None: ...

        async with app:
            with pytest.raises(Exception, match="send") as caught:
                await noop.kicker().with_labels(**{name: "soon"}).kiq()
            assert isinstance(caught.value.__cause__, ValueError)

    asyncio.run(main())
