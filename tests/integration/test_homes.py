"""Where an embedded broker without a data path keeps its files, and who removes them."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import Child, eventually, remove_instance, say, vanish

import shmq
from shmq import homes, shm
from shmq.storage.dirlock import DataPathLocked, DirLock


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the directories are made in this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "shmq"


def test_the_last_component_of_a_data_path_is_made_for_its_owner_alone(
    tmp_path: Path, open_broker: Callable[..., shmq.Broker]
) -> None:
    path = tmp_path / "jobs"
    open_broker(data_path=path).producer("t").publish(b"kept")
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_data_path_without_a_parent_is_refused_and_nothing_is_made(
    tmp_path: Path, instance: str
) -> None:
    with pytest.raises(shmq.ShmqError, match="data path does not exist"):
        shmq.Broker(data_path=tmp_path / "no" / "jobs", instance=instance)
    assert not (tmp_path / "no").exists()


def test_a_start_that_fails_leaves_no_directory(state: Path, tmp_path: Path, instance: str) -> None:
    for path in (tmp_path / "jobs", None):
        with pytest.raises(ValueError, match="mem_queue_size"):
            shmq.Broker(data_path=path, instance=instance, mem_queue_size=-1)
    assert not (tmp_path / "jobs").exists()
    assert list(state.iterdir()) == []


def test_a_named_broker_finds_what_it_left(state: Path, instance: str) -> None:
    with shmq.Broker(instance=instance) as broker:
        broker.producer("t").publish(b"kept")
        assert broker.data_path == state / instance
    with shmq.Broker(instance=instance) as broker:
        message = broker.consumer("t", "c").take(timeout=10)
        assert message is not None
        assert message.body == b"kept"
        message.finish()
    assert list(state.iterdir()) == []


def locked(path: Path) -> bool:
    """Whether somebody has the data path."""
    try:
        with DirLock(path):
            return False
    except DataPathLocked:
        return True


@pytest.fixture
def abandoned(state: Path, child: Callable[..., Child]) -> Callable[..., Path]:
    """The directory of an unnamed broker whose process ended by a kill, and of which a reboot left
    nothing in memory. `publish` is the number of messages published, some of which went to disk."""

    def start(publish: int) -> None:
        broker = shmq.Broker(mem_queue_size=0)
        producer = broker.producer("t")
        for k in range(publish):
            producer.publish(b"%d" % k)
        while publish and not broker.stats().topic("t").backend_depth:
            time.sleep(0.01)
        say("instance", broker.instance)
        vanish()

    def abandon(publish: int = 0) -> Path:
        ending = child(start, publish, env={"XDG_STATE_HOME": str(state.parent)})
        instance = ending.said("instance").split()[1]
        ending.wait()
        remove_instance(instance)
        eventually(lambda: not locked(state / instance), what="no thread of its supervisor is left")
        return state / instance

    return abandon


def test_an_empty_orphan_is_removed_by_the_next_start(
    abandoned: Callable[..., Path], instance: str
) -> None:
    orphan = abandoned()
    with shmq.Broker(instance=instance):
        assert not orphan.exists()


def test_an_orphan_with_messages_stays(abandoned: Callable[..., Path], instance: str) -> None:
    orphan = abandoned(publish=2000)
    with shmq.Broker(instance=instance):
        assert orphan.exists()
    with shmq.Broker(data_path=orphan, instance=instance) as broker:
        assert broker.stats().topic("t").depth > 0


@pytest.mark.parametrize(
    "name",
    [
        "t.diskqueue.000000.dat",  # records without a position file: a host's crash
        "t.diskqueue.000000.dat.bad",
        "t.deferred.000000.dat",
        "of-somebody",
    ],
)
def test_what_may_hold_a_message_keeps_an_orphan(state: Path, name: str) -> None:
    orphan = state / "embedded-1-01234567"
    orphan.mkdir(parents=True)
    (orphan / "nsqd.dat").write_text("{}")
    (orphan / name).write_bytes(b"x")
    assert homes.sweep(state) == []
    assert (orphan / name).exists()
    (orphan / name).unlink()
    assert homes.sweep(state) == [orphan.name]
    assert not orphan.exists()


def test_records_behind_the_position_file_keep_an_orphan(state: Path) -> None:
    orphan = state / "embedded-1-01234567"
    orphan.mkdir(parents=True)
    (orphan / "t.diskqueue.meta.dat").write_text("0\n0,10\n0,10\n")
    data = orphan / "t.diskqueue.000000.dat"
    data.write_bytes(bytes(11))
    assert homes.sweep(state) == []
    data.write_bytes(bytes(10))
    assert homes.sweep(state) == [orphan.name]


def test_directories_in_use_stay(state: Path, instance: str) -> None:
    with shmq.Broker(instance=instance) as broker:
        assert broker.data_path is not None
        assert homes.sweep(state) == []
        broker.data_path.joinpath("x").touch()  # still there, and still its own
        broker.data_path.joinpath("x").unlink()
        segments_of_it = shm.list_objects(instance)
        assert segments_of_it
        homes.remove(broker.data_path)  # its supervisor holds it
        assert broker.data_path.is_dir()


def test_nothing_is_swept_between_the_making_of_a_directory_and_its_use(state: Path) -> None:
    with homes.opened("embedded-1-01234567") as path:
        assert homes.sweep(state) == []
        homes.remove(path)
        assert path.is_dir()
    assert homes.sweep(state) == [path.name]


def test_a_start_waits_for_who_removes(
    state: Path, instance: str, child: Callable[..., Child]
) -> None:
    state.mkdir(parents=True)
    fd = os.open(state, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def start(instance: str) -> None:
        say("starts")
        with shmq.Broker(instance=instance) as broker:
            say("path", broker.data_path)

    starting = child(start, instance, env={"XDG_STATE_HOME": str(state.parent)})
    starting.said("starts")
    eventually(
        lambda: f" {os.fstat(fd).st_ino} " in _waiting_for_locks(starting.pid),
        what="it waits for the lock",
    )
    assert not (state / instance).exists()
    os.close(fd)
    assert starting.said("path") == f"path {state / instance}"


def _waiting_for_locks(pid: int) -> str:
    """Lines of /proc/locks of locks that this process waits for, with the inode apart."""
    lines = Path("/proc/locks").read_text().splitlines()
    waiting = [line for line in lines if "->" in line and f" {pid} " in line]
    return "\n".join(waiting).replace(":", " ")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without an entry")
def test_a_user_without_an_entry_and_a_home_has_temporary_files(
    child: Callable[..., Child],
) -> None:
    def become_nobody(path: str) -> None:
        import tempfile

        from shmq import homes

        for name in ("HOME", "XDG_STATE_HOME"):
            os.environ.pop(name, None)
        tempfile.tempdir = path
        os.chmod(path, 0o777)
        os.setgid(54321)
        os.setuid(54321)
        with homes.opened("x") as made:
            say("parent", homes.parent(), oct(made.stat().st_mode))
        homes.remove(made)
        say("left", os.listdir(path))

    with tempfile.TemporaryDirectory() as path:  # others may pass through those above it
        nobody = child(become_nobody, path)
        assert nobody.said("parent") == "parent None 0o40700"
        assert nobody.said("left") == "left []"
