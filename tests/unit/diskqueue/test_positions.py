"""The position file and when it is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.disk_files import LIMIT, bodies_of, put

from shmq.storage.diskqueue import DiskQueue
from shmq.storage.positions import Meta, pack


def test_position_file_is_nsqds_byte_for_byte(queue: DiskQueue, tmp_path: Path) -> None:
    queue.write_meta(12, 0, 373)
    assert os.listdir(tmp_path) == ["t:c.diskqueue.meta.dat"]
    assert queue.meta_path.read_bytes() == b"12\n0,0\n0,373\n"
    assert queue.meta_path.stat().st_mode & 0o7777 == 0o600
    assert queue.load_meta() == Meta(12, 0, 373)
    queue.write_meta(0, pack(7, 5), pack(123456, 9))
    assert queue.meta_path.read_bytes() == b"0\n7,5\n123456,9\n"
    assert queue.load_meta() == Meta(0, pack(7, 5), pack(123456, 9))


def test_position_file_never_says_the_end_of_a_completed_file(queue: DiskQueue) -> None:
    read = put(queue, 0, bodies_of([100]))
    queue.write_meta(0, read, read)
    assert queue.load_meta() == Meta(0, read, read)
    write = put(queue, read, bodies_of([100]))
    queue.write_meta(1, read, write)
    assert queue.load_meta() == Meta(1, pack(1, 0), write)
    queue.write_meta(2, 0, write)
    assert queue.load_meta() == Meta(2, 0, write)


@pytest.mark.parametrize(
    "text",
    [b"12\n1,2\n3,4", b" 12\r\n1, 2\r\n3, 4\r\n", b"+12\n1,2\n3,4\nmore\n", b"12\n01,2\n3,4\n"],
)
def test_position_file_is_read_as_tolerantly_as_nsqd_does(queue: DiskQueue, text: bytes) -> None:
    queue.meta_path.write_bytes(text)
    assert queue.load_meta() == Meta(12, pack(1, 2), pack(3, 4))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"x",
        b"12\n",
        b"1\n2\n3\n",
        b"1\n2,3\n4\n",
        b"1\n-2,3\n4,5\n",
        b"1\n2,3\n99999999,5\n",
        b"9" * 5000 + b"\n0,0\n0,0\n",
        b"\xff\n0,0\n0,0\n",
    ],
)
def test_unparsable_position_file_is_none_and_logged(
    queue: DiskQueue, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert queue.load_meta() is None
    assert not caplog.records
    queue.meta_path.write_bytes(text)
    assert queue.load_meta() is None
    assert "not a position file" in caplog.text or "impossible positions" in caplog.text


def test_sync_comes_after_so_many_operations_or_so_long(tmp_path: Path) -> None:
    queue = DiskQueue(tmp_path, "t", sync_every=10, sync_timeout=2.0)
    assert not queue.maybe_sync(100.0, 0, 0, 0)
    assert not queue.maybe_sync(500.0, 0, 0, 0)  # a tick, but nothing was done
    queue.note(9)
    assert not queue.maybe_sync(501.9, 9, 0, 0)
    assert not queue.meta_path.exists()
    assert queue.maybe_sync(502.0, 9, 0, 0)
    assert queue.load_meta() == Meta(9, 0, 0)
    assert not queue.maybe_sync(503.0, 9, 0, 0)
    queue.note(10)
    assert queue.maybe_sync(503.1, 19, 0, 0)
    assert not queue.maybe_sync(600.0, 19, 0, 0)


def test_finished_and_dropped_files_make_a_sync_due(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([100]))
    assert not queue.sync_due(0.0)
    write = put(queue, write, bodies_of([100]))
    assert queue.sync_due(0.0)
    queue.sync(2, 0, write)
    assert not queue.sync_due(0.0)
    assert queue.drop_before(queue.read(0, write, 1000).next_position) == 1
    assert queue.sync_due(0.0)


def test_sync_puts_the_data_on_disk_before_the_positions(
    queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noting(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    write = put(queue, 0, bodies_of([100, 100]))
    assert synced == [queue.file_name(0)]  # completed
    queue.close()  # what was written is not forgotten with the descriptor
    queue.sync(2, 0, write)
    assert synced[1] == queue.file_name(1)
    assert synced[2].startswith("t:c.diskqueue.meta.dat.")
    assert synced[3] == queue.data_path.name
    assert len(synced) == 4
    queue.sync(2, 0, write)
    assert len(synced) == 5  # nothing written, no new file: positions only
    queue.sync(2, 0, write, names=True)
    assert synced[-1] == queue.data_path.name


def test_more_than_sync_every_is_on_disk_before_it_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync
    with DiskQueue(tmp_path, "t:c", max_msg_size=LIMIT, sync_every=5) as queue:

        def noting(fd: int) -> None:
            synced.append(os.fstat(fd).st_size)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", noting)
        write = put(queue, 0, bodies_of([70] * 4))
        assert synced == []
        write = put(queue, write, bodies_of([70] * 4))
        assert synced == [800]
        synced.clear()
        queue.sync(8, 0, write)
        assert len(synced) == 2  # position file and directory
        write = put(queue, write, bodies_of([70] * 4))
        assert len(synced) == 2

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            put(queue, write, bodies_of([70]))
        assert queue.file_path(0).stat().st_size == write  # given back


def test_failed_sync_stays_due(queue: DiskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    write = put(queue, 0, [b"a"])

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space") as caught:
            queue.sync(1, 0, write)
        assert caught.value.filename == str(queue.file_path(0))
    assert queue.maybe_sync(0.0, 1, 0, write)
    assert not queue.sync_due(0.0)
