"""Users who may not attach: what they put under shmq's names hangs nobody, is used by nobody, and
stops no other instance; nothing of theirs is trusted unless it is named.

The attackers are other uids (`setpriv`, or a Python that becomes one), so this needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import processes
from support.deliveries import sorted_bodies
from support.other_users import GROUP, SERVICE, STRANGER, as_user, needed, run
from support.processes import Child, eventually

import shmq
from shmq import ownership, shm, sources
from shmq.ownership import NotTrusted

pytestmark = needed


# ---- whose broker it is ----


def test_a_squatted_instance_gets_nothing_from_anybody(
    serve_as: Callable[..., Child], instance: str
) -> None:
    serve_as(STRANGER, "--mode=0666")
    for uid in (0, SERVICE):
        done = run("pub", f"--instance={instance}", "orders", "card=4111", uid=uid)
        assert done.returncode == 1
        assert f"belongs to uid {STRANGER}" in done.stderr
        assert f"SHMQ_OWNER={STRANGER}" in done.stderr
        assert f"--owner {STRANGER}" in done.stderr
        assert "Traceback" not in done.stderr
    for command in ("stat", "peek"):
        done = run(command, f"--instance={instance}", *(["orders"] if command == "peek" else []))
        assert (done.returncode, done.stdout) == (1, ""), command
        assert f"belongs to uid {STRANGER}" in done.stderr
    with pytest.raises(NotTrusted, match=f"uid {STRANGER}"):
        shmq.attach(instance, timeout=processes.WATCHDOG)  # it is not waited for
    with pytest.raises(NotTrusted):
        shmq.attach(instance, owner=SERVICE)
    with sources.open_readonly(instance, STRANGER) as source:
        assert source.directory.live_topics() == []


def test_a_named_owner_is_trusted_by_call_environment_and_option(
    serve_as: Callable[..., Child],
    child: Callable[..., Child],
    instance: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_as(SERVICE)
    with shmq.attach(instance, owner=SERVICE) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish(b"by uid")
    assert run("pub", f"--instance={instance}", f"--owner={SERVICE}", "t", "2").returncode == 0
    assert run("pub", f"--instance={instance}", "t", "3", SHMQ_OWNER=str(SERVICE)).returncode == 0
    assert run("stat", f"--instance={instance}", f"--owner={SERVICE}").returncode == 0
    assert run("stat", f"--instance={instance}", "--owner=nobody-of-this-name").returncode == 2
    assert ownership.OWNER_VARIABLE not in os.environ
    with pytest.raises(ValueError, match="no user of this host"):
        shmq.attach(instance, owner="nobody-of-this-name")
    monkeypatch.setenv(ownership.OWNER_VARIABLE, str(SERVICE))
    forked = child(attach_and_fork, instance)
    assert forked.succeed() == ["parent 3", "child 3"]


def attach_and_fork(instance: str) -> None:
    broker = shmq.attach(instance)
    say("parent", broker.channel_depth("t", "c"))  # noqa: F821 - of PRELUDE
    if not os.fork():
        say("child", broker.channel_depth("t", "c"))  # noqa: F821
        broker.close()
        os._exit(0)
    os.wait()
    broker.close()


def test_the_owner_named_in_a_call_holds_after_a_fork(
    serve_as: Callable[..., Child], child: Callable[..., Child], instance: str
) -> None:
    serve_as(SERVICE)
    with shmq.attach(instance, owner=SERVICE) as broker:
        broker.create_channel("t", "c")
    assert child(name_and_fork, instance, SERVICE).succeed() == ["child 0"]


def name_and_fork(instance: str, owner: int) -> None:
    broker = shmq.attach(instance, owner=owner)
    if not os.fork():
        say("child", broker.channel_depth("t", "c"))  # noqa: F821 - of PRELUDE
        broker.close()
        os._exit(0)
    os.wait()
    broker.close()


def test_a_supervisor_does_not_take_up_what_another_user_left(
    serve_as: Callable[..., Child], instance: str, path_of_a_user: Callable[[int], Path]
) -> None:
    left = serve_as(STRANGER, "--mode=0666", "--on-stop=keep")
    left.process.terminate()
    assert left.wait() == 0
    path = shm.directory_path(instance)
    before = os.stat(path)
    for uid in (SERVICE, 0):
        data_path = path_of_a_user(uid)
        done = run(
            "serve",
            f"--instance={instance}",
            f"--data-path={data_path}",
            *processes.NO_GATEWAY,
            uid=uid,
        )
        assert done.returncode == 1
        assert f"{shm.SHM_DIRECTORY}/" in done.stderr
        assert f"{instance}" in done.stderr
        assert f"belongs to uid {STRANGER}, and a supervisor takes up only" in done.stderr
        assert "Traceback" not in done.stderr
    assert (os.stat(path).st_ino, os.stat(path).st_ctime_ns) == (before.st_ino, before.st_ctime_ns)


def test_a_queue_of_another_user_is_not_mapped(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str
) -> None:
    serve()
    with attach() as broker:
        broker.create_channel("t", "c")
    with sources.open_readonly(instance) as source:
        (entry,) = source.directory.live_queues()
    path = shm.path_of(shm.queue_name(instance, entry.serial))
    with open(path, "rb") as file:
        head, size = file.read(1 << 16), os.fstat(file.fileno()).st_size
    os.unlink(path)
    Path(path).write_bytes(head)
    os.truncate(path, size)
    os.chown(path, STRANGER, STRANGER)
    with attach() as broker, pytest.raises(shmq.ShmqError, match=f"belongs to uid {STRANGER}"):
        broker.consumer("t", "c").take(0)


def test_a_second_name_of_a_segment_is_refused(
    serve: Callable[..., Child], instance: str, new_instance: Callable[[], str]
) -> None:
    serve()
    other = new_instance()
    os.link(shm.directory_path(instance), shm.directory_path(other))
    with pytest.raises(NotTrusted, match="2 names"):
        shmq.attach(other)
    os.unlink(shm.directory_path(other))
    shmq.attach(instance).close()


def test_a_supervisor_replaces_a_queue_whose_name_another_user_has(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str
) -> None:
    """A member cannot take a name away; this is for what an administrator did."""
    serve().kill()
    server = serve()
    with attach() as broker:
        broker.create_channel("t", "c")
        broker.create_channel("other", "c")
        broker.producer("other").publish(b"1")
    server.kill()
    with sources.open_readonly(instance) as source:
        (entry, _) = source.directory.live_queues()
    path = shm.path_of(shm.queue_name(instance, entry.serial))
    os.unlink(path)
    as_user(STRANGER, "mkfifo", "-m", "666", path)
    server = serve()
    eventually(lambda: "running, pid" in server.errors)
    with attach() as broker:
        broker.producer("t").publish(b"2")
        assert sorted_bodies(broker, "t") == [b"2"]
        assert sorted_bodies(broker, "other") == [b"1"]
        os.link(live_path(instance, "t"), f"{live_path(instance, 't')}-copy")
    with attach() as broker:  # a second name of a queue keeps nobody from it
        broker.producer("t").publish(b"3")
        assert sorted_bodies(broker, "t") == [b"3"]
    os.unlink(f"{live_path(instance, 't')}-copy")


def live_path(instance: str, topic: str) -> str:
    with sources.open_readonly(instance) as source:
        found = source.directory.find_topic(topic)
        assert found is not None
        entry = source.directory.find_queue(found.index, "c")
    assert entry is not None
    return shm.path_of(shm.queue_name(instance, entry.serial))


def test_permissions_of_what_is_taken_up_are_those_of_the_options(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str
) -> None:
    server = serve(mode="0666", on_stop="keep")
    with attach() as broker:
        broker.create_channel("t", "c")
    server.process.terminate()
    assert server.wait() == 0
    server = serve()
    assert "had mode 0666, now 0600" in server.errors

    def modes() -> set[int]:
        objects = shm.list_objects(instance)
        return {stat.S_IMODE(os.stat(item.path).st_mode) for item in objects}

    eventually(lambda: modes() == {0o600})


def attach_once(instance: str) -> None:
    say("attaching")  # noqa: F821 - of PRELUDE
    shmq.attach(instance).close()
    say("attached")  # noqa: F821


def test_a_lease_on_a_segment_is_waited_for(
    serve: Callable[..., Child], child: Callable[..., Child], instance: str
) -> None:
    """`doctor` takes such a lease to see which processes have a segment open. The supervisor has it
    mapped only."""
    server = serve(on_stop="keep")
    server.process.terminate()
    assert server.wait() == 0
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open(shm.directory_path(instance), os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        waiting = child(attach_once, instance)
        waiting.said("attaching")
        eventually(waiting.is_asleep)
        assert waiting.lines == ["attaching"]
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        waiting.said("attached")
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


def test_an_embedded_brokers_log_says_what_sigbus_means(
    open_broker: Callable[..., shmq.Broker], caplog: pytest.LogCaptureFixture
) -> None:
    broker = open_broker()
    dead = broker.supervisor_pid
    os.kill(dead, signal.SIGBUS)
    eventually(lambda: broker.supervisor_pid != dead and broker.supervisor_alive())
    assert "SIGBUS: somebody who may write a segment of it has cut that short" in caplog.text


# ---- what is put under a name ----


def plant_fifo(path: str) -> None:
    as_user(STRANGER, "mkfifo", "-m", "666", path)


def plant_link(path: str) -> None:
    as_user(STRANGER, "ln", "-s", "/etc/hostname", path)


def plant_directory(path: str) -> None:
    as_user(STRANGER, "mkdir", "-m", "777", path)


def plant_file(path: str) -> None:
    as_user(STRANGER, "sh", "-c", f"umask 0; head -c 100000 /dev/zero > {path}")


def plant_private_file(path: str) -> None:
    as_user(STRANGER, "sh", "-c", f"umask 077; echo hello > {path}")


def plant_socket(path: str) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(path)
    os.chown(path, STRANGER, STRANGER)


def plant_device(path: str) -> None:
    """Only root can, but a device would keep its reader waiting as a FIFO does."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(5, 0))
    except PermissionError:
        pytest.skip("no devices may be made here")
    os.chown(path, STRANGER, STRANGER)


KINDS = [
    plant_fifo,
    plant_link,
    plant_directory,
    plant_file,
    plant_private_file,
    plant_socket,
    plant_device,
]
#: One that blocks its opener and one that does not; the others are refused by the same lines.
FEW = (plant_fifo, plant_file)


@pytest.fixture(
    params=[
        pytest.param(
            plant,
            id=plant.__name__.removeprefix("plant_"),
            marks=[] if plant in FEW else [pytest.mark.deep],
        )
        for plant in KINDS
    ]
)
def plant(new_instance: object, request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    """`plant(path)`: a stranger's thing there; gone after the test."""
    planted: list[str] = []

    def put(path: str) -> None:
        request.param(path)
        planted.append(path)

    yield put
    for path in planted:
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        else:
            os.unlink(path)


def test_nobody_hangs_at_a_planted_directory_segment(
    plant: Callable[[str], None],
    instance: str,
    new_instance: Callable[[], str],
    data_path: Path,
    serve: Callable[..., Child],
) -> None:
    squatted = new_instance()
    path = shm.directory_path(squatted)
    plant(path)
    before = os.lstat(path)
    for words in (["stat"], ["pub", "t", "x"], ["peek", "t"], ["doctor", "--json"]):
        done = run(words[0], f"--instance={squatted}", *words[1:])
        assert "Traceback" not in done.stderr
        assert done.returncode in ((0, 3, 4) if words[0] == "doctor" else (1,)), (words, done)
        said = done.stdout if words[0] == "doctor" else done.stderr
        assert path in said
        assert f"uid {STRANGER}" in said
    serve()  # another instance, and then its data path for the squatted one
    (data_path.parent / "other").mkdir()
    done = run(
        "serve",
        f"--instance={squatted}",
        f"--data-path={data_path.parent / 'other'}",
        *processes.NO_GATEWAY,
    )
    assert done.returncode == 1
    assert path in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(shmq.ShmqError, match="uid 64301"):
        shmq.Broker(instance=squatted)
    assert run("doctor").returncode in (0, 3, 4)  # all instances
    shmq.attach(instance).close()
    after = os.lstat(path)
    assert (after.st_ino, after.st_mode, after.st_size) == (
        before.st_ino,
        before.st_mode,
        before.st_size,
    )


def test_a_planted_queue_segment_stops_nothing(
    plant: Callable[[str], None],
    instance: str,
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
) -> None:
    for serial in range(1, 4):
        plant(shm.path_of(shm.queue_name(instance, serial)))
    server = serve()
    with attach() as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish(b"x")
        message = broker.consumer("t", "c").take(10)
        assert message is not None
        assert bytes(message.body) == b"x"
    with sources.open_readonly(instance) as source:
        assert all(entry.serial > 3 for entry in source.directory.live_queues())
    done = run("doctor", f"--instance={instance}")
    assert f"owned by uid {STRANGER} and not by the broker's user (3 such)" in done.stdout
    server.process.terminate()
    assert server.wait() == 0, server.errors
    assert shm.list_objects(instance) == []
    assert len(shm.list_objects(instance, everybodys=True)) == 3
    again = serve()
    again.process.terminate()
    assert again.wait() == 0, again.errors


def test_a_planted_semaphore_is_refused_and_nothing_is_left(
    plant: Callable[[str], None], instance: str, data_path: Path
) -> None:
    path = shm.semaphore_path_of(shm.attach_semaphore_name(instance))
    plant(path)
    victim = os.stat("/etc/hostname")
    done = run(
        "serve",
        f"--instance={instance}",
        f"--data-path={data_path}",
        f"--group={GROUP}",
        *processes.NO_GATEWAY,
    )
    assert done.returncode == 1
    assert path in done.stderr
    assert f"uid {STRANGER}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not os.path.lexists(shm.directory_path(instance))
    now = os.stat("/etc/hostname")
    assert (now.st_gid, now.st_mode) == (victim.st_gid, victim.st_mode)
    assert os.lstat(path).st_uid == STRANGER
    assert run("doctor", f"--instance={instance}").returncode in (0, 3, 4)


def test_a_semaphore_planted_at_the_last_moment_gives_nothing_away(
    instance: str, tmp_path: Path
) -> None:
    """As if between the look at its name and the making."""
    secret = tmp_path / "secret"
    secret.write_text("")
    secret.chmod(0o600)
    path = shm.semaphore_path_of(shm.attach_semaphore_name(instance))
    as_user(STRANGER, "ln", "-s", secret, path)
    try:
        with pytest.raises(NotTrusted, match="a symbolic link"):
            shm.Permits.create(instance, 5, 0o660, GROUP)
    finally:
        os.unlink(path)
    status = secret.stat()
    assert (status.st_gid, stat.S_IMODE(status.st_mode)) == (0, 0o600)


def test_a_clients_semaphore_is_looked_at_too(serve: Callable[..., Child], instance: str) -> None:
    serve()
    path = shm.semaphore_path_of(shm.attach_semaphore_name(instance))
    content = Path(path).read_bytes()
    os.unlink(path)
    Path(path).write_bytes(content)
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(NotTrusted, match=f"{path} belongs to uid {STRANGER}"):
        shmq.attach(instance)


def test_a_spoilt_semaphore_of_ones_own_is_made_anew(
    serve: Callable[..., Child], instance: str
) -> None:
    server = serve(on_stop="keep")
    server.process.terminate()
    assert server.wait() == 0
    path = shm.semaphore_path_of(shm.attach_semaphore_name(instance))
    os.truncate(path, 0)
    serve()
    shmq.attach(instance).close()


# ---- the data path ----


def test_a_data_path_that_everybody_may_write_is_refused(instance: str, data_path: Path) -> None:
    data_path.chmod(0o777)
    done = run("serve", f"--instance={instance}", f"--data-path={data_path}", *processes.NO_GATEWAY)
    assert done.returncode == 1
    assert f"chmod o-w {data_path}" in done.stderr
    assert shm.list_objects(instance) == []


@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [
        (0o1777, 0, "every user of this host may put files into it"),
        (0o775, 0, "members of group"),
        (0o755, STRANGER, f"it belongs to uid {STRANGER}"),
    ],
)
def test_a_data_path_that_some_may_write_is_warned_of(
    serve: Callable[..., Child], data_path: Path, mode: int, owner: int, said: str
) -> None:
    os.chown(data_path, owner, STRANGER)
    data_path.chmod(mode)
    assert said in serve().errors
    assert said in run("doctor", f"--data-path={data_path}").stdout


def a_link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def a_fifo(path: Path, target: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [a_link, a_fifo])
def test_a_link_or_fifo_instead_of_a_data_file_is_not_written(
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    data_path: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], None],
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"untouched")
    server = serve()
    with attach() as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish_many([b"1", b"2"])
    planted = data_path / "t:c.diskqueue.000001.dat"
    make(planted, secret)
    server.process.terminate()
    assert server.wait() == 1, server.errors
    assert "takes only a regular file" in server.errors
    assert "the rest stays in shared memory" in server.errors
    assert secret.read_bytes() == b"untouched"
    planted.unlink(missing_ok=True)
    serve()
    with attach() as broker:
        assert sorted_bodies(broker, "t") == [b"1", b"2"]


@pytest.mark.parametrize("make", [a_link, a_fifo])
@pytest.mark.parametrize("name", ["nsqd.dat", "t:c.diskqueue.meta.dat"])
def test_a_link_or_fifo_instead_of_what_a_start_reads_is_refused(
    instance: str, data_path: Path, tmp_path: Path, make: Callable[[Path, Path], None], name: str
) -> None:
    target = tmp_path / "elsewhere"
    target.write_text('{"topics":[],"version":"1.3.0"}')
    make(data_path / name, target)
    (data_path / "t:c.diskqueue.000001.dat").write_bytes(b"\0\0\0\1x")
    done = run("serve", f"--instance={instance}", f"--data-path={data_path}", *processes.NO_GATEWAY)
    assert done.returncode == 1
    assert "takes only a regular file" in done.stderr
    assert "Traceback" not in done.stderr
    assert shm.list_objects(instance) == []
