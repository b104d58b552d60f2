"""shmq.names and the names that shmq.shm makes of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator

import posix_ipc
import pytest

from shmq import _native, names, shm
from shmq.errors import BadName, NotRunning, TooManyClients
from shmq.shm import Permits

GOOD = ["a", "A.b_c-9", "x" * 64, "t#ephemeral", "x" * 54 + "#ephemeral", ".", "-"]
BAD = [
    "",
    "x" * 65,
    "x" * 55 + "#ephemeral",
    "#ephemeral",
    "x#Ephemeral",
    "x#ephemeral#ephemeral",
    ":",
    "a b",
    "a\n",
    "a\0",
    "é",
    "a/b",
]


@pytest.mark.parametrize("name", GOOD)
def test_good_names(name: str) -> None:
    assert names.valid_name(name)
    assert names.check_name(name, "topic") == name
    assert _native.name_valid(name)


@pytest.mark.parametrize("name", BAD)
def test_bad_names(name: str) -> None:
    assert not names.valid_name(name)
    assert not _native.name_valid(name)
    with pytest.raises(BadName, match="topic name"):
        names.check_name(name, "topic")


def test_bad_name_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        names.check_name("a b", "channel")


def test_ephemeral_names() -> None:
    assert names.is_ephemeral("t#ephemeral")
    assert not names.is_ephemeral("ephemeral")


def test_base_names_are_those_of_nsqd() -> None:
    assert names.base_name("t") == "t"
    assert names.base_name("t", "c") == "t:c"


@pytest.mark.parametrize("name", ["default", "a.b", "a.5b", "x" * 64, "5", "a-5"])
def test_good_instances(name: str) -> None:
    assert names.check_instance(name) == name


@pytest.mark.parametrize("name", ["", "x" * 65, "a/b", "a b", "é", "..5", "a.5", "a#b", "a\n"])
def test_bad_instances(name: str) -> None:
    with pytest.raises(BadName):
        names.check_instance(name)


def test_names_of_shared_memory() -> None:
    assert shm.directory_name("x") == "/shmq.x"
    assert shm.queue_name("x", 12) == "/shmq.x.12"


@pytest.mark.parametrize(
    ("glibc", "name"), [(True, "/shmq.x.attach"), (False, "/sem.shmq.x.attach")]
)
def test_the_semaphore_has_one_file_with_every_c_library(
    monkeypatch: pytest.MonkeyPatch, glibc: bool, name: str
) -> None:
    monkeypatch.setattr(shm, "_GLIBC", glibc)
    assert shm.attach_semaphore_name("x") == name
    assert shm.semaphore_path_of(name) == "/dev/shm/sem.shmq.x.attach"


def test_the_semaphore_is_where_the_c_library_puts_it(instance: str) -> None:
    name = shm.attach_semaphore_name(instance)
    posix_ipc.Semaphore(name, posix_ipc.O_CREX).close()
    assert [item.kind for item in shm.list_objects(instance)] == ["semaphore"]


def test_the_instance_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHMQ_INSTANCE", raising=False)
    assert shm.default_instance() == "default"
    monkeypatch.setenv("SHMQ_INSTANCE", "other")
    assert shm.default_instance() == "other"


@pytest.fixture
def instance() -> Iterator[str]:
    name = f"test-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    shm.unlink_instance(name)


@contextlib.contextmanager
def masked(umask: int) -> Iterator[None]:
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_the_mode_is_exact_whatever_the_umask(instance: str, umask: int) -> None:
    with masked(umask):
        os.close(shm.create_directory(instance, 0o660, os.getgid()))
        Permits.create(instance, 3, 0o660, os.getgid()).close()
    for path in (
        shm.path_of(shm.directory_name(instance)),
        shm.semaphore_path_of(shm.attach_semaphore_name(instance)),
    ):
        status = os.stat(path)
        assert (status.st_mode & 0o777, status.st_gid) == (0o660, os.getgid())


def test_descriptors_are_not_inherited(instance: str) -> None:
    for fd in (
        shm.create_directory(instance, 0o600),
        shm.open_directory(instance),
        shm.open_directory(instance, read_only=True),
    ):
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_a_read_only_descriptor_cannot_write(instance: str) -> None:
    os.close(shm.create_directory(instance, 0o600))
    fd = shm.open_directory(instance, read_only=True)
    with pytest.raises(OSError):
        os.write(fd, b"x")
    os.close(fd)


def test_a_name_that_is_taken_is_not_taken_over(instance: str) -> None:
    os.close(shm.create_queue(instance, 3, 0o600))
    with pytest.raises(FileExistsError):
        shm.create_queue(instance, 3, 0o600)


def test_what_is_not_there_says_so(instance: str) -> None:
    with pytest.raises(NotRunning, match=instance):
        shm.open_directory(instance)
    with pytest.raises(NotRunning, match=instance):
        Permits(instance)
    with pytest.raises(FileNotFoundError):
        shm.open_queue(instance, 1)
    assert not shm.unlink_queue(instance, 1)


def test_objects_of_an_instance_are_listed_and_not_those_of_its_neighbours(instance: str) -> None:
    neighbour = f"{instance}.x"
    try:
        os.close(shm.create_directory(instance, 0o600))
        os.close(shm.create_directory(neighbour, 0o600))
        os.close(shm.create_queue(neighbour, 4, 0o600))
        for serial in (10, 9):
            os.close(shm.create_queue(instance, serial, 0o600))
        Permits.create(instance, 1, 0o600).close()
        found = [(item.kind, item.serial) for item in shm.list_objects(instance)]
        assert found == [("directory", None), ("semaphore", None), ("queue", 9), ("queue", 10)]
        assert {instance, neighbour} <= set(shm.list_instances())
        assert len(shm.unlink_instance(instance)) == 4
        assert shm.list_objects(instance) == []
        assert len(shm.list_objects(neighbour)) == 2
    finally:
        shm.unlink_instance(neighbour)


def test_the_attach_semaphore_counts_free_client_entries(instance: str) -> None:
    permits = Permits.create(instance, 2, 0o600)
    other = Permits(instance)
    permits.take()
    other.take()
    with pytest.raises(TooManyClients, match="1024"):
        other.take()
    permits.give()
    other.take()
    permits.set(5)
    assert other.free == 5
    other.set(1)
    assert permits.free == 1
    other.close()
    assert Permits.create(instance, 7, 0o600).free == 7


def test_permits_are_those_of_the_free_entries_unless_somebody_moves(instance: str) -> None:
    permits = Permits.create(instance, 5, 0o600)
    other = Permits(instance)
    other.take()  # and dies
    with other.moving(), other.moving():
        assert not permits.mend(lambda: 5)  # it may be that one's
        assert permits.free == 4
    assert permits.mend(lambda: 5)
    assert permits.free == 5
    other.give()  # as one too many
    assert permits.mend(lambda: 5)
    assert permits.free == 5
    for each in (permits, other):
        each.close()


def test_a_lock_that_nobody_releases_keeps_nobody_from_attaching(instance: str) -> None:
    permits = Permits.create(instance, 5, 0o600)
    path = shm.semaphore_path_of(shm.attach_semaphore_name(instance))
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with permits.moving():
            permits.take()
        assert permits.free == 4
        assert not permits.mend(lambda: 5)
    assert permits.mend(lambda: 5)
    os.unlink(path)
    with permits.moving():  # the instance was removed
        permits.give()
    permits.close()
