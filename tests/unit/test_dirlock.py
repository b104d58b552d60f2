"""The data-path lock: one broker per directory, shmq or nsqd."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shmq.storage import StorageError
from shmq.storage.dirlock import DataPathLocked, DirLock


def test_lock_is_held_inside_the_block_only(tmp_path: Path) -> None:
    lock = DirLock(tmp_path)
    assert not lock.held
    with lock:
        assert lock.held
        lock.acquire()  # again: no harm
    assert not lock.held
    lock.release()
    with DirLock(tmp_path):
        pass


def test_second_lock_names_the_path_and_the_culprit(tmp_path: Path) -> None:
    with DirLock(tmp_path), pytest.raises(DataPathLocked) as caught:
        DirLock(tmp_path).acquire()
    assert isinstance(caught.value, StorageError)
    assert str(tmp_path) in str(caught.value)
    assert "in use by another instance of shmq or nsqd" in str(caught.value)


def test_it_is_nsqds_lock_flock_on_the_directory_itself(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(DataPathLocked):
            DirLock(tmp_path).acquire()
    finally:
        os.close(fd)
    with DirLock(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    program = (
        "import fcntl, os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(DataPathLocked):
            DirLock(tmp_path).acquire()
        holder.kill()
        holder.wait()
    with DirLock(tmp_path):
        pass


def test_missing_directory_and_plain_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="create the directory") as caught:
        DirLock(tmp_path / "none").acquire()
    assert caught.value.filename == str(tmp_path / "none")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        DirLock(tmp_path / "file").acquire()


def test_file_system_without_flock_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="cannot flock directory"):
        DirLock(tmp_path).acquire()
