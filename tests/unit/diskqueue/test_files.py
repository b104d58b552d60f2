"""Segment files and position files: nsqd's bytes, nsqd's rules, and nothing good lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.disk_files import LIMIT, bodies_of, put, records_of, take_all

from shmq.storage import StorageError
from shmq.storage import diskqueue_recovery as recovery
from shmq.storage.data_path import QueueFiles, existing_files, remove_temporary
from shmq.storage.diskqueue import DamagedFile, DiskQueue
from shmq.storage.positions import LAST_FILE, Meta, pack, unpack
from shmq.storage.records import encode_records


def test_records_lie_where_planned_and_files_are_private(queue: DiskQueue, tmp_path: Path) -> None:
    position = put(queue, 0, bodies_of([70, 70, 10, 70, 300, 10]))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {
        "t:c.diskqueue.000000.dat": 200,
        "t:c.diskqueue.000001.dat": 140,
        "t:c.diskqueue.000002.dat": 330,
        "t:c.diskqueue.000003.dat": 40,
    }
    assert position == pack(3, 40)
    assert all(path.stat().st_mode & 0o7777 == 0o600 for path in tmp_path.iterdir())


def test_write_goes_to_the_position_and_never_truncates(queue: DiskQueue) -> None:
    queue.file_path(0).write_bytes(b"#" * 150)
    data, lengths = records_of([b"x"])
    queue.write(data, queue.plan(50, lengths), lengths)
    assert queue.file_path(0).read_bytes() == b"#" * 50 + data + b"#" * (100 - len(data))


def test_short_writes_are_continued(queue: DiskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    bodies = bodies_of([10, 90, 100, 3])
    write = put(queue, 0, bodies)
    assert take_all(queue, 0, write) == (bodies, [])


def test_full_disk_is_the_plain_error_with_the_file_and_gives_the_bytes_back(
    queue: DiskQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = bodies_of([60, 60])
    write = put(queue, 0, bodies)
    left, pwrite = 250, os.pwrite

    def filling(fd: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = pwrite(fd, data[:left], offset)
        left -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", filling)
        with pytest.raises(OSError, match="No space") as caught:
            put(queue, write, bodies_of([50] * 12))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(queue.file_path(2))
    assert [path.name for path in tmp_path.iterdir()] == [queue.file_name(0)]
    assert queue.file_path(0).stat().st_size == 180
    write = put(queue, write, [b"later"])
    assert take_all(queue, 0, write) == ([*bodies, b"later"], [])


def test_what_an_abandoned_batch_left_is_cut_when_the_file_is_complete(queue: DiskQueue) -> None:
    write = put(queue, 0, [b"a" * 40])
    put(queue, write, [b"abandoned" * 4])  # the position is not stored
    write = put(queue, write, [b"b" * 150])  # rolls: file 0 now ends at its first record
    assert unpack(write)[0] == 1
    assert queue.file_path(0).stat().st_size == 70
    assert take_all(queue, 0, write) == ([b"a" * 40, b"b" * 150], [])


def test_arguments_that_do_not_agree_are_refused(queue: DiskQueue, tmp_path: Path) -> None:
    data, lengths = records_of(bodies_of([10, 10]))
    good = queue.plan(0, lengths)
    for buffer, words, sizes in [
        (data[:-1], good, lengths),
        (data, good, lengths[:1]),
        (data, good[:1], lengths),
        (data, good + np.array([0, 1, 1], dtype=np.uint64), lengths),
        (data, good + np.array([0, 3 << 40, 0], dtype=np.uint64), lengths),
        (b"x", good[:0], []),
    ]:
        with pytest.raises(ValueError):
            queue.write(buffer, words, sizes)
    with pytest.raises(ValueError):
        queue.write(data, good, lengths, write_position=7)
    queue.write(b"", good[:0], [])
    assert list(tmp_path.iterdir()) == []


def test_bad_settings_are_refused() -> None:
    for base in ("", "a/b", "../a", "a:b:c", "a:", ":b", "a\n"):
        with pytest.raises(ValueError):
            DiskQueue("/none", base)
    for limits in ({"max_bytes_per_file": 0}, {"max_bytes_per_file": 1 << 40}):
        with pytest.raises(ValueError):
            DiskQueue("/none", "t", **limits)
    with pytest.raises(ValueError):
        DiskQueue("/none", "t", max_msg_size=0x7FFFFFFF)


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 250), max_size=20), max_size=6),
    max_bytes=st.integers(0, 500),
    limit=st.integers(1, 600),
)
def test_everything_written_is_read_in_order_and_files_go(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], max_bytes: int, limit: int
) -> None:
    path = tmp_path_factory.mktemp("queue")
    with DiskQueue(path, "t", max_bytes_per_file=limit, max_msg_size=LIMIT) as queue:
        write, bodies = 0, []
        for sizes in batches:
            batch = bodies_of(sizes)
            write = put(queue, write, batch)
            bodies += batch
        assert recovery.recount(queue, 0, write) == len(bodies)
        assert take_all(queue, 0, write, max_bytes) == (bodies, [])
        assert queue.files() == ([unpack(write)[0]] if bodies else [])


def test_chunk_says_where_its_records_are(queue: DiskQueue) -> None:
    data, lengths = records_of(bodies_of([10, 20, 30, 150]))
    words = queue.plan(0, lengths)
    queue.write(data, words, lengths)
    chunk = queue.read(int(words[1]), int(words[-1]), 1 << 20)
    assert chunk.position == int(words[1])
    assert chunk.data == data[lengths[0] : sum(lengths[:3])]
    assert (chunk.position + chunk.offsets).tolist() == words[1:3].tolist()
    assert chunk.lengths.tolist() == lengths[1:3]
    assert chunk.next_position == words[3] == pack(1, 0)


def test_read_returns_one_record_however_small_the_wish(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([50, 50]))
    for wish in (0, 1, 3, 4, 79, 80, 81):
        assert queue.read(0, write, wish).count == 1
    assert queue.read(0, write, 160).count == 2


def test_read_never_crosses_the_write_position(queue: DiskQueue) -> None:
    write = put(queue, 0, [b"good"])
    put(queue, write, [b"not committed"])
    chunk = queue.read(0, write, 1 << 20)
    assert chunk.count == 1
    assert chunk.next_position == write
    empty = queue.read(write, write, 1 << 20)
    assert (empty.data, empty.count, empty.next_position) == (b"", 0, write)
    assert empty.offsets.size == 0
    with pytest.raises(ValueError):
        queue.read(write + 1, write, 1)


def test_reader_at_the_end_of_a_completed_file_goes_on_without_damage(queue: DiskQueue) -> None:
    first = put(queue, 0, [b"a" * 100])  # caught up here, then the writer rolls (nsqd: .bad)
    write = put(queue, first, [b"b" * 100])
    chunk = queue.read(first, write, 1 << 20)
    assert (chunk.position, chunk.count) == (pack(1, 0), 1)
    nothing = queue.read(first, pack(1, 0), 1)
    assert (nothing.count, nothing.next_position) == (0, pack(1, 0))


def test_given_scanner_decides_where_the_chunk_ends(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([10, 10, 10]))
    calls: list[int] = []

    def one(buffer: bytes, max_msg_size: int) -> tuple[int, int, bool]:
        calls.append(max_msg_size)
        return 1, 40, False

    chunk = queue.read(0, write, 1 << 20, one)
    assert (chunk.count, len(chunk.data), chunk.next_position) == (1, 40, 40)
    assert chunk.lengths.tolist() == [40]
    assert calls == [LIMIT]


def test_drop_before_keeps_the_file_being_read(tmp_path: Path) -> None:
    with DiskQueue(tmp_path, "t", max_bytes_per_file=100) as queue:
        put(queue, 0, bodies_of([50] * 5))
    with DiskQueue(tmp_path, "t") as adopted:
        assert adopted.drop_before(pack(0, 80)) == 0
        assert adopted.drop_before(pack(2, 10)) == 2
        assert adopted.files() == [2, 3, 4]
        assert adopted.drop_before(pack(4, 0)) == 2
        assert adopted.drop_before(pack(4, 0)) == 0
        assert adopted.files() == [4]


def test_remove_all_leaves_only_other_queues_and_evidence(queue: DiskQueue, tmp_path: Path) -> None:
    write = put(queue, 0, bodies_of([150] * 3))
    queue.sync(3, 0, write)
    others = ["t.diskqueue.000000.dat", "t:cc.diskqueue.000000.dat", "t:c.diskqueue.000009.dat.bad"]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    assert queue.remove_all() == pack(3, 0)
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    assert queue.remove_all() == 0
    assert queue.remove_all(pack(7, 70)) == pack(8, 0)
    write = put(queue, pack(3, 0), [b"new"])
    assert take_all(queue, pack(3, 0), write) == ([b"new"], [])


@pytest.mark.parametrize("deaths_after", range(6))
def test_remove_all_cut_short_brings_nothing_back(
    queue: DiskQueue, monkeypatch: pytest.MonkeyPatch, deaths_after: int
) -> None:
    write = put(queue, 0, bodies_of([150] * 3))
    queue.sync(3, 0, write)
    steps, unlink = 0, Path.unlink

    def dying(path: Path, missing_ok: bool = False) -> None:
        nonlocal steps
        if steps == deaths_after:
            raise KeyboardInterrupt
        steps += 1
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", dying)
        if deaths_after < 5:
            with pytest.raises(KeyboardInterrupt):
                queue.remove_all()
        else:
            queue.remove_all()
    meta = recovery.recover_positions(queue)
    assert meta.depth == 0
    assert queue.files() == []


@pytest.mark.parametrize("deaths_after", range(5))
def test_half_done_rename_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths_after: int
) -> None:
    bodies = bodies_of([150] * 3)
    with DiskQueue(tmp_path, "t", max_bytes_per_file=200) as backlog:
        write = put(backlog, 0, bodies)
        backlog.sync(3, 0, write)
        steps, rename = 0, Path.rename

        def dying(path: Path, target: Path) -> Path:
            nonlocal steps
            if steps == deaths_after:
                raise KeyboardInterrupt
            steps += 1
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dying)
            if deaths_after < 4:
                with pytest.raises(KeyboardInterrupt):
                    backlog.rename("t:c")
                assert backlog.meta_path.exists()  # last of all
                assert backlog.base == "t"
        backlog.rename("t:c")
        backlog.rename("t:c")
        assert backlog.base == "t:c"
        assert recovery.recover_positions(backlog) == Meta(3, 0, write)
        assert set(existing_files(tmp_path)) == {"t:c"}
        with DiskQueue(tmp_path, "t") as again:
            again.rename("t:c")  # a new process that does not know it is done
        write = put(backlog, write, [b"new"])
        assert take_all(backlog, 0, write) == ([*bodies, b"new"], [])


def test_rename_never_replaces_data(queue: DiskQueue, tmp_path: Path) -> None:
    put(queue, 0, bodies_of([150] * 2))
    (tmp_path / "t:d.diskqueue.000001.dat").write_bytes(b"other")
    with pytest.raises(FileExistsError, match="already there"):
        queue.rename("t:d")
    assert queue.files() == [0, 1]
    with pytest.raises(ValueError):
        queue.rename("t/d")
    queue.rename("t:c")


def test_existing_groups_files_by_base_and_ignores_others(tmp_path: Path) -> None:
    for name in [
        "t.diskqueue.000003.dat",
        "t.diskqueue.000001.dat",
        "t.diskqueue.meta.dat",
        "t:c.diskqueue.1000000.dat",
        "t#ephemeral:c.diskqueue.meta.dat",
        "a.diskqueue.meta.dat.diskqueue.000000.dat",
        "lost.diskqueue.000000.dat.bad",
        "lost.diskqueue.000000.dat.bad.1",
        "t.diskqueue.12345.dat",
        "t:c:d.diskqueue.000000.dat",
        "b c.diskqueue.000000.dat",
        "t.diskqueue.meta.dat.123.tmp",
        "nsqd.dat",
        "notes.txt",
    ]:
        (tmp_path / name).write_bytes(b"")
    found = existing_files(tmp_path)
    assert found == {
        "t": QueueFiles([1, 3], [], True),
        "t:c": QueueFiles([1000000], []),
        "t#ephemeral:c": QueueFiles([], [], True),
        "a.diskqueue.meta.dat": QueueFiles([0], []),
        "lost": QueueFiles(
            [], ["lost.diskqueue.000000.dat.bad", "lost.diskqueue.000000.dat.bad.1"]
        ),
    }
    assert [base for base, files in found.items() if not files.has_data] == ["lost"]


def test_only_what_metadata_writes_left_is_removed(tmp_path: Path) -> None:
    keep = ["t.diskqueue.meta.dat", "nsqd.dat", "other.tmp", "t.diskqueue.000000.dat"]
    left = ["t:c.diskqueue.meta.dat.81.tmp", "nsqd.dat.5577006791947779410.tmp", "shmq.dat.1.tmp"]
    for name in keep + left:
        (tmp_path / name).write_bytes(b"")
    assert remove_temporary(tmp_path) == 3
    assert sorted(os.listdir(tmp_path)) == sorted(keep)
    assert remove_temporary(tmp_path) == 0


# ---- the last number of a file ----


def test_where_the_numbers_of_files_end_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    last = LAST_FILE
    record = encode_records([1], [0], [1], [b"x" * 50])
    with DiskQueue(tmp_path, "t", max_bytes_per_file=100, max_msg_size=99) as queue:
        plan = queue.plan(pack(last, 0), [len(record)])
        queue.write(record, plan, [len(record)], write_position=pack(last, 0))
        with pytest.raises(StorageError, match="stop the broker") as refusal:
            queue.plan(int(plan[-1]), [len(record)])
        assert refusal.value.filename == str(queue.file_path(last + 1))
        queue.sync(1, pack(last, 0), int(plan[-1]))
        assert recovery.recover_positions(queue) == Meta(1, pack(last, 0), int(plan[-1]))
        # when all was read the numbers start at 0 again, and no earlier record comes again
        queue.sync(0, int(plan[-1]), int(plan[-1]))
        assert recovery.recover_positions(queue) == Meta(0, 0, 0)
        assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [str(1 << 63), "99999999999999999999", "0000001"])
def test_a_file_of_a_number_that_no_queue_gives_is_left_alone(tmp_path: Path, number: str) -> None:
    name = f"t.diskqueue.{number}.dat"
    (tmp_path / name).write_bytes(b"whatever")
    with DiskQueue(tmp_path, "t") as queue:
        assert recovery.recover_positions(queue) == Meta(0, 0, 0)
        assert queue.remove_all() == pack(0, 0)
    assert not existing_files(tmp_path)["t"].has_data
    assert os.listdir(tmp_path) == [name]


def test_a_damaged_last_file_has_a_position_behind_it(tmp_path: Path) -> None:
    last = LAST_FILE
    with DiskQueue(tmp_path, "t") as queue:
        queue.file_path(last).write_bytes(b"garbage")
        with pytest.raises(DamagedFile) as damage:
            queue.read(pack(last, 0), pack(last, 7), 100)
        assert damage.value.next_position == pack(last + 1, 0)
        assert queue.can_be(pack(last + 1, 0), pack(last + 1, 0))
        assert not queue.can_be(0, pack(last + 1, 1))


def test_a_position_far_off_drops_what_is_there_and_not_every_number(tmp_path: Path) -> None:
    disk = DiskQueue(tmp_path, "t")
    for file in (3, 900_000):
        disk.file_path(file).write_bytes(b"x")
    disk.drop_before(pack(1, 0))
    assert disk.drop_before(pack(800_000, 0)) == 1
    assert disk.files() == [900_000]
