"""Every kind of file of a data path, damaged in every way, and files of which something else has
the name: nothing else is lost, nothing hangs, and what the error says to do works as it is printed.
"""

from __future__ import annotations

import os
import re
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import other_users, processes
from support.other_users import STRANGER
from support.processes import Child, eventually

import shmq
from shmq import shm
from shmq.storage import own_files
from shmq.storage.data_path import remove_temporary
from shmq.storage.own_files import KINDS, ForeignFile

#: kind -> the file of it that is damaged. A new kind needs a row, and a file in `filled`.
ROWS = {
    "topics": "nsqd.dat",
    "settings": "shmq.dat",
    "copy of the settings": "shmq.copy.dat",
    "key": "shmq.key",
    "returned leases": "shmq.leases",
    "records": "t:c.diskqueue.*[0-9].dat",
    "positions": "t:c.diskqueue.meta.dat",
    "mark of a deletion": "u.diskqueue.removed.dat",
    "deferred messages": "t:c.deferred.*.dat",
    "results": "shmq.results.r.dat",
}
OPTIONS = {"mem_queue_size": 0, "max_bytes_per_file": 4000}
COUNT = 120

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]


# ---- damages ----


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def full_directory(path: Path) -> None:
    directory(path)
    (path / "something").touch()


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    here = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def link(path: Path) -> None:
    path.touch()
    elsewhere = path.parent.with_name("elsewhere")
    elsewhere.mkdir(exist_ok=True)
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


def dead_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.parent.with_name("nowhere"))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def missing(path: Path) -> None:
    path.unlink()


def no_mode(path: Path) -> None:
    path.chmod(0)


#: The user of the brokers whose files have modes that matter: root may use all. 0: this one.
USER = STRANGER if os.geteuid() == 0 else 0

NO_FILES = [directory, full_directory, fifo, unix_socket, link, dead_link]


# ---- what is there, and what comes ----


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data path with a file of each kind, as a stop has left it."""
    path = tmp_path_factory.mktemp("filled") / "data"
    path.mkdir()
    instance = f"test-{os.getpid()}-{secrets.token_hex(4)}"
    server = processes.serve(instance, path, **OPTIONS)
    try:
        with shmq.attach(instance, timeout=processes.WATCHDOG) as broker:
            for channel in ("c", "d"):
                broker.create_channel("t", channel)
            publish(broker, "t", [*numbered(), *[b"late"] * 5])
            publish(broker, "u", numbered())
            broker.configure("t", "c", max_attempts=7)
            broker.results("r").set(b"k", b"v")
            with broker.lease_holder("t", "d", "holder") as holder:
                eventually(lambda: holder.lease(5))
                server.kill(signal.SIGTERM)
                assert server.wait() == 0, server.errors
    finally:
        server.close()
        processes.remove_instance(instance)
    (path / "u.diskqueue.removed.dat").touch()
    return path


def numbered() -> list[bytes]:
    return [b"%03d" % number + b"." * 60 for number in range(COUNT)]


def publish(broker: shmq.Broker, topic: str, bodies: list[bytes]) -> None:
    with broker.producer(topic) as producer:
        for body in bodies:
            producer.publish(body, defer=3000 if body == b"late" else 0, timeout=60)


@pytest.fixture
def damaged(filled: Path, data_path: Path) -> Path:
    """A copy of `filled`, to be damaged."""
    shutil.copytree(filled, data_path, dirs_exist_ok=True)
    return data_path


def row(data_path: Path, kind: str) -> Path:
    return min(data_path.glob(ROWS[kind]))


def remedy(said: str) -> str:
    """The first command that an error names."""
    found = re.search(
        r"\b(?:mv|rm|chmod|chown) (?:-\w+ )?[^;()]*?(?= as root|[;()]|: |$)", said, re.M
    )
    assert found, said
    return found[0]


def follow(said: str) -> None:
    """Do what an error says."""
    subprocess.run(remedy(said), shell=True, check=True)


def begun(server: Child, instance: str) -> Child:
    """The broker, when it runs or has ended."""
    eventually(lambda: processes.answers(instance, server.pid) or server.process.poll() is not None)
    assert "Traceback" not in server.errors
    return server


@pytest.fixture
def started(serve: Serve, instance: str) -> Callable[[], Child]:
    """`started()`: a broker that runs, after what its errors say was done. Each start that is
    refused names one file."""

    def start() -> Child:
        for _ in range(len(ROWS) + 1):
            server = begun(serve(wait=False, **OPTIONS), instance)
            if server.process.poll() is None:
                return server
            assert server.process.returncode == 1, server.errors
            assert not shm.list_objects(instance)
            follow(server.errors)
        raise AssertionError("what the errors say does not help")

    return start


def came(broker: shmq.Broker, topic: str, channel: str) -> list[bytes]:
    """Returns what the channel gives, deferred messages aside."""
    bodies = []
    with broker.consumer(topic, channel) as consumer:
        while broker.channel_depth(topic, channel):
            if (message := consumer.take(0.1)) is not None:
                bodies.append(message.body)
                message.finish()
    return sorted(set(bodies))


# ---- each kind ----


def test_each_kind_of_file_has_a_row_and_a_file(filled: Path) -> None:
    assert set(ROWS) == set(KINDS)
    for kind in ROWS:
        assert re.fullmatch(KINDS[kind], row(filled, kind).name)
    strange = {file.name for file in filled.iterdir() if not own_files.is_known(file.name)}
    assert strange == set()


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_CREAT, None], ids=["open", "make"])
def test_no_file_of_another_kind_is_made(tmp_path: Path, flags: int | None) -> None:
    path = tmp_path / "shmq.new.dat"
    with pytest.raises(ValueError, match="no kind of file"):
        own_files.make_file(path) if flags is None else own_files.open_file(path, flags)
    assert not path.exists()


@pytest.mark.parametrize("kind", ROWS)
def test_what_a_death_leaves_of_a_replacement_is_removed(damaged: Path, kind: str) -> None:
    for end in ("", ".bad", ".bad.3"):
        path = row(damaged, kind)
        path.with_name(f"{path.name}{end}.123.tmp").touch()
    whole = {name for name in os.listdir(damaged) if not name.endswith(".tmp")}
    assert remove_temporary(damaged) == 3
    assert set(os.listdir(damaged)) == whole


@pytest.mark.parametrize("damage", NO_FILES)
@pytest.mark.parametrize("kind", ROWS)
def test_something_else_of_the_name_of_a_file_is_refused_with_what_helps(
    damaged: Path, kind: str, damage: Callable[[Path], None]
) -> None:
    path = row(damaged, kind)
    whole = path.read_bytes()
    damage(path)
    for way in (
        lambda: own_files.check_all(damaged),
        lambda: own_files.open_file(path, os.O_RDONLY),
        lambda: own_files.open_file(path, os.O_RDWR | os.O_CREAT),
    ):
        with pytest.raises(ForeignFile) as caught:
            way()
        assert caught.value.filename == str(path)
    follow(str(caught.value.strerror))
    own_files.check_all(damaged)
    assert not path.exists() or path.read_bytes() == whole


# ---- all at once, and a broker ----


@pytest.mark.parametrize("damage", [directory, fifo, link, empty, zeros, missing])
def test_a_start_loses_only_what_is_damaged_and_names_it(
    started: Callable[[], Child],
    attach: Attach,
    damaged: Path,
    damage: Callable[[Path], None],
) -> None:
    (damaged / ROWS["mark of a deletion"]).unlink()
    kinds = ["settings", "records", "results"] if damage in NO_FILES else ROWS
    rows = {kind: row(damaged, kind) for kind in kinds if kind != "mark of a deletion"}
    for path in rows.values():
        damage(path)
    server = started()
    intact = damage is link
    with attach() as broker:
        assert broker.channel_stats("t", "d").deferred == 5
        is_intact = "deferred messages" not in rows
        assert broker.channel_stats("t", "c").deferred == (5 if is_intact else 0)
        assert came(broker, "u", "c") == numbered()
        assert came(broker, "t", "d") == numbered()
        bodies = came(broker, "t", "c")
        if intact:
            assert bodies == numbered()
            assert broker.results("r").get(b"k") == b"v"
            assert broker.settings("t", "c").max_attempts == 7
        else:
            assert 0 < len(bodies) < COUNT
            assert set(bodies) < set(numbered())
    if damage in (empty, zeros):
        for kind in ("records", "deferred messages", "results", "positions"):
            assert str(rows[kind]) in server.errors, kind


@pytest.mark.parametrize("kind", ["settings", "copy of the settings"])
@pytest.mark.parametrize("damage", [directory, empty, missing])
def test_settings_are_there_twice(
    started: Callable[[], Child],
    attach: Attach,
    damaged: Path,
    damage: Callable[[Path], None],
    kind: str,
) -> None:
    damage(row(damaged, kind))
    started()
    with attach() as broker:
        assert broker.settings("t", "c").max_attempts == 7


# ---- modes, for a user who is not root ----


@pytest.fixture
def private(
    path_of_a_user: Callable[[int], Path], filled: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy of `filled` that belongs to the user of `serve_private`."""
    path = path_of_a_user(USER or os.geteuid())
    shutil.copytree(filled, path, dirs_exist_ok=True)
    path.chmod(0o700)
    if USER:
        for file in [path, *path.iterdir()]:
            os.chown(file, USER, USER)
        monkeypatch.setenv("SHMQ_OWNER", str(USER))
    return path


@pytest.fixture
def serve_private(
    private: Path, instance: str, keep: Callable[[Child], Child]
) -> Callable[[], Child]:
    """`serve_private()`: a broker of a user who is not root; it runs or has ended."""

    def start() -> Child:
        run = f"{other_users.become(USER) if USER else 'import sys'}\n{other_users.RUN}"
        words = [f"--instance={instance}", f"--data-path={private}", *processes.NO_GATEWAY]
        options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
        server = keep(Child([sys.executable, "-c", run, "serve", *words, *options]))
        return begun(server, instance)

    return start


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind != "mark of a deletion"])
def test_a_file_that_its_owner_may_not_open_costs_nothing_and_chmod_helps(
    serve_private: Callable[[], Child], private: Path, attach: Attach, instance: str, kind: str
) -> None:
    (private / ROWS["mark of a deletion"]).unlink()
    path = row(private, kind)
    path.chmod(0)
    server = serve_private()
    if server.process.poll() is not None:
        assert server.process.returncode == 1
        assert f"{path}: " in server.errors
        assert f"chmod u+rw {path}" in server.errors
        assert not shm.list_objects(instance)
        follow(server.errors)
        serve_private()
    else:
        assert kind in ("copy of the settings", "returned leases", "records")
    with attach() as broker:
        if kind == "records":
            with broker.consumer("t", "c"):  # which has them read
                eventually(lambda: f"chmod u+rw {path}" in server.errors)
            follow(server.errors)
        for topic, channel in (("t", "c"), ("t", "d"), ("u", "c")):
            assert came(broker, topic, channel) == numbered()
        assert broker.results("r").get(b"k") == b"v"
        assert broker.settings("t", "c").max_attempts == 7
        assert broker.channel_stats("t", "c").deferred == 5


def test_a_data_path_that_its_owner_may_not_write_costs_nothing_and_chmod_helps(
    serve_private: Callable[[], Child], private: Path, attach: Attach, instance: str
) -> None:
    for mode in (0o500, 0o400, 0o200, 0):
        (private / ROWS["mark of a deletion"]).unlink(missing_ok=True)
        private.chmod(mode)
        server = serve_private()
        assert server.process.poll() == 1, server.errors
        assert f"chmod u+rwx {private}" in server.errors
        assert not shm.list_objects(instance)
    follow(server.errors)
    serve_private()
    with attach() as broker:
        assert came(broker, "t", "c") == numbered()


def test_a_limit_of_the_size_of_files_makes_more_files(
    serve: Serve, attach: Attach, data_path: Path
) -> None:
    server, limit = serve(mem_queue_size=0, arena_size=2 << 20), 300_000
    bodies = [b"%03d" % number + bytes(20_000) for number in range(100)]
    with attach() as broker:
        broker.create_channel("t", "c")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        publish(broker, "t", bodies)
        assert server.kill(signal.SIGTERM) == 0, server.errors
    assert len([*data_path.glob("t:c.diskqueue.*[0-9].dat")]) > 2
    serve()
    with attach() as broker:
        assert came(broker, "t", "c") == bodies


def test_a_limit_that_no_message_keeps_is_named_and_costs_none(
    serve: Serve, attach: Attach
) -> None:
    server = serve(mem_queue_size=0, arena_size=2 << 20)
    before = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    bodies = [b"%02d" % number + bytes(30_000) for number in range(20)]
    with attach() as broker:
        broker.create_channel("t", "c")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (20_000, before[1]))
        publish(broker, "t", bodies)
        eventually(lambda: "20000 bytes (RLIMIT_FSIZE)" in server.errors)
        assert "LimitFSIZE=infinity" in server.errors
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, before)
        eventually(lambda: "the disk works again" in server.errors)
        assert came(broker, "t", "c") == bodies


def test_a_limit_that_shared_memory_does_not_keep_is_named(serve: Serve, attach: Attach) -> None:
    server = serve()
    with attach() as broker:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        with pytest.raises(shmq.ShmqError, match="ulimit -f") as caught:
            broker.create_channel("t", "c")
        assert not isinstance(caught.value, shmq.Full)
        with pytest.raises(shmq.ShmqError, match="ulimit -f"):
            broker.results("r")
    server.close()


def test_a_start_under_such_a_limit_names_it(service: Serve, instance: str) -> None:
    server = service(
        before="import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (99999,) * 2)"
    )
    assert server.wait() == 1
    assert "ulimit -f unlimited (systemd: LimitFSIZE=infinity)" in server.errors
    assert "enlarge /dev/shm" not in server.errors
    assert not shm.list_objects(instance)
