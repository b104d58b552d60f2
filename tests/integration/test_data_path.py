"""Messages left in shared memory are adopted with the data path that has their files, and with no
other."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.deliveries import take_all
from support.processes import NO_GATEWAY, Child, eventually
from support.processes import serve as serve_child

import shmq
from shmq import shm, sources

Start = Callable[..., Child]

COUNT = 5000
BODIES = [b"%d" % number for number in range(COUNT)]


@pytest.fixture
def left(
    serve: Start, attach: Callable[[], shmq.Broker], instance: str, data_path: Path
) -> list[bytes]:
    """A killed instance with messages of t/c in memory and on disk: their bodies."""
    server = serve(mem_queue_size=256)
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    for number in range(0, COUNT, 100):
        producer.publish_many(BODIES[number : number + 100])
    eventually(lambda: '"c"' in (data_path / "nsqd.dat").read_text())
    assert broker.stats().channel("t", "c").backend_depth > 0
    broker.close()
    server.kill()
    return BODIES


@pytest.fixture
def start(instance: str, keep: Callable[[Any], Any]) -> Start:
    """`start(words..., cwd=)`: `shmq serve` of the instance that was left."""

    def run(*words: str, cwd: Path | None = None) -> Child:
        argv = [sys.executable, "-m", "shmq", "serve", f"--instance={instance}", *NO_GATEWAY]
        if cwd is not None:
            argv = ["sh", "-c", f'cd "{cwd}" && exec "$@"', "sh", *argv]
        return keep(Child([*argv, *words]))

    return run


def dat_files(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.endswith(".dat"))


def all_come(instance: str, data_path: Path, bodies: list[bytes]) -> None:
    """A start on this data path delivers each once, in order."""
    server = serve_child(instance, data_path)
    try:
        with shmq.attach(instance) as broker:
            assert take_all(broker, "t", "c").bodies == bodies
    finally:
        server.kill(signal.SIGTERM)
        server.close()


def test_a_drain_without_a_data_path_writes_where_the_files_are(
    left: list[bytes], start: Start, instance: str, data_path: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    drained = start("--drain", cwd=elsewhere)
    assert drained.wait() == 0, drained.errors
    assert os.listdir(elsewhere) == []
    assert not shm.list_objects(instance)
    all_come(instance, data_path, left)


@pytest.mark.parametrize("how", ["drain", "start", "start in the current directory"])
def test_another_data_path_is_refused_and_nothing_is_touched(
    how: str, left: list[bytes], start: Start, instance: str, data_path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "it's another"
    other.mkdir()
    before, objects = dat_files(data_path), shm.list_objects(instance)
    if how.endswith("directory"):
        refused = start(cwd=other)
    else:
        refused = start(f"--data-path={other}", *(["--drain"] if how == "drain" else []))
    assert refused.wait() == 1
    assert f"has its files in {data_path}, so {other}" in refused.errors
    assert f"--data-path={data_path}" in refused.errors
    assert "Traceback" not in refused.errors
    assert "another broker" not in refused.errors
    assert os.listdir(other) == []
    assert dat_files(data_path) == before
    assert shm.list_objects(instance) == objects
    all_come(instance, data_path, left)


def test_files_that_were_moved_are_known_in_their_new_place(
    left: list[bytes], start: Start, instance: str, data_path: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(data_path, moved)  # keeps the times, as `cp -a`, `mv` and rsync do
    refused = start(f"--data-path={moved}")
    assert refused.wait() == 1  # which of the two is it?
    assert str(data_path) in refused.errors
    shutil.rmtree(data_path)
    server = serve_child(instance, moved)
    try:
        assert f"were moved from {data_path} to {moved}" in server.errors
        assert sources.open_readonly(instance).directory.data_path == str(moved)
    finally:
        server.kill()
        server.close()
    all_come(instance, moved, left)


def test_a_data_path_that_is_gone_is_said_and_can_be_given_up(
    left: list[bytes], start: Start, instance: str, data_path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.rmtree(data_path)
    refused = start(f"--data-path={other}")
    assert refused.wait() == 1
    assert f"in {data_path}, which is not there any more" in refused.errors
    assert f"mkdir {data_path}" in refused.errors
    data_path.mkdir()
    refused = start(f"--data-path={data_path}")  # nothing says yet that the files are given up
    assert refused.wait() == 1
    assert "there is no nsqd.dat there any more: mount its file system" in refused.errors
    command = refused.errors.rstrip().rpartition("go on without them: ")[2]
    subprocess.run(command, shell=True, check=True)
    server = serve_child(instance, data_path)
    try:
        with shmq.attach(instance) as broker:
            came = take_all(broker, "t", "c").bodies
        assert came
        assert came == [body for body in left if body in set(came)]  # what was in memory, in order
    finally:
        server.kill(signal.SIGTERM)
        server.close()


def test_the_same_directory_may_have_another_name(
    left: list[bytes], instance: str, data_path: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(data_path)
    all_come(instance, link, left)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_not_written_to_because_the_segment_says_so(
    left: list[bytes], start: Start, instance: str, data_path: Path, tmp_path: Path
) -> None:
    os.chown(data_path, 65534, 65534)
    elsewhere, before = tmp_path / "elsewhere", dat_files(data_path)
    elsewhere.mkdir()
    refused = start("--drain", cwd=elsewhere)
    assert refused.wait() == 1
    assert f"--data-path={data_path}" in refused.errors
    assert dat_files(data_path) == before
    assert os.listdir(elsewhere) == []
    all_come(instance, data_path, left)  # an operator who names it has looked at it


def leave_an_embedded_one(instance, state):
    os.environ["XDG_STATE_HOME"] = state
    broker = shmq.Broker(instance=instance)
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"kept")
    os.kill(broker.supervisor_pid, signal.SIGKILL)
    vanish()  # noqa: F821


def test_an_embedded_broker_takes_up_what_its_name_left(
    child: Callable[..., Child], instance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(leave_an_embedded_one, instance, str(tmp_path)).die()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    eventually(lambda: sources.data_path_left(instance))
    (own,) = (tmp_path / "shmq").iterdir()
    with shmq.Broker(instance=instance) as broker:
        assert broker.data_path == own
        assert take_all(broker, "t", "c").bodies == [b"kept"]
    assert list((tmp_path / "shmq").iterdir()) == []
