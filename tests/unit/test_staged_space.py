"""The shares of what clients may stage, without filling a /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shmq.errors import Full
from shmq.gateway import staged_space
from shmq.gateway.asker import Asker
from shmq.gateway.staged_space import Space, sweep
from shmq.private import Private
from shmq.users import Quota

ROOM = 1_000_000


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A directory with room for ROOM bytes."""
    with Private(str(tmp_path), "staged") as directory:

        def free(kept: float = 0.0) -> int:
            return ROOM - sum(directory.size(name) for name in directory.names())

        monkeypatch.setattr(directory, "free", free)
        yield directory


def put(space: Space, here: Private, asker: Asker, topic: str, number: int, size: int) -> None:
    name = f"{number:032x}.1.{number:032x}.{Space.owner(topic, asker)}.rows"
    space.take(here, asker, topic, name, 0, size)
    fd = here.append(name)
    os.write(fd, bytes(size))
    os.close(fd)


def many(space: Space, here: Private, askers: list[Asker]) -> None:
    for number, asker in enumerate(askers):
        put(space, here, asker, "fill", number, 20_000)


def test_one_client_leaves_room_for_others(here: Private, caplog: Any) -> None:
    space, evil, honest = Space(), Asker("10.0.0.1"), Asker("10.0.0.2")
    with pytest.raises(Full, match="this client may stage"):
        many(space, here, [evil] * 100)
    assert 20 <= len(here.names()) <= 25
    assert "STAGE fill: client(@): this client may stage" in caplog.text
    put(space, here, honest, "fill", 200, 20_000)
    put(Space(), here, honest, "other", 201, 20_000)  # in another process


def test_one_topic_leaves_room_for_others(here: Private) -> None:
    space = Space()
    with pytest.raises(Full, match="staged for this topic"):
        many(space, here, [Asker(f"10.0.0.{number}") for number in range(100)])
    assert 35 <= len(here.names()) <= 38
    put(space, here, Asker("10.0.1.1"), "other", 200, 20_000)


def test_a_user_has_its_quota(here: Private) -> None:
    user = Asker("me", True, quota=Quota(staged_bytes=50_000))
    put(Space(), here, user, "t", 1, 30_000)
    with pytest.raises(Full, match="this client may stage 50000 bytes"):
        put(Space(), here, user, "t", 2, 30_000)


def test_files_count_too(here: Private, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_space, "_CLIENT_FILES", 10)
    space, evil = Space(), Asker("10.0.0.1")
    for number in range(10):
        put(space, here, evil, "t", number, 1)
    with pytest.raises(Full, match="has staged 10 attempts"):
        put(space, here, evil, "t", 10, 1)
    put(space, here, Asker("10.0.0.2"), "t", 11, 1)


def test_addresses_of_one_network_are_one_client() -> None:
    first, second = Asker("2001:db8::1"), Asker("2001:db8::ffff:1")
    assert first.whose == second.whose != Asker("2001:db8:0:1::1").whose
    assert Asker("10.0.0.1").whose != Asker("10.0.0.1", True).whose  # a user of this name


def test_a_sweep_looks_at_whole_epochs(here: Private) -> None:
    names = [f"{1:032x}.1.{number:032x}.{1:016x}-{2:016x}.rows" for number in range(3)]
    names += [f"{2:032x}.7.{9:032x}.{1:016x}-{2:016x}.rows"]
    names += [f"{3:032x}.7.{9:032x}.{1:016x}-{2:016x}.rows", f"{3:032x}.7.manifest"]
    for name in names:
        os.close(here.create(name))
        os.utime(here.path / name, (1, 1))
    here.touch(names[1])
    for name in names[4:]:
        os.utime(here.path / name, (os.stat(here.path / names[1]).st_mtime - 100,) * 2)
    sweep(here, 50)
    assert sorted(here.names()) == sorted(names[:3] + names[4:])
    sweep(here, 10)
    assert sorted(here.names()) == sorted(names[:3])
