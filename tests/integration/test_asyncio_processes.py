"""Consumers of asyncio in processes of their own that idle, fork or are killed; the waiter
itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.test_asyncio import bells, waiting
from support.deliveries import Background, take_all

# ---- processes ----
from support.processes import WATCHDOG, Child, eventually, say

import shmq
from shmq import _native

Spawn = Callable[..., Child]


def waits_idle(instance, n):
    import asyncio

    broker = shmq.attach(instance)

    async def main():
        tasks = [asyncio.create_task(broker.consumer("t", f"c{k}").take_async()) for k in range(n)]
        await asyncio.sleep(0.5)
        say("waits")
        await asyncio.gather(*tasks)
        say("all came")

    asyncio.run(main())


def switches(pid: int) -> int:
    """How often the threads of a process slept."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    lines = [line for text in texts for line in text.splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


def test_who_waits_uses_no_cpu(broker: shmq.Broker, child: Spawn) -> None:
    waiter = child(waits_idle, broker.instance, 200)
    waiter.said("waits")
    cpu, before = waiter.cpu_seconds(), switches(waiter.pid)
    time.sleep(3)
    assert waiter.cpu_seconds() - cpu <= 0.03
    assert switches(waiter.pid) - before <= 15
    broker.producer("t").publish(b"x")
    assert waiter.succeed()[-1] == "all came"


def forks(instance):
    import asyncio

    broker = shmq.attach(instance)
    producer, consumer = broker.producer("t"), broker.consumer("t", "c", msg_timeout=60)
    answer = broker.producer("answers")

    async def main(name):
        task = asyncio.create_task(consumer.take_async())
        await asyncio.sleep(0.1)
        threads = [t.name for t in threading.enumerate()]
        assert threads.count("shmq-waiter") == 1, threads
        answer.publish(name + b" waits")
        message = await asyncio.wait_for(task, 20)
        message.finish()
        answer.publish(name + b" took " + message.body)

    async def parent():
        tasks = [asyncio.create_task(consumer.take_async()) for _ in range(3)]
        await asyncio.sleep(0.1)
        pids = []
        for k in range(3):
            pid = os.fork()  # noqa: F821
            if pid == 0:
                status = 1
                try:
                    asyncio.events._set_running_loop(None)
                    asyncio.run(main(b"%d" % k))
                    status = 0
                finally:
                    os._exit(status)  # noqa: F821
            pids.append(pid)
        while not await asyncio.to_thread(say_when_all_wait):
            pass
        producer.publish_many([b"x"] * 6)
        for task in tasks:
            (await asyncio.wait_for(task, 20)).finish()
            answer.publish(b"parent took")
        for pid in pids:
            assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)  # noqa: F821
        say("done")

    def say_when_all_wait():
        channel = [c for t in broker.stats().topics if t.name == "answers" for c in t.channels]
        time.sleep(0.01)
        return channel and channel[0].depth >= 3

    asyncio.run(parent())


def test_a_forked_child_has_a_thread_of_its_own(broker: shmq.Broker, child: Spawn) -> None:
    broker.create_channel("t", "c")
    broker.create_channel("answers", "c")
    # Python 3.12 and newer warn of a fork beside threads.
    process = child(forks, broker.instance, env={"PYTHONWARNINGS": "ignore::DeprecationWarning"})
    assert process.succeed(watchdog=60) == ["done"]
    assert process.errors == ""
    came = sorted(take_all(broker, "answers", "c").bodies)
    assert came == sorted(
        [b"%d waits" % k for k in range(3)]
        + [b"%d took x" % k for k in range(3)]
        + [b"parent took"] * 3
    )
    assert take_all(broker, "t", "c").bodies == []
    eventually(lambda: len(broker.stats().clients) == 2)


def ends_while_it_waits(instance, how):
    import asyncio

    broker = shmq.attach(instance)
    consumer = broker.consumer("t", "c")

    async def iterate():
        async for _ in consumer:
            pass

    async def main():
        tasks = [asyncio.create_task(iterate()) for _ in range(5)]
        await asyncio.sleep(0.1)
        say("waits")
        if how == "sys.exit":
            sys.exit(0)  # noqa: F821
        if how == "in a thread":
            await asyncio.gather(*tasks)

    if how == "in a thread":
        threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
        time.sleep(0.3)
    elif how == "loop left":
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False
        loop.close()
    else:
        asyncio.run(main())
    say("ends")


@pytest.mark.parametrize("how", ["return", "sys.exit", "in a thread", "loop left"])
def test_a_process_that_ends_while_it_waits_ends_quietly(
    broker: shmq.Broker, child: Spawn, how: str
) -> None:
    process = child(ends_while_it_waits, broker.instance, how)
    process.said("waits")
    process.succeed()
    assert process.errors == ""
    eventually(lambda: len(broker.stats().clients) == 2)


def waits_for_its_death(instance):
    import asyncio

    async def main():
        task = asyncio.create_task(shmq.attach(instance).consumer("t", "c").take_async())
        await asyncio.sleep(0.1)
        say("waits")
        await task

    asyncio.run(main())


def test_a_waiter_that_is_killed_takes_no_ring_with_it(broker: shmq.Broker, child: Spawn) -> None:
    async def main() -> None:
        for number in range(5):
            victim = child(waits_for_its_death, broker.instance)
            victim.said("waits")
            task = asyncio.create_task(consumer.take_async())
            await waiting(task)
            victim.process.kill()
            producer.publish(b"%d" % number)
            message = await asyncio.wait_for(task, WATCHDOG)
            assert message.body == b"%d" % number
            message.finish()
            victim.wait()

    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    asyncio.run(main())


# ---- the extension's part ----


def test_a_waiter_refuses_what_it_cannot_do(broker: shmq.Broker) -> None:
    native = broker._attachment.native()
    consumer, waiter = broker.consumer("t", "c"), _native.Waiter(native)
    assert waiter.wait([consumer], 0) == []
    assert waiter.wait([], _native.now() + 1_000_000) == []
    with pytest.raises(TypeError):
        waiter.wait([consumer, 1], 0)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        waiter.wait(5, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        waiter.pass_on(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _native.Waiter(consumer)  # type: ignore[arg-type]
    waiter.wake()
    assert waiter.wait([consumer], _native.now() + 60 * 10**9) == []
    sleeper = Background(lambda: wait_long(waiter, consumer))
    eventually(lambda: bells(broker))
    with pytest.raises(RuntimeError, match="another thread"):
        waiter.wait([consumer], _native.now() + 60 * 10**9)
    assert waiter.wait([consumer], 0) == []
    broker.producer("t").publish(b"x")
    assert sleeper.result() == [0]
    other = shmq.attach(broker.instance)
    foreign = other.consumer("t", "c")
    assert waiter.wait([foreign, consumer], _native.now() + 60 * 10**9) == [0, 1]
    consumer.take(1).finish()
    sleeper = Background(lambda: wait_long(waiter, consumer))
    eventually(lambda: bells(broker))
    waiter.close()
    waiter.close()
    with pytest.raises(shmq.Gone):
        sleeper.result()
    with pytest.raises(shmq.Gone):
        waiter.wait([consumer], 0)
    waiter.wake()
    kept = _native.Waiter(other._attachment.native())
    other.close()
    with pytest.raises(shmq.Gone):
        kept.wait([foreign], 0)
    kept.close()
    with pytest.raises(shmq.Gone):
        _native.Waiter(native.__class__.__new__(native.__class__))


def wait_long(waiter: _native.Waiter, consumer: shmq.Consumer) -> list[int]:
    """Until there is something: it looks by itself once a second."""
    while not (found := waiter.wait([consumer], _native.now() + 60 * 10**9)):
        pass
    return found
