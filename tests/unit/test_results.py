"""A results store against a dict, bad arguments, limits, and waiting in threads and tasks."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.processes import eventually

import shmq

KEYS = st.one_of(
    st.sampled_from(["a", "b", "c", "n", "é"]),
    st.binary(min_size=1, max_size=255),
    st.integers(0, 60).map(lambda i: f"key {i}"),
)
VALUES = st.one_of(st.binary(max_size=40), st.integers(0, 20_000).map(lambda n: b"v" * n))
NUMBERS = st.integers(-(2**63), 2**63 - 1)
MAX_KEYS = 40
MAX_BYTES = 100_000
LIFE = 1e-9  # seconds: over at once


def as_bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


def block(key: bytes, value: bytes) -> int:
    return (len(key) + len(value) + 16 + 63) // 64 * 64


class Store(RuleBasedStateMachine):
    """A store and a dict, with the same calls."""

    broker: shmq.Broker
    serial = 0

    @initialize()
    def make(self) -> None:
        Store.serial += 1
        self.name = f"s{Store.serial}"
        self.store = self.broker.results(self.name, MAX_KEYS, MAX_BYTES)
        self.other = pickle.loads(pickle.dumps(self.store))
        self.known: dict[bytes, bytes] = {}

    def has_room(self, key: bytes, value: bytes) -> bool:
        after = {**self.known, key: value}
        return len(after) <= MAX_KEYS and sum(block(*pair) for pair in after.items()) <= MAX_BYTES

    def store_it(self, key: bytes, value: bytes, call: Callable[[], object]) -> object:
        if self.has_room(key, value):
            self.known[key] = value
            return call()
        with pytest.raises(shmq.Full):
            call()
        return None

    @rule(key=KEYS, value=VALUES, ttl=st.sampled_from([None, 3600]))
    def set(self, key: str | bytes, value: bytes, ttl: float | None) -> None:
        self.store_it(as_bytes(key), value, lambda: self.store.set(key, value, ttl))

    @rule(key=KEYS, value=VALUES)
    def set_for_a_moment(self, key: str | bytes, value: bytes) -> None:
        self.store_it(as_bytes(key), value, lambda: self.store.set(key, value, LIFE))
        if self.known.get(as_bytes(key)) == value and self.store.get(key) is None:
            self.known.pop(as_bytes(key))

    @rule(key=KEYS, value=VALUES)
    def add(self, key: str | bytes, value: bytes) -> None:
        if as_bytes(key) in self.known:
            assert self.other.add(key, value) is False
        else:
            stored = self.store_it(as_bytes(key), value, lambda: self.other.add(key, value))
            assert stored in (True, None)

    @rule(key=KEYS)
    def get(self, key: str | bytes) -> None:
        assert self.other.get(key) == self.known.get(as_bytes(key))
        assert self.other.get(key, 5) == self.known.get(as_bytes(key), 5)
        assert self.other.wait(key, timeout=0) == self.known.get(as_bytes(key))
        assert (key in self.other) is (as_bytes(key) in self.known)

    @rule(key=KEYS)
    def pop(self, key: str | bytes) -> None:
        assert self.store.pop(key) == self.known.pop(as_bytes(key), None)

    @rule(key=KEYS)
    def delete(self, key: str | bytes) -> None:
        assert self.store.delete(key) is (self.known.pop(as_bytes(key), None) is not None)

    @rule(key=KEYS, value=VALUES)
    def delete_a_value(self, key: str | bytes, value: bytes) -> None:
        same = self.known.get(as_bytes(key)) == value
        assert self.store.delete(key, value) is same
        if same:
            del self.known[as_bytes(key)]

    @rule(key=KEYS, by=NUMBERS, least=st.none() | NUMBERS, most=st.none() | NUMBERS)
    def incr(self, key: str | bytes, by: int, least: int | None, most: int | None) -> None:
        name = as_bytes(key)
        try:
            before = int(self.known.get(name, b"0"))
            is_number = name not in self.known or str(before).encode() == self.known[name]
        except ValueError:
            is_number = False
        if not is_number:
            with pytest.raises(shmq.BadArgument):
                self.store.incr(key, by, least, most)
            return
        low = -(2**63) if least is None else least
        high = 2**63 - 1 if most is None else most
        if not max(low, -(2**63)) <= before + by <= min(high, 2**63 - 1):
            assert self.store.incr(key, by, least, most) is None
            return
        text = str(before + by).encode()
        result = self.store_it(name, text, lambda: self.store.incr(key, by, least, most))
        assert result in (before + by, None)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=5))
    def wait_any(self, keys: list[str | bytes]) -> None:
        there = [key for key in keys if as_bytes(key) in self.known]
        expected = (there[0], self.known[as_bytes(there[0])]) if there else None
        assert self.store.wait_any(keys, timeout=0) == expected

    @invariant()
    def everything_is_listed(self) -> None:
        if hasattr(self, "store"):
            assert dict(self.store.items()) == self.known
            assert sorted(self.store) == sorted(self.known)
            assert len(self.store) >= len(self.known)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.broker.delete_results(self.name)


def test_a_store_says_what_a_dict_says(broker: shmq.Broker) -> None:
    Store.broker = broker
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Store,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# ---- bad arguments ----


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda r: r.set("", b""), shmq.BadArgument, "1 to 255 bytes, not 0"),
        (lambda r: r.get(b"k" * 256), shmq.BadArgument, "1 to 255 bytes, not 256"),
        (lambda r: r.set("é" * 128, b""), shmq.BadArgument, "not 256"),
        (lambda r: r.delete(""), shmq.BadArgument, "1 to 255"),
        (lambda r: r.incr(""), shmq.BadArgument, "1 to 255"),
        (lambda r: r.wait(""), shmq.BadArgument, "1 to 255"),
        (lambda r: r.set("k", b"x" * (1 << 20) + b"x"), shmq.MessageTooBig, "max_msg_size"),
        (lambda r: r.set("k", "text"), TypeError, "encode it first"),
        (lambda r: r.set(5, b""), TypeError, "str or bytes-like, not int"),
        (lambda r: r.set("k", b"", ttl=0), ValueError, "more than 0 seconds"),
        (lambda r: r.incr("k", ttl=0), ValueError, "more than 0 seconds"),
        (lambda r: r.wait_any([]), ValueError, "at least one key"),
        (lambda r: r.wait_any("key"), TypeError, "not one key"),
        (lambda r: r.wait_any([5]), TypeError, "a key must be"),
    ],
)
def test_a_bad_argument_is_refused(
    broker: shmq.Broker, call: Callable[[shmq.Results], object], error: type, words: str
) -> None:
    store = broker.results("r")
    with pytest.raises(error, match=words):
        call(store)
    assert list(store) == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("no good",), shmq.BadName),
        (("",), shmq.BadName),
        ((5,), TypeError),
        (("r", 0), shmq.BadArgument),
        (("r", (1 << 24) + 1), shmq.BadArgument),
        (("r", 1, 65535), shmq.BadArgument),
        (("r", 1, (1 << 38) + 1), shmq.BadArgument),
        (("r", "1"), TypeError),
    ],
)
def test_a_bad_store_is_refused(
    broker: shmq.Broker, words: tuple[object, ...], error: type
) -> None:
    with pytest.raises(error):
        broker.results(*words)  # type: ignore[arg-type]
    assert broker.results_names() == []


def test_a_value_beyond_the_store_is_refused_and_the_old_one_stays(broker: shmq.Broker) -> None:
    store = broker.results("r", max_keys=2, max_bytes=1 << 16)
    store.set("a", b"old")
    with pytest.raises(shmq.MessageTooBig, match="max_bytes"):
        store.set("a", bytes(70_000))
    store.set("b", bytes(60_000))
    with pytest.raises(shmq.Full, match="as many keys or bytes"):
        store.set("a", bytes(20_000))
    with pytest.raises(shmq.Full, match="ttl"):
        store.set("c", b"")
    assert store.get("a") == b"old"
    assert store.stats().refused == 2


def test_a_deleted_store_is_gone_and_another_begins_empty(broker: shmq.Broker) -> None:
    store = broker.results("r")
    store.set("a", b"1")
    broker.delete_results("r")
    with pytest.raises(shmq.Gone, match="deleted"):
        store.get("a")
    with pytest.raises(shmq.Gone, match="deleted"):
        store.wait("b")
    assert broker.results("r").get("a") is None
    with pytest.raises(shmq.Gone, match="no results store 'x'"):
        broker.delete_results("x")


def test_a_store_is_opened_anew_after_a_deletion_that_is_under_way(broker: shmq.Broker) -> None:
    broker.results("r").set("k", b"v")
    # The supervisor closes the memory first, and clears the directory after it.
    broker.results("r").retire()
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(broker.results, "r")
        assert not wait([opened], timeout=0.05).done
        broker.delete_results("r")
        assert opened.result(timeout=30).get("k") is None
        broker.results("r").set("k", b"w")
        assert opened.result().get("k") == b"w"


def test_the_handles_of_a_closed_broker_say_so(open_broker: Callable[..., shmq.Broker]) -> None:
    broker = open_broker()
    store = broker.results("r")
    broker.close()
    for call in (lambda: store.set("a", b""), lambda: store.get("a"), lambda: list(store)):
        with pytest.raises(shmq.Gone):
            call()


# ---- time ----


def test_what_has_expired_is_swept_without_anybody_asking(broker: shmq.Broker) -> None:
    store = broker.results("r")
    for number in range(500):
        store.set(f"{number}", b"x", ttl=0.001)
    store.set("stays", b"x")
    eventually(lambda: len(store) == 1)
    assert list(store) == [b"stays"]
    assert store.stats().expired == 500


def test_a_counter_keeps_the_time_it_was_created_with(broker: shmq.Broker) -> None:
    store = broker.results("r")
    assert store.incr("window", ttl=0.2) == 1
    while (count := store.incr("window", ttl=3600)) != 1:
        assert count is not None
        assert count > 1
    assert store.get("window") == b"1"


# ---- waiting ----


def test_waiters_get_their_own_key_and_one_of_them_takes_it(broker: shmq.Broker) -> None:
    store, got = broker.results("r"), []

    def wait(key: str, delete: bool) -> None:
        got.append((key, store.wait(key, delete=delete)))

    threads = [threading.Thread(target=wait, args=(key, False)) for key in "abab"]
    for thread in threads:
        thread.start()
    store.set("a", b"1")
    store.set("b", b"2")
    for thread in threads:
        thread.join()
    assert sorted(got) == [("a", b"1")] * 2 + [("b", b"2")] * 2
    got.clear()
    threads = [threading.Thread(target=wait, args=("c", True)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in (b"1", b"2", b"3"):
        while not store.add("c", number):
            pass
    for thread in threads:
        thread.join()
    assert sorted(value for _, value in got) == [b"1", b"2", b"3"]
    assert "c" not in store


def test_tasks_wait_beside_each_other(broker: shmq.Broker) -> None:
    store = broker.results("r")

    async def main() -> None:
        tasks = [asyncio.create_task(store.wait_async(f"{n}")) for n in range(50)]
        any_of = asyncio.create_task(store.wait_any_async(["x", "y"], delete=True))
        cancelled = asyncio.create_task(store.wait_async("y", delete=True))
        await asyncio.sleep(0)
        cancelled.cancel()
        for n in range(50):
            store.set(f"{n}", b"%d" % n)
        assert await asyncio.gather(*tasks) == [b"%d" % n for n in range(50)]
        store.set("y", b"why")
        assert await any_of == ("y", b"why")
        assert await store.wait_async("never", timeout=0.01) is None
        assert await store.wait_async("0", timeout=0) == b"0"
        with pytest.raises(ValueError, match="timeout"):
            await store.wait_async("never", timeout=-1)

    asyncio.run(main())
    eventually(lambda: all(thread.name != "shmq-results" for thread in threading.enumerate()))


def test_a_task_that_waits_finds_the_store_deleted(broker: shmq.Broker) -> None:
    store = broker.results("r")

    async def main() -> None:
        task = asyncio.create_task(store.wait_async("never"))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(broker.delete_results, "r")
        with pytest.raises(shmq.Gone):
            await task

    asyncio.run(main())
    eventually(lambda: all(thread.name != "shmq-results" for thread in threading.enumerate()))


def test_a_step_may_begin_the_time_to_live_anew(broker: shmq.Broker) -> None:
    store = broker.results("numbers")

    def left() -> int | None:
        ((_, _, ttl),) = store._scan(True)
        return ttl

    assert store.incr("n", ttl=1000) == 1
    assert store.incr("n", ttl=9000) == 2
    assert (left() or 0) <= 1000e9
    assert store.incr("n", most=2, ttl=9000, renew=True) is None  # nothing is changed
    assert (left() or 0) <= 1000e9
    assert store.incr("n", ttl=9000, renew=True) == 3
    assert (left() or 0) > 1000e9
    assert store.incr("n", renew=True) == 4
    assert left() is None
