"""Objects as bodies: round trips, the layout of large ones, and bytes that are none."""

from __future__ import annotations

import copyreg
import dataclasses
import pickle
import random
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest

import shmq
from shmq.objects import LARGE, encode, pack, publish, unpack


@dataclasses.dataclass
class Point:
    x: int
    y: list[str]


class Nested:
    """Packs another object while it is pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (pack({"inner": [1, 2]}).joined(),)


class Fails:
    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("this cannot be pickled")


class Odd:
    """Its reducer is registered by a test."""


def again(obj: object, head: bytes = b"") -> Any:
    return unpack(pack(obj, head).joined(), len(head))


@pytest.mark.parametrize(
    "obj",
    [
        None,
        0,
        "text",
        (1, 2.5, b"x" * 60, "y"),
        {"a": [1, {2}]},
        Point(1, ["a"]),
        b"b" * 10_000,
        b"c" * (3 * LARGE),
        ["d" * LARGE, b"e" * LARGE, list(range(100_000))],
    ],
    ids=lambda obj: type(obj).__name__,
)
@pytest.mark.parametrize("head", [b"", b"head:"])
def test_an_object_comes_back(obj: object, head: bytes) -> None:
    packed = pack(obj, head)
    body = packed.joined()
    assert packed.size == len(body)
    assert body.startswith(head)
    assert unpack(body, len(head)) == obj
    assert unpack(memoryview(body), len(head)) == obj


def test_a_small_object_is_its_pickle() -> None:
    body = encode((1, "a"))
    assert isinstance(body, bytes)
    assert pickle.loads(body) == (1, "a")
    assert encode((1, "a"), b"head") == b"head" + body


@pytest.mark.parametrize("head", [b"", b"h", b"x" * 100])
def test_large_buffers_are_aligned_views(head: bytes) -> None:
    arrays = [np.arange(LARGE // 8 + n, dtype=np.float64) for n in range(3)]
    obj = {"arrays": arrays, "small": np.arange(4)}
    body = bytearray(pack(obj, head).joined())
    found = unpack(body, len(head))
    start = np.frombuffer(body, np.uint8).ctypes.data
    for array, copy in zip(arrays, found["arrays"], strict=True):
        assert np.array_equal(array, copy)
        assert not copy.flags.writeable
        assert (copy.ctypes.data - start) % 64 == 0
        assert start < copy.ctypes.data < start + len(body)
    assert found["small"].flags.writeable
    assert found["small"].tolist() == [0, 1, 2, 3]


def test_a_buffer_just_below_the_limit_stays_in_the_pickle() -> None:
    below = np.zeros(LARGE - 1, np.uint8)
    assert pickle.loads(pack(below).joined()).nbytes == LARGE - 1
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(pack(np.zeros(LARGE, np.uint8)).joined())


def test_fortran_order_survives() -> None:
    array = np.asfortranarray(np.arange(2.0 * LARGE).reshape(2, -1))
    found = again(array)
    assert found.flags.f_contiguous
    assert np.array_equal(array, found)


def test_arrow_tables_are_views() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"n": np.arange(50_000), "s": ["abc"] * 50_000})
    body = pack(table).joined()
    found = unpack(body)
    assert found.equals(table)
    start = np.frombuffer(body, np.uint8).ctypes.data
    address = found.column("n").chunk(0).buffers()[1].address
    assert start < address < start + len(body)


def test_gaps_are_cleared() -> None:
    packed = pack([np.ones(LARGE + 1, np.uint8), np.ones(LARGE, np.uint8)], b"head")
    dirty, clean = bytearray(b"\xaa" * packed.size), bytearray(packed.size)
    packed.write(dirty)
    packed.write(clean)
    assert dirty == clean == packed.joined()


def test_a_buffer_that_is_too_small_is_refused() -> None:
    packed = pack((1, 2))
    with pytest.raises(ValueError, match="too small"):
        packed.write(bytearray(packed.size - 1))
    with pytest.raises(ValueError, match="read-only"):
        packed.write(bytes(packed.size))


def test_connections_travel_as_in_multiprocessing() -> None:
    ours, theirs = Pipe()
    found = again(theirs)
    assert isinstance(found, Connection)
    found.send("hello")
    assert ours.recv() == "hello"


@pytest.mark.parametrize("where", ["copyreg", "multiprocessing"])
def test_a_reducer_that_is_registered_later_is_used(where: str) -> None:
    encode(1)  # a pickler that does not know it
    tables: dict[str, Any] = {
        "copyreg": copyreg.dispatch_table,
        "multiprocessing": ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    }
    table = tables[where]
    table[Odd] = lambda odd: (str, (where,))
    try:
        assert again(Odd()) == where
    finally:
        del table[Odd]
    assert isinstance(again(Odd()), Odd)


def test_another_pickler_can_be_given() -> None:
    asked = []

    def dumps(obj: object, **options: Any) -> bytes:
        asked.append(obj)
        return pickle.dumps(obj, **options)

    array = np.zeros(LARGE)
    body = pack(array, b"head", dumps).joined()
    assert asked[0] is array
    found = unpack(body, 4)
    assert np.array_equal(found, array)
    assert not found.flags.writeable


def test_an_object_may_pack_another_while_it_is_pickled() -> None:
    encode(1)
    assert again([Nested(), Nested()]) == [{"inner": [1, 2]}, {"inner": [1, 2]}]


def test_a_failure_leaves_nothing_behind() -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError, match="cannot be pickled"):
            encode(["before", Fails()])
        assert unpack(encode("after")) == "after"  # type: ignore[arg-type]


def test_an_object_is_not_kept_alive() -> None:
    obj = Point(1, [])
    before = sys.getrefcount(obj)
    encode(obj)
    encode([obj, obj])
    assert sys.getrefcount(obj) == before


def test_threads_do_not_meet() -> None:
    wrong = []

    def work(number: int) -> None:
        obj = [Point(number, [str(number)])] * 20
        for _ in range(300):
            if again(obj) != obj:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- bytes that are none ----


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"\x80",
        b"\x80\x05",
        b"\x80\x05.",
        b"\x80\x05garbage.",
        b"shmO",
        b"shmO" + bytes(12),
        b"shmO" + b"\xff" * 60,
        memoryview(b"GIF89a."),
    ],
)
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(shmq.BadObject, match="were not written by"):
        unpack(body)


def test_a_large_object_that_is_cut_short_is_refused() -> None:
    body = pack([np.ones(LARGE, np.uint8), 1]).joined()
    for length in (3, 15, 40, 100, len(body) - LARGE, len(body) - 1):
        with pytest.raises(shmq.BadObject):
            unpack(body[:length])


def test_no_damage_to_the_table_reads_outside() -> None:
    body = pack([np.ones(LARGE, np.uint8), np.ones(LARGE, np.uint8)]).joined()
    chance = random.Random(5)
    for _ in range(2000):
        damaged = bytearray(body)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(4, 48)] = chance.randrange(256)
        try:
            found = unpack(damaged)
        except (shmq.BadObject, ValueError):  # numpy refuses a buffer of another size
            continue
        for array in found:
            assert array.nbytes <= len(body)


def test_an_error_of_the_object_itself_is_shown() -> None:
    body = pack(Point(1, [])).joined().replace(b"Point", b"Pount")
    with pytest.raises(AttributeError, match="Pount"):
        unpack(body)


# ---- publish ----


class Recorder:
    """A producer that writes down what it is asked."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.options: list[dict[str, Any]] = []

    def publish(self, body: bytes, **options: Any) -> str:
        self.bodies.append(body)
        self.options.append(options)
        return "published"

    def loan(self, nbytes: int, **options: Any) -> Any:
        self.options.append(options)
        return Lent(self, nbytes)


class Lent:
    id = "lent"

    def __init__(self, recorder: Recorder, nbytes: int) -> None:
        self._recorder, self._buffer = recorder, bytearray(nbytes)

    def __enter__(self) -> memoryview:
        return memoryview(self._buffer)

    def __exit__(self, *exc: object) -> None:
        self._recorder.bodies.append(bytes(self._buffer))


def test_publish_chooses_the_way() -> None:
    producer, array = Recorder(), np.arange(LARGE)
    assert publish(producer, pack("small"), 3) == "published"
    assert publish(producer, pack(array), 4, defer=1) == "lent"
    assert publish(producer, pack(array), 5, ttl=2) == "published"
    small, *large = map(unpack, producer.bodies)
    assert small == "small"
    assert all(np.array_equal(array, copy) for copy in large)
    assert producer.options == [
        {"timeout": 3},
        {"timeout": 4, "zero": False, "defer": 1},
        {"timeout": 5, "ttl": 2},
    ]
