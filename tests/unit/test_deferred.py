"""Chunk files of deferred messages: the format, every damage, and names in line with the header."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shmq.storage import deferred
from shmq.storage.data_path import remove_temporary
from shmq.storage.deferred import CHUNK_SHIFT, ChunkFile, DamagedChunk, DeferredStore
from shmq.storage.records import encode_records


def record(number: int, body: bytes | None = None) -> bytes:
    return encode_records([number], [number], [number], [body or b"body %d" % number])


def entries(count: int, first: int = 0) -> list[tuple[int, bytes]]:
    return [(10 * i, record(i)) for i in range(first, first + count)]


def put(store: DeferredStore, items: list[tuple[int, bytes]]) -> deferred.Chunk:
    dues, records = [due for due, _ in items], [part for _, part in items]
    chunk = store.write(dues, [len(part) for part in records], b"".join(records))
    store.add(chunk)
    return chunk


def read_all(store: DeferredStore) -> list[tuple[int, bytes]]:
    """Every message, in the order in which chunks give them, as the supervisor does it."""
    found: list[tuple[int, bytes]] = []
    while store.chunks:
        chunk = min(store.chunks.values(), key=lambda chunk: chunk.due)
        piece = store.read(chunk, 1 << 62, 3, 1 << 20)
        if piece is None:
            continue
        data = piece.data
        for due in piece.dues:
            length = 4 + int.from_bytes(data[:4], "big")
            found.append((due, data[:length]))
            data = data[length:]
        assert not data
        store.took(piece, len(piece.dues))
    return found


def again(path: Path, **words: int) -> DeferredStore:
    """The messages that the next start, or an adoption if `words` is given, finds."""
    store = DeferredStore(path, "t:c")
    store.take_up(deferred.existing(path).get("t:c", []), **words)
    return store


# ---- format ----


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_what_is_written_is_read(count: int) -> None:
    contents = deferred.decode(deferred.encode(entries(count), 7))
    assert (contents.first, contents.lost, contents.wrong) == (7, 0, "")
    assert list(contents.numbers) == list(range(7, 7 + count))
    assert contents.entries == entries(count)


def test_the_bytes_of_a_chunk() -> None:
    data = deferred.encode([(1, record(0x2A, b"x"))], 3)
    assert data[:24] == b"shmq deferred 1\n" + bytes([0, 0, 0, 3, 0, 0, 0, 1])
    assert data[28:36] == (1).to_bytes(8, "big")
    assert data[40:-4] == record(0x2A, b"x")
    assert len(data) == 28 + 12 + 31 + 4


@pytest.mark.parametrize("cut", range(len(deferred.encode(entries(4)))))
def test_every_truncation_is_noticed_and_leaves_what_is_whole(tmp_path: Path, cut: int) -> None:
    whole = deferred.encode(entries(4))
    ends = [28]
    for _, part in entries(4):
        ends.append(ends[-1] + 12 + len(part))
    intact = sum(end <= cut - 4 for end in ends[1:])
    try:
        contents = deferred.decode(whole[:cut])
    except DamagedChunk:
        assert intact == 0
    else:
        assert contents.wrong
        assert contents.entries[:intact] == entries(4)[:intact]
    (tmp_path / "t:c.deferred.000001.dat").write_bytes(whole[:cut])
    store = again(tmp_path)
    assert store.bad_files == 1
    assert (tmp_path / "t:c.deferred.000001.dat.bad").read_bytes() == whole[:cut]
    assert read_all(store)[:intact] == entries(4)[:intact]
    assert not deferred.existing(tmp_path)


def test_every_bit_flip_is_noticed_and_costs_at_most_the_message_it_is_in() -> None:
    items = [(10 * i, record(i, random.Random(i).randbytes(20))) for i in range(6)]
    whole = deferred.encode(items)
    at = 28
    place = [None] * 28
    for number, (_, part) in enumerate(items):
        place += [number] * (12 + len(part))
        at += 12 + len(part)
    place += [None] * 4
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        contents = deferred.decode(bytes(data))
        assert contents.wrong, bit
        expected = [item for number, item in enumerate(items) if number != place[bit // 8]]
        assert contents.entries == (expected if place[bit // 8] is not None else items), bit


def test_garbage_is_set_aside(tmp_path: Path) -> None:
    for number, data in enumerate((b"", b"x", bytes(500), b"shmq deferred 1\n" + bytes(500)), 1):
        with pytest.raises(DamagedChunk):
            deferred.decode(data)
        (tmp_path / f"t:c.deferred.{number:06d}.dat").write_bytes(data)
    store = again(tmp_path)
    assert (store.depth, store.due, store.bad_files) == (0, None, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"t:c.deferred.{number:06d}.dat.bad" for number in range(1, 5)
    ]
    assert store.highest == 4


# ---- a queue's chunks ----


def test_chunks_are_read_by_due_time_and_leave_nothing(tmp_path: Path) -> None:
    store = DeferredStore(tmp_path, "t:c")
    put(store, entries(10, 20))
    put(store, entries(10))
    (first, second) = sorted(path for path in tmp_path.iterdir())
    assert first.stat().st_mode & 0o777 == 0o600
    assert (store.depth, store.due, store.highest, store.lowest) == (20, 0, 2, 1)
    chunk = store.chunks[2]
    piece = store.read(chunk, 35)
    assert piece is not None
    assert (piece.dues.tolist(), piece.next_due) == ([0, 10, 20, 30], 40)
    assert piece.position == 2 << CHUNK_SHIFT
    store.took(piece, 2)
    assert (chunk.due, chunk.read, chunk.count) == (20, 2, 8)
    assert not second.exists()
    assert (tmp_path / "t:c.deferred.000002.2.dat").exists()
    assert read_all(store) == [*entries(8, 2), *entries(10, 20)]
    assert not list(tmp_path.iterdir())


def test_large_messages_and_limits_of_a_piece(tmp_path: Path) -> None:
    store = DeferredStore(tmp_path, "t:c")
    items = [(i, record(i, bytes([i]) * 300_000)) for i in range(1, 6)]
    chunk = put(store, [(0, record(0)), *items, (6, record(6))])
    piece = store.read(chunk, 100, nbytes=400_000)
    assert piece is not None
    assert len(piece.dues) == 3
    piece = store.read(chunk, 100, messages=1)
    assert piece is not None
    assert len(piece.dues) == 1
    assert read_all(store) == [(0, record(0)), *items, (6, record(6))]


def test_a_start_goes_on_where_the_names_say(tmp_path: Path) -> None:
    store = DeferredStore(tmp_path, "t:c")
    put(store, entries(5))
    piece = store.read(store.chunks[1], 25)
    assert piece is not None
    store.took(piece, 3)
    after = again(tmp_path)
    assert (after.depth, after.due, after.highest) == (2, 30, 1)
    assert read_all(after) == entries(2, 3)


def test_an_adoption_believes_the_header(tmp_path: Path) -> None:
    store = DeferredStore(tmp_path, "t:c")
    for number in range(5):
        put(store, entries(3, 3 * number))
    # 1 was emptied, 5 does not count; of 3 two messages are in memory
    after = again(tmp_path, write=4, read=3 << CHUNK_SHIFT | 2, gone=1)
    assert sorted(after.chunks) == [2, 3, 4]
    assert after.depth == 7
    assert after.highest == 4
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"t:c.deferred.{name}.dat" for name in ("000002", "000003.2", "000004")]
    assert read_all(after) == [*entries(3, 3), *entries(1, 8), *entries(3, 9)]


def test_an_adoption_deletes_what_was_read_completely(tmp_path: Path) -> None:
    put(DeferredStore(tmp_path, "t:c"), entries(3))
    after = again(tmp_path, write=1, read=1 << CHUNK_SHIFT | 3, gone=0)
    assert not after.chunks
    assert not list(tmp_path.iterdir())
    assert after.highest == 1


def test_damage_that_is_met_while_reading_costs_nothing_intact(tmp_path: Path) -> None:
    store = DeferredStore(tmp_path, "t:c")
    chunk = put(store, entries(10))
    piece = store.read(chunk, 15)
    assert piece is not None
    store.took(piece, 2)
    path = tmp_path / chunk.name
    data = bytearray(path.read_bytes())
    data[data.index(b"body 5")] ^= 1
    path.write_bytes(data)
    assert store.read(chunk, 1 << 62) is None
    assert store.bad_files == 1
    assert read_all(store) == [*entries(3, 2), *entries(4, 6)]


def test_a_salvage_keeps_the_numbers_of_messages(tmp_path: Path) -> None:
    (tmp_path / "t:c.deferred.000007.4.dat").write_bytes(deferred.encode(entries(10))[:-5])
    store = again(tmp_path)
    assert read_numbers(store) == (4, 5)
    assert read_numbers(again(tmp_path)) == (4, 5)
    assert again(tmp_path).bad_files == 0
    assert read_all(again(tmp_path, write=7, read=7 << CHUNK_SHIFT | 6, gone=0)) == entries(3, 6)


def read_numbers(store: DeferredStore) -> tuple[int, int]:
    (chunk,) = store.chunks.values()
    return chunk.read, chunk.count


def test_discard_drop_rename_and_remove(tmp_path: Path) -> None:
    store = DeferredStore(tmp_path, "t")
    items = entries(2)
    store.discard(
        store.write([0, 10], [len(part) for _, part in items], b"".join(part for _, part in items))
    )
    assert not list(tmp_path.iterdir())
    for _ in range(4):
        put(store, items)
    store.drop(2)
    assert sorted(store.chunks) == [3, 4]
    store.rename("t:c")
    assert {
        base: [file.number for file in files] for base, files in deferred.existing(tmp_path).items()
    } == {"t:c": [3, 4]}
    store = again(tmp_path)
    assert store.depth == 4
    store.remove_all()
    assert not list(tmp_path.iterdir())


def test_a_rename_cut_short_is_finished(tmp_path: Path) -> None:
    store = DeferredStore(tmp_path, "t")
    for _ in range(3):
        put(store, entries(2))
    (tmp_path / "t.deferred.000001.dat").rename(tmp_path / "t:c.deferred.000001.dat")
    found = deferred.existing(tmp_path)
    after = DeferredStore(tmp_path, "t")
    after.take_up([*found["t"], *found["t:c"]], write=3)
    after.rename("t:c")
    assert [file.number for file in deferred.existing(tmp_path)["t:c"]] == [1, 2, 3]
    assert after.depth == 6


def test_what_a_write_cut_short_leaves_is_removed(tmp_path: Path) -> None:
    for name in ("t:c.deferred.000001.dat.123.tmp", "t.deferred.000001.12.dat.1.tmp"):
        (tmp_path / name).write_bytes(b"x")
    assert not deferred.existing(tmp_path)
    assert remove_temporary(tmp_path) == 2


def test_names_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in (
        "nsqd.dat",
        "t.diskqueue.000000.dat",
        "t.deferred.1.dat",
        "t!.deferred.000001.dat",
        "t.deferred.000001.dat.bad",
        "t.deferred.000001.dat.bad.1",
    ):
        (tmp_path / name).write_bytes(b"x")
    assert not deferred.existing(tmp_path)
    (tmp_path / "t.deferred.000001.deferred.1000000.17.dat").write_bytes(b"x")
    assert deferred.existing(tmp_path) == {
        "t.deferred.000001": [ChunkFile(1000000, 17, "t.deferred.000001.deferred.1000000.17.dat")]
    }
