"""Damaged and missing files: what is whole is delivered, the rest is set aside."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from support.disk_files import LIMIT, bodies_of, put, records_of, take_all

from shmq.storage import diskqueue_recovery as recovery
from shmq.storage.diskqueue import DamagedFile, DiskQueue
from shmq.storage.positions import Meta, pack
from shmq.storage.records import RECORD_MORE


def test_every_truncation_of_the_write_file_delivers_what_is_whole(tmp_path: Path) -> None:
    bodies = bodies_of([0, 7, 20])
    data, lengths = records_of(bodies)
    ends = np.cumsum([0, *lengths]).tolist()
    for size in range(len(data)):
        path = tmp_path / str(size)
        path.mkdir()
        with DiskQueue(path, "t", max_msg_size=LIMIT) as queue:
            queue.file_path(0).write_bytes(data[:size])
            whole = sum(end <= size for end in ends[1:])
            got, damages = take_all(queue, 0, len(data))
            assert got == bodies[:whole]
            assert len(damages) == 1
            assert damages[0].is_write_file
            assert damages[0].position == ends[whole]
            assert damages[0].next_position == pack(1, 0)
            assert os.listdir(path) == [queue.file_name(0) + ".bad"]


def test_every_truncation_after_a_stop_delivers_what_is_whole_and_goes_on(tmp_path: Path) -> None:
    bodies = bodies_of([0, 7, 20])
    data, lengths = records_of(bodies)
    ends = np.cumsum([0, *lengths]).tolist()
    for size in range(len(data)):
        path = tmp_path / str(size)
        path.mkdir()
        with DiskQueue(path, "t", max_msg_size=LIMIT) as queue:
            queue.file_path(0).write_bytes(data[:size])
            queue.write_meta(3, 0, len(data))
            whole = sum(end <= size for end in ends[1:])
            meta = recovery.recover_positions(queue)
            assert meta == Meta(whole, 0, pack(1, 0))
            write = put(queue, meta.write_position, [b"new"])
            got, damages = take_all(queue, meta.read_position, write)
            assert got == [*bodies[:whole], b"new"]
            assert len(damages) == (size not in ends)


@pytest.mark.parametrize("length", [0, 25, -5, LIMIT + RECORD_MORE + 27])
def test_overwritten_length_loses_the_rest_of_that_file_only(queue: DiskQueue, length: int) -> None:
    bodies = bodies_of([30, 30, 30, 30, 30])  # three in file 0, two in file 1
    write = put(queue, 0, bodies)
    with queue.file_path(0).open("r+b") as file:
        file.seek(60)
        file.write(struct.pack(">i", length))
    assert recovery.recount(queue, 0, write) == 3
    got, damages = take_all(queue, 0, write)
    assert got == [bodies[0], *bodies[3:]]
    [damage] = damages
    assert (damage.path, damage.position, damage.file) == (queue.file_path(0), 60, 0)
    assert damage.reason == f"impossible record length {length}"
    assert not damage.is_write_file
    assert str(queue.file_path(0)) in str(damage)
    assert "offset 60" in str(damage)


def test_missing_files_are_skipped_in_one_step(queue: DiskQueue) -> None:
    bodies = bodies_of([150] * 6)
    write = put(queue, 0, bodies)
    for file in (1, 2, 3):
        queue.file_path(file).unlink()
    assert recovery.recount(queue, 0, write) == 3
    got, damages = take_all(queue, 0, write)
    assert got == [bodies[0], *bodies[4:]]
    assert [(d.position, d.next_position) for d in damages] == [(pack(1, 0), pack(4, 0))]
    assert "missing" in damages[0].reason


def test_missing_write_file_moves_the_write_position_too(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([150, 150]))
    queue.file_path(0).unlink()
    queue.close()
    queue.file_path(1).unlink()
    got, damages = take_all(queue, 0, write)
    assert got == []
    assert [d.next_position for d in damages] == [pack(1, 0), pack(2, 0)]
    assert [d.is_write_file for d in damages] == [False, True]


def test_read_position_beyond_a_file_is_damage(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([100, 100]))
    with pytest.raises(DamagedFile, match="the file ends at 130"):
        queue.read(131, write, 100)


def test_bytes_the_disk_cannot_read_are_damage_after_what_it_can(
    queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = bodies_of([20, 20, 20])
    write = put(queue, 0, bodies)
    pread = os.pread

    def bad_sector(fd: int, size: int, offset: int) -> bytes:
        if offset >= 60:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, min(size, 60 - offset), offset)

    monkeypatch.setattr(os, "pread", bad_sector)
    got, damages = take_all(queue, 0, write)
    assert got == bodies[:1]
    assert [d.position for d in damages] == [50]


def test_other_errors_are_no_damage(queue: DiskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    write = put(queue, 0, [b"a"])

    def too_many(path: Path, flags: int, mode: int = 0) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        with pytest.raises(OSError, match="Too many open files") as caught:
            queue.read(0, write, 100)
    assert not isinstance(caught.value, DamagedFile)
    assert take_all(queue, 0, write) == ([b"a"], [])


def test_files_set_aside_never_replace_each_other(queue: DiskQueue) -> None:
    path = queue.file_path(0)
    for expected in (".bad", ".bad.1", ".bad.2"):
        path.write_bytes(expected.encode())
        assert recovery.set_aside(queue, 0) == path.with_name(path.name + expected)
    assert recovery.set_aside(queue, 0) is None
    assert path.with_name(path.name + ".bad").read_bytes() == b".bad"
