"""Queues in one process: the methods and exceptions of the standard library's, and what is more."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.processes import WATCHDOG, eventually

import shmq
from shmq.queues import Item

KINDS = ("Queue", "JoinableQueue")


@pytest.fixture(scope="module")
def module_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shmq.Broker]:
    with shmq.Broker(tmp_path_factory.mktemp("data"), f"test-queues-{time.time_ns():x}") as broker:
        yield broker


@pytest.fixture
def make(module_broker: shmq.Broker) -> Callable[..., Any]:
    """`make(maxsize, kind)`: a queue on a broker that has a disk."""

    def made(maxsize: int = 0, kind: str = "Queue") -> Any:
        return getattr(shmq, kind)(maxsize, broker=module_broker)

    return made


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run it in a thread; the result waits for its end and returns or raises as it did."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as exc:
            found.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(WATCHDOG)
        assert found, "the thread still waits"
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    return result


# ---- as the standard library's ----


@pytest.mark.parametrize("kind", KINDS)
def test_items_come_back_in_order(make: Callable[..., Any], kind: str) -> None:
    made = make(0, kind)
    items = [None, 1, "text", (1, [2]), {"a": b"b"}, b"x" * 5000, b"y" * 100_000, Point]
    for item in items:
        made.put(item)
    assert made.qsize() == len(items)
    assert not made.empty()
    assert [made.get() for _ in items] == items
    assert made.empty()


class Point:
    """Something to pickle by name."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "get", ["get(False)", "get_nowait()", "get(timeout=0.01)", "get(True, -1)"]
)
def test_an_empty_queue_raises_empty(make: Callable[..., Any], kind: str, get: str) -> None:
    made = make(0, kind)
    with pytest.raises(queue.Empty):
        eval(f"made.{get}", {"made": made})
    made.put(1)
    assert eval(f"made.{get}", {"made": made}) == 1


@pytest.mark.parametrize("item", ["small", np.zeros(100_000)], ids=["small", "large"])
@pytest.mark.parametrize(
    "put",
    ["put(item, False)", "put_nowait(item)", "put(item, timeout=0.01)", "put(item, True, -1)"],
)
def test_a_full_queue_raises_full(make: Callable[..., Any], put: str, item: object) -> None:
    made = make(2)
    names = {"made": made, "item": item}
    for _ in range(2):
        eval(f"made.{put}", names)
    assert made.full()
    with pytest.raises(queue.Full) as raised:
        eval(f"made.{put}", names)
    assert isinstance(raised.value, shmq.Full)
    made.get()
    assert not made.full()
    eval(f"made.{put}", names)


def test_put_waits_for_room_and_get_for_an_item(make: Callable[..., Any]) -> None:
    made = make(1)
    made.put(1)
    putting = in_thread(lambda: made.put(2))
    assert made.get() == 1
    putting()
    assert made.get() == 2
    getting = in_thread(made.get)
    made.put(3)
    assert getting() == 3


def test_a_queue_without_a_size_is_never_full(make: Callable[..., Any]) -> None:
    made = make()
    for number in range(3000):
        made.put(number)
    assert not made.full()
    assert [made.get() for _ in range(3000)] == list(range(3000))


def test_nothing_goes_to_the_disk_of_the_broker(
    make: Callable[..., Any], module_broker: shmq.Broker
) -> None:
    made = make()
    room = module_broker.limits["mem_queue_size"]
    with contextlib.suppress(queue.Full):
        for number in range(room + 100):
            made.put(number, timeout=0.01)
    stats = module_broker.channel_stats(made.name, "queue")
    assert room <= stats.depth == made.qsize() < room + 100
    assert stats.spilled == stats.backend_depth == 0
    assert [made.get() for _ in range(stats.depth)] == list(range(stats.depth))


@pytest.mark.parametrize("kind", [*KINDS, "SimpleQueue"])
def test_a_closed_queue_raises_the_error_of_its_original(
    module_broker: shmq.Broker, kind: str
) -> None:
    expected = OSError if kind == "SimpleQueue" else ValueError
    name = f"closed-{kind}"
    made = getattr(shmq, kind)(broker=module_broker, name=name)
    made.put("left")
    with made:
        pass
    assert "closed" in repr(made)
    with pytest.raises(OSError, match="closed"):
        made.empty()
    for item in ("small", np.zeros(100_000)):
        with pytest.raises(expected, match="closed"):
            made.put(item)
    with pytest.raises(expected, match="closed"):
        made.get()
    made.close()
    assert getattr(shmq, kind)(broker=module_broker, name=name).get() == "left"


def test_methods_about_the_thread_that_does_not_exist(make: Callable[..., Any]) -> None:
    made = make()
    made.put(1)
    made.cancel_join_thread()
    made.close()
    made.join_thread()


def test_an_object_that_cannot_be_pickled_raises_in_put(make: Callable[..., Any]) -> None:
    made = make()
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        made.put(threading.Lock())
    assert made.empty()


def test_a_simple_queue(module_broker: shmq.Broker) -> None:
    made = shmq.SimpleQueue(broker=module_broker)
    getting = in_thread(made.get)
    made.put([1])
    assert getting() == [1]
    assert made.empty()
    array = np.arange(100_000)
    made.put(array)
    assert np.array_equal(made.get(), array)


def test_only_a_named_queue_can_be_pickled(module_broker: shmq.Broker) -> None:
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(shmq.Queue(broker=module_broker))
    named = shmq.Queue(3, broker=module_broker, name="named")
    again = pickle.loads(pickle.dumps(named))
    shmq.Queue(broker=module_broker, name="named").put(1)
    copy.copy(named).put(2)
    assert [again.get(), again.get()] == [1, 2]
    for number in range(3):
        again.put(number)
    assert again.full()
    with pytest.raises(queue.Full):
        named.put_nowait(3)


def test_a_bad_name_is_refused(module_broker: shmq.Broker) -> None:
    with pytest.raises(shmq.BadName):
        shmq.Queue(broker=module_broker, name="no spaces")


# ---- the end of a queue without a name ----


def topics(broker: shmq.Broker) -> set[str]:
    return {topic.name for topic in broker.stats().topics}


def test_a_queue_that_nobody_has_is_deleted(
    make: Callable[..., Any], module_broker: shmq.Broker
) -> None:
    shmq.Queue(broker=module_broker, name="lasting").put(1)
    names = set()
    for kind in ("Queue", "JoinableQueue"):
        for _ in range(20):
            made = make(0, kind)
            made.put(np.arange(10_000))
            array = made.get()
            made.put("left")
            names.add(made.name)
            del made
    gc.collect()
    assert array[-1] == 9999  # a view of a queue that is no more
    kept = make()
    assert topics(module_broker) & names == set()
    assert topics(module_broker) >= {"lasting", kept.name}


def test_an_item_keeps_its_queue(make: Callable[..., Any], module_broker: shmq.Broker) -> None:
    made = make()
    made.put(1)
    item, name = made.get(ack=True), made.name
    del made
    make()
    assert name in topics(module_broker)
    item.done()
    del item
    make()
    assert name not in topics(module_broker)


# ---- large objects ----


def test_an_array_is_a_view_that_lasts(
    make: Callable[..., Any], module_broker: shmq.Broker
) -> None:
    made = make()
    array = np.random.default_rng(1).random(100_000)
    made.put({"array": array, "n": 1})
    found = made.get()["array"]
    assert made.empty()
    assert not found.flags.writeable
    assert not found.flags.owndata
    for _ in range(20):  # they do not get the memory of the first
        made.put(array + 1)
        made.get()
    assert np.array_equal(found, array)
    before = module_broker.channel_stats(made.name, "queue").body_bytes
    assert before >= array.nbytes
    del found
    made.put(1)
    made.get()
    eventually(lambda: module_broker.channel_stats(made.name, "queue").body_bytes < array.nbytes)


@pytest.mark.parametrize("kind", ["Queue", "JoinableQueue"])
def test_an_array_of_a_writable_queue_may_be_changed_and_holds_no_memory(
    module_broker: shmq.Broker, kind: str
) -> None:
    made = getattr(shmq, kind)(broker=module_broker, name=f"writable-{kind}", writable=True)
    array = np.zeros(100_000)
    found = []
    for number in range(3):
        made.put(array)
        if number == 2:
            item = made.get(ack=True)
            found.append(item.value)
            item.done()
        else:
            found.append(made.get())
            if kind == "JoinableQueue":
                made.task_done()
        found[-1][0] = number + 1
    del item
    gc.collect()
    made.put(1)
    assert made.get() == 1
    assert module_broker.channel_stats(made.name, "queue").body_bytes < 2 * array.nbytes
    assert [each[0] for each in found] == [1, 2, 3]
    assert array[0] == 0


def test_too_large_is_said_at_once(make: Callable[..., Any]) -> None:
    made = make()
    with pytest.raises(shmq.MessageTooBig):
        made.put(np.zeros(1 << 24))
    with pytest.raises(shmq.MessageTooBig):
        made.put(b"x" * (1 << 21))


# ---- items that come back ----


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_is_the_queues_until_it_is_done(make: Callable[..., Any], kind: str) -> None:
    made = make(0, kind)
    for number in range(3):
        made.put(number)
    first, second = made.get(ack=True), made.get(ack=True)
    assert isinstance(first, Item)
    assert (first.value, first.attempts, second.value) == (0, 1, 1)
    assert made.qsize() == 1
    second.done()
    first.requeue()
    with pytest.raises(shmq.NotInFlight):
        first.done()
    assert made.qsize() == 2
    found = [made.get(ack=True) for _ in range(2)]
    assert {item.value: item.attempts for item in found} == {0: 2, 2: 1}
    for item in found:
        item.done()
    assert made.empty()


def test_an_item_in_a_block(make: Callable[..., Any]) -> None:
    made = make()
    made.put("job")
    with pytest.raises(KeyError), made.item() as job:
        raise KeyError(job)
    with made.item(timeout=WATCHDOG) as job:
        assert job == "job"
        assert made.empty()
    assert made.empty()
    with pytest.raises(queue.Empty), made.item(timeout=0.01):
        pass


class Broken:
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def test_an_item_that_cannot_be_unpickled_comes_back(make: Callable[..., Any]) -> None:
    made = make()
    made.put(Broken())
    for _ in range(3):
        with pytest.raises(ValueError, match="not a number"), made.item():
            pass
    held = made.get(ack=True)
    with pytest.raises(ValueError, match="not a number"):
        _ = held.value
    held.done()
    assert made.empty()


# ---- join ----


def test_join_waits_for_all_that_was_put(make: Callable[..., Any]) -> None:
    made = make(0, "JoinableQueue")
    made.join()
    for number in range(50):
        made.put(number)
    done = []

    def work() -> None:
        for _ in range(10):
            number = made.get()
            time.sleep(0.001)
            done.append(number)
            made.task_done()

    for worker in [in_thread(work) for _ in range(5)]:
        worker()
    made.join()
    assert sorted(done) == list(range(50))
    with pytest.raises(ValueError, match="more often"):
        made.task_done()


def test_join_does_not_return_while_one_item_leads_to_the_next(make: Callable[..., Any]) -> None:
    made = make(0, "JoinableQueue")
    done = []

    def work() -> None:
        while len(done) < 300:
            number = made.get()
            if number < 300:
                made.put(number + 1)
            done.append(number)
            made.task_done()

    made.put(1)
    worker = in_thread(work)
    made.join()
    assert len(done) == 300
    worker()


def test_task_done_takes_the_items_of_other_threads_last(make: Callable[..., Any]) -> None:
    made = make(0, "JoinableQueue")
    made.put("theirs")
    made.put("mine")
    assert in_thread(made.get)() == "theirs"
    assert made.get() == "mine"
    joining = in_thread(made.join)
    made.task_done()
    held = made._place.broker.peek(made.name, "queue", "in_flight", 10)
    assert [b"theirs" in message.body for message in held] == [True]
    made.task_done()
    joining()
    with pytest.raises(ValueError, match="more often"):
        made.task_done()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_the_end_of_a_queue_in_a_process_finishes_what_get_returned(
    module_broker: shmq.Broker, end: str
) -> None:
    made = shmq.JoinableQueue(broker=module_broker, name=f"end-{end}")
    for item in ("got", "held"):
        made.put(item)
    other = shmq.JoinableQueue(broker=module_broker, name=made.name)
    assert made.get() == "got"
    held = made.get(ack=True)
    assert held.value == "held"
    if end == "close":
        made.close()
        made.task_done()  # of the one that the end has finished, as the standard library allows
    else:
        del made, held
        gc.collect()
    assert other.get(timeout=WATCHDOG) == "held"
    other.task_done()
    other.join()
    assert other.empty()


def test_who_has_only_the_name_of_a_queue_does_not_make_it_again(
    make: Callable[..., Any], module_broker: shmq.Broker
) -> None:
    made = make()
    made.put("left")
    by_name = [shmq.Queue(broker=module_broker, name=made.name) for _ in range(2)]
    name = made.name
    del made
    gc.collect()
    eventually(lambda: name not in [topic.name for topic in module_broker.stats().topics])
    with pytest.raises(shmq.Gone):
        by_name[0].get(timeout=WATCHDOG)
    with pytest.raises(shmq.Gone):
        by_name[1].put(1)
    assert name not in [topic.name for topic in module_broker.stats().topics]


# ---- shutdown ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_that_was_shut_down_is_emptied_first(make: Callable[..., Any], kind: str) -> None:
    made = make(0, kind)
    made.put(1)
    made.put(2)
    assert made.is_shutdown is False
    made.shutdown()
    assert made.is_shutdown is True
    for item in ("small", np.zeros(100_000)):
        with pytest.raises(shmq.ShutDown):
            made.put(item)
        with pytest.raises(shmq.ShutDown):
            made.put_nowait(item)
    assert [made.get(), made.get(timeout=1)] == [1, 2]
    for get in (made.get, made.get_nowait, lambda: made.get(ack=True), lambda: made.get(timeout=9)):
        with pytest.raises(shmq.ShutDown):
            get()


def test_shutdown_wakes_those_who_wait(make: Callable[..., Any]) -> None:
    empty, full = make(), make(1)
    full.put(1)
    waiting = [
        in_thread(empty.get),
        in_thread(lambda: empty.get(timeout=WATCHDOG)),
        in_thread(lambda: full.put(2)),
        in_thread(lambda: full.put(2, timeout=WATCHDOG)),
    ]
    empty.shutdown()
    full.shutdown()
    for result in waiting:
        with pytest.raises(shmq.ShutDown):
            result()


def test_an_immediate_shutdown_drops_what_waits(make: Callable[..., Any]) -> None:
    made = make(0, "JoinableQueue")
    for number in range(5):
        made.put(number)
    assert made.get() == 0
    made.shutdown(immediate=True)
    with pytest.raises(shmq.ShutDown):
        made.get()
    joining = in_thread(made.join)
    made.task_done()
    joining()


def test_shutdown_is_the_standard_librarys_where_there_is_one() -> None:
    assert getattr(queue, "ShutDown", shmq.ShutDown) is shmq.ShutDown


def test_a_queue_of_a_broker_that_ended_raises_gone(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker()
    made = shmq.Queue(broker=broker)
    getting = in_thread(made.get)
    broker.close()
    for call in (getting, lambda: made.put(1), made.get, made.qsize, made.empty):
        with pytest.raises(shmq.Gone):
            call()


def feed(queue: Any, number: int) -> None:
    for value in range(number):
        queue.put(np.full(1 << 19, value, np.uint8))


@pytest.mark.parametrize("kind", ["Queue", "JoinableQueue", "SimpleQueue", "ack"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_program_that_keeps_all_it_gets_leaves_room_in_its_queue(
    open_broker: Callable[..., shmq.Broker], kind: str, method: str
) -> None:
    """All that is kept is four times as much as the queue's memory holds."""
    broker = open_broker(arena_size=8 << 20, max_msg_size=1 << 20)
    queue: Any = getattr(shmq, kind if kind != "ack" else "Queue")(broker=broker, name="fed")
    context = multiprocessing.get_context(method)
    feeder = context.Process(target=feed, args=(queue, 64), daemon=True)
    feeder.start()
    kept = []
    for _ in range(64):
        if kind == "ack":
            item = queue.get(ack=True)
            kept.append(item.value)
            item.done()
        else:
            kept.append(queue.get())
        if kind == "JoinableQueue":
            queue.task_done()
    feeder.join()
    assert [int(each[0]) for each in kept] == list(range(64))
    assert not any(each.flags.writeable for each in kept)
