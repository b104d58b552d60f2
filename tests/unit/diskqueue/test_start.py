"""Where a queue goes on when its files are opened again, after a stop or a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.disk_files import bodies_of, put, take_all

from shmq.storage import diskqueue_recovery as recovery
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.positions import Meta, pack


def test_start_of_a_new_queue_is_at_zero(queue: DiskQueue, tmp_path: Path) -> None:
    assert recovery.recover_positions(queue) == Meta(0, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_clean_stop_goes_on_where_it_was(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([60, 60, 60]))
    queue.sync(2, 90, write)
    assert recovery.recover_positions(queue) == Meta(2, 90, write)
    assert recovery.recover_positions(queue, files=[0, 1]) == Meta(2, 90, write)


def test_killed_writer_is_read_to_the_real_end_and_written_anew(queue: DiskQueue) -> None:
    bodies = bodies_of([30] * 8)
    write = put(queue, 0, bodies[:1])
    queue.sync(1, 0, write)
    put(queue, write, bodies[1:])  # three files, positions never synced
    meta = recovery.recover_positions(queue)
    assert meta == Meta(8, 0, pack(3, 0))
    write = put(queue, meta.write_position, [b"new"])
    assert take_all(queue, 0, write) == ([*bodies, b"new"], [])


def test_file_of_93_bytes_with_positions_at_zero_is_nsqds_own_example(queue: DiskQueue) -> None:
    put(queue, 0, [b"a", b"b", b"c"])
    queue.write_meta(0, 0, 0)
    assert queue.file_path(0).stat().st_size == 93
    assert recovery.recover_positions(queue) == Meta(3, 0, pack(1, 0))


@pytest.mark.parametrize("text", [None, b"", b"garbage", b"3\n1,50\n1,40\n"])
def test_without_positions_every_file_is_read_and_none_overwritten(
    queue: DiskQueue, text: bytes | None
) -> None:
    bodies = bodies_of([150] * 4)
    put(queue, pack(5, 0), bodies)
    if text is not None:
        queue.meta_path.write_bytes(text)
    meta = recovery.recover_positions(queue)
    assert meta == Meta(4, pack(5, 0), pack(9, 0))
    write = put(queue, meta.write_position, [b"new"])
    assert take_all(queue, meta.read_position, write) == ([*bodies, b"new"], [])


def test_bad_positions_without_files_are_a_new_queue(queue: DiskQueue) -> None:
    queue.meta_path.write_bytes(b"3\n1,50\n1,40\n")
    assert recovery.recover_positions(queue) == Meta(0, 0, 0)


def test_start_when_the_read_file_was_deleted_before_the_positions_were_synced(
    queue: DiskQueue,
) -> None:
    bodies = bodies_of([150] * 3)
    write = put(queue, 0, bodies)
    queue.sync(3, 0, write)
    queue.drop_before(pack(1, 0))
    assert recovery.recover_positions(queue) == Meta(2, pack(1, 0), write)
    queue.drop_before(pack(3, 0))
    assert recovery.recover_positions(queue) == Meta(0, pack(3, 0), pack(3, 0))


def test_start_deletes_files_read_before_the_stop(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([150] * 3))
    queue.sync(1, pack(2, 0), write)
    assert recovery.recover_positions(queue) == Meta(1, pack(2, 0), write)
    assert queue.files() == [2]


def test_start_with_an_absent_write_file_not_yet_made(queue: DiskQueue) -> None:
    put(queue, 0, [b"a"])
    queue.write_meta(1, 0, pack(1, 0))
    assert recovery.recover_positions(queue) == Meta(1, 0, pack(1, 0))


def test_depth_is_zero_when_everything_is_read_whatever_the_file_says(queue: DiskQueue) -> None:
    write = put(queue, 0, [b"a"])
    queue.write_meta(9, write, write)
    assert recovery.recover_positions(queue) == Meta(0, write, write)
    queue.write_meta(-2, 0, write)
    assert recovery.recover_positions(queue) == Meta(1, 0, write)


def test_recount_with_records_across_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmq.storage.diskqueue_recovery._COUNT_BLOCK", 1)
    queue = DiskQueue(tmp_path, "t", max_msg_size=50)
    bodies = bodies_of([i % 51 for i in range(200)])
    write = put(queue, 0, bodies)
    assert recovery.recount(queue, 0, write) == 200
    assert recovery.recount(queue, 30, write) == 199
    queue.close()


def test_cut_removes_what_is_beyond_the_write_position(queue: DiskQueue) -> None:
    write = put(queue, 0, [b"good"])
    put(queue, write, bodies_of([150] * 4))
    assert queue.files() == [0, 1, 2, 3, 4]
    assert queue.cut(write) == 4 * 180
    assert queue.files() == [0]
    put(queue, write, [b"half a batch"])
    assert queue.cut(write) == 42
    assert queue.cut(write) == 0
    assert queue.file_path(0).stat().st_size == write
    assert queue.cut(pack(1, 0)) == 0
    assert take_all(queue, 0, write) == ([b"good"], [])
    assert queue.cut(0) == 34
    assert queue.files() == []
