"""A stranger makes names in /dev/shm that the directory of staged rows may have, before it is there
and after it was seen. Rows are staged and committed all the same.

The stranger is another uid, so this needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.other_users import STRANGER, as_user, needed, run
from support.processes import Child, eventually

from shmq import sources
from shmq.staging_place import StagingPlace, staged_paths

KINDS = ('mkdir -m 0777 "$1"', 'mkdir -m 0700 "$1"', 'ln -s /tmp "$1"', 'touch "$1"', 'mkfifo "$1"')
SHM = Path("/dev/shm")


@pytest.fixture
def plant(instance: str) -> Iterator[Callable[..., None]]:
    """`plant(script, path)`: shell words as the stranger."""

    def run_script(script: str, path: object) -> None:
        as_user(STRANGER, "sh", "-euc", script, "sh", path)

    yield run_script
    for left in SHM.glob(f"shmq-staged-{instance}-*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def place(instance: str) -> StagingPlace:
    def secret() -> tuple[bytes, str]:
        with sources.open_readonly(instance) as source:
            return source.directory.seal_key, source.directory.identity

    return StagingPlace(instance, secret)


def used(where: StagingPlace) -> Path:
    """Stage something. Returns the directory."""
    with where.open("gateway", "memory") as here:
        with contextlib.suppress(FileExistsError):
            os.close(here.create("some.rows"))
        assert here.exists("some.rows")
        return here.path.parents[1]


def test_the_name_is_a_new_one_for_new_memory_and_one_for_all_processes(
    serve: Callable[..., Child], instance: str
) -> None:
    serve()
    names = []
    threads = [threading.Thread(target=lambda: names.append(used(place(instance)))) for _ in "1234"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (mine,) = set(names)
    assert staged_paths(instance, os.geteuid()) == [str(mine)]
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700


def test_a_stop_in_order_removes_it_and_the_next_memory_has_another(
    serve: Callable[..., Child], instance: str
) -> None:
    seen = set()
    for _ in range(2):
        broker = serve()
        with place(instance).open() as here:
            here.remove()
            assert here.path.exists()  # its name has been seen, so it stays as long as the memory
            seen.add(here.path)
        broker.kill(signal.SIGTERM)
        assert not staged_paths(instance, os.geteuid())
    assert len(seen) == 2


@needed
@pytest.mark.parametrize("script", KINDS)
def test_a_name_that_was_seen_is_of_no_use_to_a_stranger(
    script: str, serve: Callable[..., Child], instance: str, plant: Callable[..., None]
) -> None:
    """Somebody with a right to do so has removed the directory, and the stranger takes its name,
    and the next, and lets the first go again while rows are staged."""
    serve()
    taken = []
    for _ in range(3):
        mine = used(place(instance))
        assert mine not in taken
        shutil.rmtree(mine)
        plant(script, mine)
        taken.append(mine)
    mine = used(place(instance))
    for path in taken:
        plant('rm -rf "$1"', path)
    assert used(place(instance)) == mine
    assert used(StagingPlace(instance, lambda: (bytes(32), "unknown"))) == mine


@needed
def test_a_process_that_knows_the_name_follows_when_it_is_taken(
    serve: Callable[..., Child], instance: str, plant: Callable[..., None]
) -> None:
    serve()
    where = place(instance)
    seen = used(where)
    shutil.rmtree(seen)
    plant('mkdir -m 0777 "$1"', seen)
    assert used(where) != seen
    assert not list(seen.iterdir())


@needed
def test_a_strangers_files_are_neither_named_nor_removed(
    serve: Callable[..., Child], instance: str, plant: Callable[..., None]
) -> None:
    theirs = SHM / f"shmq-staged-{instance}-0-{'a' * 24}"
    plant('mkdir -m 0777 "$1"; mkdir "$1"/gateway; touch "$1"/gateway/x', theirs)
    broker = serve()
    mine = used(place(instance))
    assert mine != theirs
    broker.kill()
    eventually(lambda: run("rm", "--yes", instance).returncode == 0)
    assert not mine.exists()
    assert (theirs / "gateway" / "x").exists()
