"""Files of a data path that another user made, or could have written, and files of any size: they
are refused before anything is used, also if they appear while the broker runs.

The other user is another uid, so most of this needs root.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import processes
from support.deliveries import sorted_bodies
from support.other_users import GROUP, STRANGER, needed, run
from support.processes import Child, eventually

import shmq
from shmq import shm
from shmq.storage import own_files
from shmq.storage.own_files import ForeignFile

#: A name of each kind of file that a start reads or replaces.
NAMES = [
    "nsqd.dat",
    "shmq.dat",
    "shmq.copy.dat",
    "t:c.diskqueue.removed.dat",
    "shmq.key",
    "shmq.leases",
    "t:c.diskqueue.000001.dat",
    "t.diskqueue.meta.dat",
    "t:c.deferred.000001.dat",
    "t:c.deferred.000001.7.dat",
    "shmq.results.r.dat",
    "nsqd.dat.123.tmp",
    "t:c.diskqueue.meta.dat.5.tmp",
]
SPARSE = 100 << 30


def record(body: bytes) -> bytes:
    head = struct.pack(">qH16s", time.time_ns(), 0, b"0123456789abcdef")
    return struct.pack(">i", len(head) + len(body)) + head + body


@pytest.fixture
def start(instance: str, data_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`start(*words)`: `shmq serve` that is expected to end by itself."""

    def serve(*words: str) -> subprocess.CompletedProcess[str]:
        path = f"--data-path={data_path}"
        done = run("serve", f"--instance={instance}", path, *processes.NO_GATEWAY, *words)
        assert "Traceback" not in done.stderr
        return done

    return serve


Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=[0o1777, 0o755], ids=["sticky", "private"])
def mode(data_path: Path, request: pytest.FixtureRequest) -> int:
    data_path.chmod(request.param)
    return int(request.param)


# ---- before a start ----


@needed
@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_user_ends_the_start(
    start: Start, instance: str, data_path: Path, name: str
) -> None:
    planted = data_path / name
    planted.write_bytes(record(b"planted"))
    os.chown(planted, STRANGER, STRANGER)
    (data_path / "nsqd.dat.bad").write_text("nobody reads it")
    (data_path / "notes.txt").write_text("nor this")
    for other in ("nsqd.dat.bad", "notes.txt"):
        os.chown(data_path / other, STRANGER, STRANGER)
    before = planted.stat()
    done = start()
    assert done.returncode == 1
    assert f"{planted}: it belongs to uid {STRANGER}" in done.stderr
    assert f"chown 0 {planted}" in done.stderr or f"chown 0 '{planted}'" in done.stderr
    assert "--data-path-shared" in done.stderr
    assert shm.list_objects(instance) == []
    assert (planted.stat().st_mtime_ns, planted.stat().st_size) == (
        before.st_mtime_ns,
        before.st_size,
    )
    assert sorted(file.name for file in data_path.iterdir()) == sorted(
        {name, "nsqd.dat.bad", "notes.txt"}
    )


@needed
@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("/etc/hostname"), os.mkfifo, Path.mkdir]
)
def test_a_link_fifo_or_directory_of_another_user_ends_the_start_too(
    start: Start, data_path: Path, make: Callable[[Path], None]
) -> None:
    path = data_path / "t:c.diskqueue.000001.dat"
    make(path)
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    done = start()
    assert done.returncode == 1
    assert f"{path}: it belongs to uid {STRANGER}" in done.stderr


@needed
def test_the_remedies_work_as_they_are_printed(
    start: Start, serve: Callable[..., Child], attach: Callable[[], shmq.Broker], data_path: Path
) -> None:
    for name in ("t:c.diskqueue.000001.dat", "t:d.diskqueue.000001.dat"):
        (data_path / name).write_bytes(record(b"1"))
        os.chown(data_path / name, STRANGER, STRANGER)
    done = start()
    assert "1 more files are not to be used either" in done.stderr
    remedy = done.stderr.partition("what nsqd left: ")[2].partition(")")[0]
    assert remedy == f"chown -R 0 {data_path}"
    subprocess.run(remedy, shell=True, check=True)
    serve()
    with attach() as broker:
        assert sorted_bodies(broker, "t", "c") == [b"1"]


@needed
def test_files_of_others_are_taken_if_the_data_path_is_shared(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], data_path: Path
) -> None:
    data_path.chmod(0o1777)
    planted = data_path / "t:c.diskqueue.000001.dat"
    planted.write_bytes(record(b"1"))
    os.chown(planted, STRANGER, STRANGER)
    serve(data_path_shared="true")
    with attach() as broker:
        assert sorted_bodies(broker, "t", "c") == [b"1"]


@needed
def test_doctor_names_a_file_that_ends_the_next_start(data_path: Path) -> None:
    path = data_path / "t:c.diskqueue.000001.dat"
    path.touch()
    assert "belongs to uid" not in run("doctor", f"--data-path={data_path}").stdout
    os.chown(path, STRANGER, STRANGER)
    done = run("doctor", f"--data-path={data_path}")
    assert f"{path}: it belongs to uid {STRANGER}" in done.stdout


def test_a_shared_data_path_may_be_one_that_everybody_writes(
    start: Start, serve: Callable[..., Child], data_path: Path
) -> None:
    data_path.chmod(0o777)
    assert start().returncode == 1
    server = serve(data_path_shared="true")
    assert "every user of this host may replace the files in it" in server.errors


@pytest.mark.parametrize(
    ("mode", "said"), [(0o666, "chmod o-w"), (0o602, "chmod o-w"), (0o644, ""), (0o600, "")]
)
def test_a_file_that_others_may_write_ends_the_start(data_path: Path, mode: int, said: str) -> None:
    path = data_path / "t:c.diskqueue.000001.dat"
    path.write_bytes(record(b"1"))
    path.chmod(mode)
    if not said:
        own_files.check_all(data_path)
        assert own_files.read_start(path, 4) == record(b"1")[:4]
        return
    for use in (own_files.check_all, lambda _: own_files.open_file(path, os.O_RDONLY)):
        with pytest.raises(ForeignFile, match=f"every user of this host may write it: {said} "):
            use(data_path)


@needed
def test_a_file_that_a_group_may_write_ends_the_start(start: Start, data_path: Path) -> None:
    path = data_path / "nsqd.dat"
    path.write_text("{}")
    os.chown(path, 0, GROUP)
    path.chmod(0o660)
    done = start()
    assert done.returncode == 1
    assert f"members of group gid {GROUP} may write it: chmod g-w {path}" in done.stderr


def test_a_file_with_a_second_name_ends_the_start_but_not_one_that_was_set_aside(
    start: Start, data_path: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(record(b"1"))
    path = data_path / "t:c.diskqueue.000001.dat"
    os.link(precious, path)
    done = start()
    assert done.returncode == 1
    assert "2 names (hard links)" in done.stderr
    assert precious.read_bytes()
    remedy = done.stderr.strip().rpartition("content: ")[2]
    subprocess.run(remedy, shell=True, check=True)
    own_files.check_all(data_path)
    os.link(path, f"{path}.bad.1")  # as a death leaves it
    own_files.check_all(data_path)
    os.close(own_files.open_file(path, os.O_RDWR))


@needed
def test_an_adoption_is_refused_and_loses_nothing(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    start: Start,
    instance: str,
    data_path: Path,
) -> None:
    data_path.chmod(0o1777)
    server = serve()
    with attach() as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish(b"1")
    server.process.kill()
    server.wait()
    planted = data_path / "t:c.diskqueue.000001.dat"
    planted.write_text("planted")
    os.chown(planted, STRANGER, STRANGER)
    before = shm.list_objects(instance)
    for command in ((), ("--drain",)):
        done = start(*command)
        assert done.returncode == 1
        assert f"belongs to uid {STRANGER}" in done.stderr
        assert shm.list_objects(instance) == before
    planted.unlink()
    serve()
    with attach() as broker:
        assert sorted_bodies(broker, "t", "c") == [b"1"]


# ---- while the broker runs ----


@needed
def test_a_file_that_appears_while_the_broker_runs_is_not_used(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], data_path: Path
) -> None:
    data_path.chmod(0o1777)
    server = serve()
    with attach() as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish_many([b"1", b"2"])
        planted = [
            data_path / "t:c.diskqueue.000001.dat",
            data_path / "other:c.diskqueue.000000.dat",
        ]
        for path in planted:
            path.write_bytes(record(b"666"))
            path.chmod(0o666)
            os.chown(path, STRANGER, STRANGER)
        with pytest.raises(shmq.ShmqError, match=f"refused it: it belongs to uid {STRANGER}"):
            broker.create_channel("other", "c")
    server.process.terminate()
    assert server.wait() == 1
    assert f"it belongs to uid {STRANGER}" in server.errors
    assert "the rest stays in shared memory" in server.errors
    for path in planted:
        path.unlink(missing_ok=True)  # root may remove it, as what an abandoned batch left
    serve()
    with attach() as broker:
        assert sorted_bodies(broker, "t", "c") == [b"1", b"2"]


@needed
def test_every_way_to_open_a_file_of_a_data_path_looks_at_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "nsqd.dat"
    path.write_bytes(b"12345")
    os.chown(path, STRANGER, STRANGER)
    ways: list[Callable[[], object]] = [
        lambda: own_files.open_file(path, os.O_RDONLY),
        lambda: own_files.open_file(path, os.O_RDWR | os.O_CREAT),
        lambda: own_files.read_file(path, 100),
        lambda: own_files.read_start(path, 100),
        lambda: own_files.truncate(path, 0),
    ]
    for way in ways:
        with pytest.raises(ForeignFile, match=f"belongs to uid {STRANGER}"):
            way()
    with pytest.raises(FileExistsError):
        own_files.make_file(path)
    (tmp_path / "shmq.dat").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        own_files.make_file(tmp_path / "shmq.dat")
    assert path.read_bytes() == b"12345"


# ---- sizes, and a start that takes long ----


@pytest.mark.parametrize("name", ["nsqd.dat", "shmq.dat"])
def test_metadata_of_any_size_is_refused_with_a_sentence(
    start: Start, instance: str, data_path: Path, name: str
) -> None:
    (data_path / name).touch()
    os.truncate(data_path / name, SPARSE)
    done = start()
    assert done.returncode == 1
    assert f"{data_path / name}: it has {SPARSE} bytes, and such a file has" in done.stderr
    assert shm.list_objects(instance) == []


def test_positions_chunks_and_records_of_any_size_cost_nothing_else(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], data_path: Path
) -> None:
    (data_path / "t:c.diskqueue.000000.dat").write_bytes(record(b"1"))
    for name in ("t:c.diskqueue.meta.dat", "t:d.deferred.000001.dat", "t:e.diskqueue.000001.dat"):
        (data_path / name).touch()
        os.truncate(data_path / name, SPARSE)
    server = serve()
    assert "Traceback" not in server.errors
    assert (data_path / "t:d.deferred.000001.dat.bad").exists()
    with attach() as broker:
        assert sorted_bodies(broker, "t", "c") == [b"1"]


def test_more_topics_than_an_instance_has_room_for_are_refused_before_any_is_made(
    start: Start, instance: str, data_path: Path
) -> None:
    topics = [{"name": f"t{number}", "channels": []} for number in range(200_000)]
    (data_path / "nsqd.dat").write_text(json.dumps({"topics": topics}))
    done = start()
    assert done.returncode == 1
    assert "name 200000 topics, and an instance has room for 16384" in done.stderr
    assert shm.list_objects(instance) == []


@pytest.fixture
def many_channels(data_path: Path) -> int:
    count = 16_000
    channels = [{"name": f"c{number}"} for number in range(count)]
    document = {"topics": [{"name": "t", "channels": channels}]}
    (data_path / "nsqd.dat").write_text(json.dumps(document))
    return count


def test_a_start_that_takes_long_obeys_sigterm(
    serve: Callable[..., Child], instance: str, data_path: Path, many_channels: int
) -> None:
    before = (data_path / "nsqd.dat").read_bytes()
    server = serve(wait=False)
    eventually(lambda: len(shm.list_objects(instance)) > 20)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "received signal SIGTERM while starting" in server.errors
    assert "Traceback" not in server.errors
    assert f"instance {instance}: running" not in server.errors
    assert shm.list_objects(instance) == []
    assert (data_path / "nsqd.dat").read_bytes() == before
    assert many_channels
