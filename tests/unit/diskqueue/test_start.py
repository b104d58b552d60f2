"""Where a queue goes on when its files are opened again, after a stop or a kill."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.disk_files import bodies_of, put, take_all

from shmq.storage import diskqueue_recovery as recovery
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.positions import LAST_FILE, Meta, pack
from shmq.storage.records import decode_records


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


def test_a_file_below_the_read_position_is_read_after_the_others(queue: DiskQueue) -> None:
    """A broker deletes what was read before its positions say so. Somebody renamed this file."""
    bodies = bodies_of([150] * 3)
    write = put(queue, 0, bodies)
    kept = [(queue.file_path(number), queue.file_path(number).read_bytes()) for number in (0, 1)]
    queue.sync(1, pack(2, 0), write)
    assert queue.files() == [2]
    for path, content in kept:
        path.write_bytes(content)
    meta = recovery.recover_positions(queue)
    assert meta == Meta(3, pack(2, 0), pack(5, 0))
    assert queue.files() == [2, 3, 4]
    assert take_all(queue, meta.read_position, meta.write_position) == (
        [bodies[2], *bodies[:2]],
        [],
    )


def test_a_bad_file_that_gets_its_name_back_is_read_when_nothing_else_is_left(
    queue: DiskQueue,
) -> None:
    bodies = bodies_of([150] * 3)
    write = put(queue, 0, bodies)
    bad = recovery.set_aside(queue, 1)
    queue.sync(0, write, write)
    assert bad is not None
    bad.rename(queue.file_path(1))
    queue.unlink([0])
    meta = recovery.recover_positions(queue)
    assert take_all(queue, meta.read_position, meta.write_position) == ([bodies[1]], [])


@pytest.mark.parametrize("deaths_after", range(5))
@pytest.mark.parametrize("first", [LAST_FILE - 1, 88058379, (1 << 63) - 3])
@pytest.mark.parametrize("stale", [(), (0, 1)])
def test_files_of_higher_numbers_than_a_position_has_are_renamed(
    queue: DiskQueue,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    stale: tuple[int, ...],
    deaths_after: int,
) -> None:
    """A start may die at any step. Files that nsqd left below its read position come last."""
    bodies = bodies_of([150, 150, 150, 151, 152])
    put(queue, 0, bodies)
    queue.close()
    numbers = [first, first + 1, first + 2]
    for number, file in zip([*numbers, *stale], [0, 1, 2, 3, 4], strict=False):
        queue.file_path(file).rename(queue.file_path(number + 10))
    for number in [*numbers, *stale]:
        queue.file_path(number + 10).rename(queue.file_path(number))
    queue.unlink({3, 4} - {*stale})
    queue.meta_path.write_text(f"3\n{first},0\n{first + 2},180\n")
    steps, rename, replace = 0, Path.rename, os.rename

    def dying(function: Callable[..., object], *args: object) -> object:
        nonlocal steps
        if steps == deaths_after:
            raise KeyboardInterrupt
        steps += 1
        return function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda path, target: dying(rename, path, target))
        patch.setattr(os, "rename", lambda path, target: dying(replace, path, target))
        with pytest.raises(KeyboardInterrupt):
            recovery.recover_positions(queue)
    meta = recovery.recover_positions(queue)
    assert meta.depth == 3 + len(stale)
    got, damages = take_all(queue, meta.read_position, meta.write_position)
    assert (got, damages) == ([*bodies[:3], *bodies[3 : 3 + len(stale)]], [])


@pytest.mark.parametrize("position", [7, 25, 3000])
def test_a_read_position_that_is_no_record_falls_back_to_the_start_of_its_file(
    queue: DiskQueue, position: int
) -> None:
    bodies = bodies_of([20] * 6)
    write = put(queue, 0, bodies)
    queue.sync(6, 0, write)
    queue.meta_path.write_text(f"2\n0,{position}\n1,{write & 0xFFFF}\n")
    meta = recovery.recover_positions(queue)
    assert meta.depth == 6
    assert take_all(queue, meta.read_position, meta.write_position) == (bodies, [])


def test_a_read_position_at_a_damaged_record_stays(queue: DiskQueue) -> None:
    """Delivered messages do not come again because of the damage behind them."""
    bodies = bodies_of([20] * 6)
    write = put(queue, 0, bodies)
    queue.sync(5, 50, write)
    with queue.file_path(0).open("r+b") as file:
        file.seek(50)
        file.write(b"\xff")
    meta = recovery.recover_positions(queue)
    assert meta.read_position == 50
    got, damages = take_all(queue, meta.read_position, meta.write_position)
    assert got == bodies[4:]
    assert len(damages) == 1


def test_a_record_longer_than_the_limit_costs_nothing(tmp_path: Path) -> None:
    bodies = bodies_of([10, 500, 10, 400, 10])
    with DiskQueue(tmp_path, "t", max_msg_size=1000) as queue:
        write = put(queue, 0, bodies)
    with DiskQueue(tmp_path, "t", max_msg_size=100) as queue:
        assert recovery.recount(queue, 0, write) == 5
        read, got = 0, []
        while (run := queue.read(read, write, 1 << 20)).count:
            got += [record.body for record in decode_records(bytes(run.data), run.max_msg_size)]
            read = run.next_position
        assert got == bodies


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
