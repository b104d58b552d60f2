"""Columns and batches through Arrow's C data interface, with structs of this file's own: who
releases them, how often, and what happens if they make no sense."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_void_p
from typing import Any

import pyarrow as pa
import pytest
from support.processes import WATCHDOG
from unit.messages.test_messages import BODIES, drain

import shmq
from shmq import Consumer, Producer


class Schema(ctypes.Structure):
    """ArrowSchema."""


class Array(ctypes.Structure):
    """ArrowArray."""


class Stream(ctypes.Structure):
    """ArrowArrayStream."""


RELEASE = ctypes.CFUNCTYPE(None, c_void_p)
GET = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)
SAY = ctypes.CFUNCTYPE(c_void_p, c_void_p)

Schema._fields_ = [
    ("format", c_char_p),
    ("name", c_char_p),
    ("metadata", c_char_p),
    ("flags", c_int64),
    ("n_children", c_int64),
    ("children", c_void_p),
    ("dictionary", c_void_p),
    ("release", c_void_p),
    ("private_data", c_void_p),
]
Array._fields_ = [
    ("length", c_int64),
    ("null_count", c_int64),
    ("offset", c_int64),
    ("n_buffers", c_int64),
    ("n_children", c_int64),
    ("buffers", POINTER(c_void_p)),
    ("children", POINTER(POINTER(Array))),
    ("dictionary", c_void_p),
    ("release", c_void_p),
    ("private_data", c_void_p),
]
Stream._fields_ = [
    ("get_schema", GET),
    ("get_next", GET),
    ("get_last_error", SAY),
    ("release", c_void_p),
    ("private_data", c_void_p),
]

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [c_void_p, c_char_p, c_void_p]
_api.PyCapsule_GetPointer.restype = c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, c_char_p]


_WHY = ctypes.create_string_buffer(b"the disk is gone")


class Column:
    """A column that counts how often its structs are released. It speaks the protocol, as an array
    or as a stream of several."""

    def __init__(self, bodies: list[bytes], format: bytes = b"z", **fields: Any) -> None:
        """fields: what the array says instead of the truth."""
        self.format: bytes | None = format
        self.released: list[str] = []
        self._kept: list[Any] = []
        self._offsets = (c_int32 * (len(bodies) + 1))()
        for index, body in enumerate(bodies):
            self._offsets[index + 1] = self._offsets[index] + len(body)
        self._data = ctypes.create_string_buffer(b"".join(bodies))
        self._count = len(bodies)
        self._fields = fields

    def _releaser(self, what: str, kind: Any) -> Any:
        def release(at: int) -> None:
            self.released.append(what)
            kind.from_address(at).release = None

        made = RELEASE(release)
        self._kept.append(made)
        return ctypes.cast(made, c_void_p)

    def schema(self) -> Schema:
        return Schema(format=self.format, release=self._releaser("schema", Schema))

    def array(self) -> Array:
        buffers = (c_void_p * 3)(
            None, ctypes.addressof(self._offsets), ctypes.addressof(self._data)
        )
        self._kept.append(buffers)
        told = {"length": self._count, "n_buffers": 3, "buffers": buffers} | self._fields
        return Array(release=self._releaser("array", Array), **told)

    def capsule(self, struct: Any, name: bytes) -> Any:
        """A capsule that the column keeps. It has no destructor: the collector may clear a function
        of ctypes before the capsule that calls it."""
        made = _api.PyCapsule_New(ctypes.addressof(struct), name, None)
        self._kept += [struct, made]
        return made


class AsArray(Column):
    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        return (
            self.capsule(self.schema(), b"arrow_schema"),
            self.capsule(self.array(), b"arrow_array"),
        )


class AsStream(Column):
    def __init__(self, *args: Any, arrays: int = 3, fails: bool = False, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._left, self._fails = arrays, fails

    def _next(self, to: int) -> int:
        if not self._left and self._fails:
            return 5
        made = self.array() if self._left else Array()
        ctypes.memmove(to, ctypes.addressof(made), ctypes.sizeof(made))
        self._left -= 1
        return 0

    def _schema(self, to: int) -> int:
        made = self.schema()
        ctypes.memmove(to, ctypes.addressof(made), ctypes.sizeof(made))
        return 0

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        stream = Stream(
            GET(lambda _, to: self._schema(to)),
            GET(lambda _, to: self._next(to)),
            SAY(lambda _: ctypes.addressof(_WHY)),
            self._releaser("stream", Stream),
        )
        return self.capsule(stream, b"arrow_array_stream")


# ---- publishing ----


def test_a_column_is_released_once(producer: Producer, consumer: Consumer) -> None:
    column = AsArray(BODIES)
    ids = producer.publish_many(column)
    assert sorted(column.released) == ["array", "schema"]
    batch = consumer.take_many(10, timeout=WATCHDOG)
    assert (batch.bodies(), batch.ids.tolist()) == (BODIES, list(ids))
    batch.finish()


def test_a_stream_is_published_as_one_and_each_part_of_it_released_once(
    producer: Producer, consumer: Consumer
) -> None:
    column = AsStream(BODIES)
    ids = producer.publish_many(column, properties={"a": "b"})
    assert sorted(column.released) == ["array"] * 3 + ["schema", "stream"]
    batch = consumer.take_many(100, timeout=WATCHDOG)
    assert (batch.bodies(), batch.ids.tolist()) == (BODIES * 3, list(ids))
    assert batch.properties == [{"a": b"b"}] * 15
    batch.finish()
    nothing = AsStream([], arrays=0)
    assert list(producer.publish_many(nothing)) == []
    assert sorted(nothing.released) == ["schema", "stream"]


def test_properties_are_one_for_all_or_one_for_each(producer: Producer, consumer: Consumer) -> None:
    each = [{"n": str(number)} for number in range(5)]
    producer.publish_many(AsArray(BODIES), properties=each)
    with consumer.take_many(10, timeout=WATCHDOG) as batch:
        assert [given["n"] for given in batch.properties] == [b"0", b"1", b"2", b"3", b"4"]
    with pytest.raises(ValueError, match="4 properties for 5 messages"):
        producer.publish_many(AsArray(BODIES), properties=each[1:])


def test_views_are_bodies(producer: Producer, consumer: Consumer) -> None:
    long = [b"x" * 12, b"y" * 13, *BODIES]
    for kind in (pa.binary_view(), pa.binary()):
        producer.publish_many(pa.array([b"-", *long], pa.binary()).cast(kind).slice(1))
    producer.publish_many(pa.array(["plain", "\N{SNOWMAN}" * 9], pa.string_view()))
    assert drain(consumer, 16) == [*long, *long, b"plain", "\N{SNOWMAN}".encode() * 9]


BUFFERS: Any = (c_void_p * 3)()
OFFSETS = (c_int32 * 6)(0, 1, 5, 3, 6, 7)
NEGATIVE = (c_int32 * 6)(-1, 1, 2, 3, 6, 7)


def over(offsets: Any) -> Any:
    return (c_void_p * 3)(None, ctypes.addressof(offsets), ctypes.addressof(BUFFERS))


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "a negative length": ({"length": -1}, "length"),
    "a huge length": ({"length": 1 << 62}, "length"),
    "more than fits": ({"length": 1 << 33}, "more values"),
    "a negative offset": ({"offset": -1}, "offset"),
    "a huge offset": ({"offset": (1 << 63) - 1}, "offset"),
    "too few buffers": ({"n_buffers": 2}, "number of its buffers"),
    "no array of buffers": ({"buffers": None}, "no buffers"),
    "no buffers": ({"buffers": BUFFERS}, "a buffer is missing"),
    "children": ({"n_children": 1}, "children"),
    "nulls nowhere": ({"null_count": 2}, "does not say which"),
    "offsets that fall": ({"buffers": over(OFFSETS)}, "offset is negative or below"),
    "a negative first offset": ({"buffers": over(NEGATIVE)}, "offset is negative or below"),
}


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("make", [AsArray, AsStream])
def test_structs_that_make_no_sense_are_refused_and_released_once(
    producer: Producer, consumer: Consumer, make: Callable[..., Column], kind: str
) -> None:
    fields, words = MALFORMED[kind]
    column = make(BODIES, **fields)
    with pytest.raises(ValueError, match=words):
        producer.publish_many(column)  # type: ignore[arg-type]
    gc.collect()
    assert len(column.released) == (2 if make is AsArray else 5)
    assert consumer.take(0) is None


@pytest.mark.parametrize("format", [b"l", b"+s", b"w:", b"w:-3", b"w:3x", b"", b"zz", None])
def test_other_types_are_refused(producer: Producer, format: bytes | None) -> None:
    for make in (AsArray, AsStream):
        column: Any = make(BODIES)
        column.format = format
        with pytest.raises((TypeError, ValueError), match=r"cast it|malformed"):
            producer.publish_many(column)
        gc.collect()
        assert sorted(set(column.released)) == sorted(column.released) != []


def test_a_stream_that_fails_publishes_nothing(producer: Producer, consumer: Consumer) -> None:
    column = AsStream(BODIES, arrays=2, fails=True)
    with pytest.raises(ValueError, match="the disk is gone"):
        producer.publish_many(column)
    gc.collect()
    assert sorted(column.released) == ["array", "array", "schema", "stream"]
    assert consumer.take(0) is None


def test_capsules_of_another_name_are_refused(producer: Producer) -> None:
    column = AsArray(BODIES)
    schema, array = column.__arrow_c_array__()
    for pair in ((array, schema), (schema, 1), (None, array)):
        with pytest.raises(ValueError, match="PyCapsule"):
            producer.publish_arrow(*pair)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="PyCapsule"):
        producer.publish_arrow_stream(array)
    producer.publish_arrow(schema, array)
    with pytest.raises(ValueError, match="released before"):
        producer.publish_arrow(schema, array)


# ---- batches ----


def test_what_was_imported_outlives_batch_consumer_and_broker(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker()
    producer, consumer = broker.producer("t"), broker.consumer("t", "c", 500)
    producer.publish_many([b"#" * 1000] * 500)
    batch = consumer.take_many(500, timeout=WATCHDOG)
    tables = [pa.table(batch), pa.Table.from_batches([batch.to_arrow()])]
    unread = batch.__arrow_c_stream__()
    batch.finish()
    broker.close()
    del batch, consumer, producer, broker
    gc.collect()
    tables.append(pa.RecordBatchReader._import_from_c_capsule(unread).read_all())
    for table in tables:
        table.validate(full=True)
        assert table.column("body").to_pylist() == [b"#" * 1000] * 500


def test_the_parts_of_a_batch_are_released_in_any_order(
    producer: Producer, consumer: Consumer
) -> None:
    producer.publish_many(BODIES)
    batch = consumer.take_many(10, timeout=WATCHDOG)
    for order in ("0123p", "3210p", "p0123", "2p310", "p"):
        _, capsule = batch.__arrow_c_array__()
        array = ctypes.cast(_api.PyCapsule_GetPointer(capsule, b"arrow_array"), POINTER(Array))[0]
        moved = {}
        for name in order.replace("p", ""):  # as an importer does
            child = array.children[int(name)][0]
            moved[name] = Array.from_buffer_copy(child)
            child.release = None
        for name in order:
            struct = array if name == "p" else moved[name]
            RELEASE(struct.release)(ctypes.addressof(struct))
            assert struct.release is None
        del capsule
    batch.finish()


def test_a_stream_of_a_batch_has_one_array_and_then_its_end(
    producer: Producer, consumer: Consumer
) -> None:
    producer.publish_many(BODIES)
    with consumer.take_many(10, timeout=WATCHDOG) as batch:
        capsule = batch.__arrow_c_stream__()
        at = _api.PyCapsule_GetPointer(capsule, b"arrow_array_stream")
        stream = ctypes.cast(at, POINTER(Stream))[0]
        lengths = []
        while True:
            array = Array()
            assert stream.get_next(at, ctypes.addressof(array)) == 0
            if not array.release:
                break
            lengths.append(array.length)
            RELEASE(array.release)(ctypes.addressof(array))
        assert lengths == [5]
        assert stream.get_last_error(at) is None


def test_a_batch_is_published_by_its_bodies(producer: Producer, consumer: Consumer) -> None:
    producer.publish_many(BODIES)
    with consumer.take_many(10, timeout=WATCHDOG) as batch:
        producer.publish_many(batch)
    assert drain(consumer, 5) == BODIES
