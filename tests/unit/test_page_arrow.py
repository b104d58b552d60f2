"""Arrow data in bodies is described by a process of its own, whatever the bytes are."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from shmq.page import arrow

pa = pytest.importorskip("pyarrow")


def table(rows: int = 1000) -> Any:
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "name": pa.array([f"customer {number}" for number in range(rows)]),
            "tags": pa.array([[number, None] for number in range(rows)], pa.list_(pa.int32())),
        }
    )


def stream(data: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, data.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(data, max_chunksize=300)
    return bytes(sink.getvalue())


def file(data: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, data.schema) as writer:
        writer.write_table(data, max_chunksize=300)
    return bytes(sink.getvalue())


def described(*bodies: bytes, length: int | None = None) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        reader = arrow.Reader()
        return [await reader.describe(body, length or len(body)) for body in bodies]

    return asyncio.run(ask())


def test_a_stream_and_a_file_are_shown_with_schema_and_first_rows() -> None:
    bodies = stream(table()), file(table())
    assert all(arrow.begins(body[:64]) for body in bodies)
    found = described(*bodies)
    assert [each["format"] for each in found] == ["stream", "file"]
    for each in found:
        assert (each["columns"], each["rows"], each["complete"]) == (3, 1000, True)
        assert [field["type"] for field in each["fields"]] == [
            "int64",
            "string",
            "list<item: int32>",
        ]
        assert each["first"][1] == ["1", "customer 1", "[1, None]"]
        assert len(each["first"]) == 20


def test_the_beginning_of_a_large_body_says_how_much_was_read() -> None:
    body = stream(table(5000))
    (found,) = described(body[: len(body) // 2], length=len(body))
    assert 0 < found["rows"] < 5000
    assert (found["complete"], found["first"][0][1]) == (False, "customer 0")
    assert "bytes were read" in found["stopped"]


@pytest.mark.parametrize(
    "body",
    [b"", b"ARROW1", b"\xff" * 8, b"\xff\xff\xff\xff\x07\0\0\0abc", b"\xff" * 4 + b"\0" * 60],
)
def test_other_bytes_are_not_taken_for_arrow(body: bytes) -> None:
    assert not arrow.begins(body)


def test_a_few_bytes_that_become_gigabytes_do_not() -> None:
    zeros = pa.table({"zeros": pa.nulls(60_000_000, pa.int64()).fill_null(0)})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, zeros.schema, options=options) as writer:
        writer.write_table(zeros)  # 480 MB in one batch
    body = bytes(sink.getvalue())
    assert len(body) < arrow.MOST
    (found,) = described(body)
    assert not found.get("rows")
    assert "error" in found or not found["complete"]


def test_bytes_that_are_no_sound_arrow_get_an_answer() -> None:
    """Cut anywhere, with impossible lengths, with bits turned over."""
    sound, chance = stream(table(50)), random.Random(7)
    bodies = [sound[:cut] for cut in (9, 100, len(sound) // 2, len(sound) - 1)]
    bodies += [sound[:4] + (0x7FFFFFF8).to_bytes(4, "little") + sound[8:]]
    for _ in range(6):
        torn = bytearray(sound)
        for _ in range(20):
            torn[chance.randrange(8, len(torn))] ^= 1 << chance.randrange(8)
        bodies.append(bytes(torn))
    for found in described(*bodies):
        assert "error" in found or {"fields", "rows", "first", "stopped"} <= found.keys()


def test_a_cell_is_never_shown_whole() -> None:
    wide = pa.table({f"column {n}": pa.array(["x" * 100_000]) for n in range(500)})
    deep = pa.table({"deep": pa.array([list(range(1_000_000))])})
    first, second = described(stream(wide)[: arrow.MOST], stream(deep))
    assert first["columns"] == 500
    assert len(first["fields"]) == 100
    assert second["first"] == [["1000000 values of list<item: int64>"]]
