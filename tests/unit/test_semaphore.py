"""Named semaphores, of posix_ipc and of the standard library, which both must do the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmq import semaphore

ITS_IMPORT = pytest.mark.skipif(
    semaphore.gil_is_off(), reason="importing posix_ipc switches the GIL on in this process"
)
POSIX_IPC = semaphore._OfPosixIpc
MULTIPROCESSING = semaphore._OfMultiprocessing


@pytest.fixture
def name() -> Iterator[str]:
    name = f"/shmq-test-{os.getpid()}.attach"
    yield name
    file_of(name).unlink(missing_ok=True)


def file_of(name: str) -> Path:
    return Path("/dev/shm", f"sem.{name[1:]}")


each_kind = pytest.mark.parametrize(
    "kind",
    [pytest.param(POSIX_IPC, marks=ITS_IMPORT, id="posix_ipc"), MULTIPROCESSING],
)


@each_kind
def test_a_semaphore_is_counted_and_never_waits(name: str, kind: Any) -> None:
    kind.create(name, 2)
    opened = kind(name)
    assert opened.value == 2
    assert [opened.decrement() for _ in range(3)] == [True, True, False]
    for _ in range(5):
        opened.increment()
    assert opened.value == 5
    opened.close()
    opened.close()
    assert kind(name).value == 5


@each_kind
def test_one_that_exists_is_not_created_again(name: str, kind: Any) -> None:
    kind.create(name, 1)
    assert file_of(name).stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        kind.create(name, 2)
    assert kind(name).value == 1


@each_kind
def test_one_that_is_not_there_is_not_opened(name: str, kind: Any) -> None:
    with pytest.raises(FileNotFoundError):
        kind(name)


@each_kind
def test_one_that_this_user_may_not_use_is_not_opened(name: str, kind: Any) -> None:
    kind.create(name, 1)
    file_of(name).chmod(0)
    user = os.geteuid()
    if not user:
        os.seteuid(65534)  # root may open everything
    try:
        with pytest.raises(PermissionError):
            kind(name)
    finally:
        os.seteuid(user)


@ITS_IMPORT
@pytest.mark.parametrize(
    ("first", "second"), [(POSIX_IPC, MULTIPROCESSING), (MULTIPROCESSING, POSIX_IPC)]
)
def test_both_kinds_share_one_semaphore(name: str, first: Any, second: Any) -> None:
    first.create(name, 3)
    of_first, of_second = first(name), second(name)
    assert of_second.decrement()
    assert of_first.value == 2
    of_first.increment()
    assert of_second.value == 3


def test_a_python_without_the_gil_takes_those_of_the_standard_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
    assert semaphore._kind() is MULTIPROCESSING
    monkeypatch.setattr("sys._is_gil_enabled", lambda: True, raising=False)
    assert semaphore._kind() is POSIX_IPC
