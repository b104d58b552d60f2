"""`shmq ls` and `shmq rm`, and what doctor says of instances that were left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.test_no_room import mounted
from support.processes import HELPERS, NO_GATEWAY, Child, eventually, wait_ended
from support.processes import serve as serve_child

import shmq
from shmq import procfs, shm, sources
from shmq.cli.status import DEGRADED, ERROR, NOT_RUNNING, OK, USAGE
from shmq.diagnostics import removal
from shmq.diagnostics.doctor import examine
from shmq.staging_place import READS, StagingPlace, staged_paths

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`shmq WORDS` to its end."""
    argv = [sys.executable, "-m", "shmq", *words]
    environment = {**os.environ, **env}
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def listed(instance: str) -> dict[str, Any] | None:
    """The object of `shmq ls --json` for an instance."""
    done = run("ls", "--json")
    assert done.returncode == OK, done.stderr
    found = {item["instance"]: item for item in map(json.loads, done.stdout.splitlines())}
    return found.get(instance)


@pytest.fixture
def dead(serve: Serve, attach: Attach, instance: str) -> Path:
    """A killed instance with three messages, one of them in flight; its directory segment."""
    server = serve()
    with shmq.attach(instance) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish_many([b"1", b"2"])
        broker.producer("t").publish(b"3", defer=600)
    server.kill()
    return Path(shm.directory_path(instance))


def test_instances_are_listed_as_they_are(
    serve: Serve, instance: str, data_path: Path, new_instance: Callable[[], str]
) -> None:
    assert listed(instance) is None
    server = serve()
    with shmq.attach(instance) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish_many([b"1", b"2", b"3"])

    def committed() -> int:
        return sum(os.stat(item.path).st_blocks * 512 for item in shm.list_objects(instance))

    before = committed()
    found = listed(instance)
    assert found is not None
    assert before <= found.pop("shm_bytes") <= committed()  # the history grows
    assert found == {
        "v": 1,
        "instance": instance,
        "state": "running",
        "uid": os.getuid(),
        "user": found["user"],
        "pid": server.pid,
        "data_path": str(data_path),
        "queue_count": 1,
        "message_count": 3,
        "in_memory_count": 3,
    }
    server.kill()
    found = listed(instance)
    assert found is not None
    assert (found["state"], found["message_count"]) == ("dead", 3)
    rest = new_instance()
    os.close(shm.create_directory(rest, 0o600))
    found = listed(rest)
    assert found is not None
    assert (found["state"], found["message_count"]) == ("leftover", None)
    orphan = new_instance()
    os.close(shm.create_queue(orphan, 3, 0o600))
    found = listed(orphan)
    assert found is not None
    assert found["state"] == "orphaned"
    table = run("ls").stdout
    assert re.search(rf"^{instance} +dead .* 3 .* {re.escape(str(data_path))}$", table, re.M)
    for name in (rest, orphan):  # nothing can be lost with these
        assert run("rm", name).returncode == OK
        assert listed(name) is None


def test_what_another_put_under_a_name_hangs_nobody(new_instance: Callable[[], str]) -> None:
    instance = new_instance()
    path = shm.directory_path(instance)
    os.mkfifo(path)
    try:
        found = listed(instance)
        assert found is not None
        assert found["state"] == "other"
        refused = run("rm", "--yes", instance)
        assert refused.returncode == ERROR
        assert "no shared memory" in refused.stderr
        assert run("doctor", f"--instance={instance}").returncode == DEGRADED
    finally:
        os.unlink(path)


def list_without_a_name(names, paths):
    import subprocess
    from pathlib import Path

    from support.processes import serve

    servers = [serve(name, Path(path)) for name, path in zip(names, paths, strict=True)]
    done = subprocess.run(
        [sys.executable, "-m", "shmq", "stat"], capture_output=True, text=True, check=False
    )
    say(done.returncode, json.dumps(done.stdout.splitlines()), json.dumps(done.stderr))  # noqa: F821
    done = subprocess.run(
        [sys.executable, "-m", "shmq", "stat", "--instance=default"],
        capture_output=True,
        text=True,
        check=False,
    )
    say(done.returncode, json.dumps(done.stdout.splitlines()), json.dumps(done.stderr))  # noqa: F821
    for server in servers:
        server.kill(signal.SIGTERM)
        server.close()


def test_stat_without_a_name_lists_what_there_is(
    child: Callable[..., Child], new_instance: Callable[[], str], tmp_path: Path
) -> None:
    names = sorted([new_instance(), new_instance()])
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    env = HELPERS
    runner = child(
        list_without_a_name, names, [*map(str, paths)], before=mounted("/dev/shm", "64m"), env=env
    )
    without, named = runner.succeed(watchdog=60)
    status, _, text = without.partition(" ")
    assert status == str(NOT_RUNNING)
    for name, path in zip(names, paths, strict=True):
        assert re.search(rf'"{name} +running [^"]*{path}"', text)
    assert "no instance 'default'" in text
    assert named.startswith(f"{NOT_RUNNING} []")


def test_an_instance_that_runs_or_is_used_is_not_removed(
    serve: Serve, instance: str, attach: Attach
) -> None:
    server = serve()
    refused = run("rm", "--yes", instance)
    assert refused.returncode == ERROR
    assert f"is running (pid {server.pid})" in refused.stderr
    broker = attach()
    broker.create_topic("t")
    server.kill()
    refused = run("rm", "--yes", instance)
    assert refused.returncode == ERROR
    assert "a process uses it" in refused.stderr
    broker.producer("t")  # it still can
    broker.close()


def test_a_dead_instance_is_removed_when_its_messages_may_be_lost(
    dead: Path, instance: str, data_path: Path
) -> None:
    refused = run("rm", instance)
    assert refused.returncode == USAGE
    assert "holds 3 messages in memory" in refused.stderr
    assert f"`shmq serve --drain --instance {instance}`" in refused.stderr
    assert dead.exists()
    done = run("rm", "--yes", "--json", instance)
    assert done.returncode == OK, done.stderr
    document = json.loads(done.stdout)
    assert document["removed"] == 4
    assert document["data_path_removed"] is False
    assert not shm.list_objects(instance)
    assert (data_path / "nsqd.dat").exists()
    assert run("rm", instance).returncode == NOT_RUNNING


def test_staged_rows_are_removed_with_their_instance_and_after_it(
    dead: Path, instance: str
) -> None:
    place = StagingPlace(instance, lambda: (bytes(32), "memory"))
    for _ in range(2):  # the second time nothing else is left
        with place.open("gateway", "memory") as here:
            os.close(here.create("some.rows"))
        told = [item for item in examine() if "were staged for" in item.text]
        assert (instance in {item.instance for item in told}) == (not shm.list_objects(instance))
        done = run("rm", "--yes", instance)
        assert done.returncode == OK, done.stderr
        assert "removed 1 file of rows that were staged and not committed" in done.stdout
        assert not staged_paths(instance, os.geteuid())
    assert run("rm", instance).returncode == NOT_RUNNING


def test_what_dead_applications_staged_ends_with_the_instance_or_after_it(
    serve: Serve, instance: str
) -> None:
    """Not what a living one staged, nor what a manifest may name: somebody may finish that."""
    place = StagingPlace(instance, lambda: (bytes(32), "memory"))
    gone = StagingPlace(instance + "-gone", lambda: (bytes(32), "other memory"))
    with subprocess.Popen([sys.executable], stdin=subprocess.PIPE) as ended:
        mine, dead = (f"{pid}-{procfs.start_time(pid)}" for pid in (os.getpid(), ended.pid))
    # another broker may remove it while it is empty
    with gone.open() as here, contextlib.suppress(FileNotFoundError):
        os.close(here.create(f"0a.1.{dead}.b.arrow"))
    server = serve()
    with place.open() as here:
        kept = {f"0a.2.{mine}.b.arrow", f"0a.3.{dead}.b.arrow", "0a.3.manifest", "strange"}
        for name in {f"0a.1.{dead}.b.arrow", *kept}:
            os.close(here.create(name))
        server.kill(signal.SIGTERM)
        assert set(here.names()) == kept
        for name in kept:
            here.unlink(name)
    (left,) = staged_paths(instance, os.geteuid())
    os.rmdir(left)
    # where another broker of this user starts or ends meanwhile, that one may remove it
    eventually(lambda: not staged_paths(instance + "-gone", os.geteuid()))


def test_notes_of_reads_end_with_their_application_and_instance(
    serve: Serve, instance: str
) -> None:
    """Doctor calls none of them left over while the instance lives. At its end only the notes of an
    application that lives stay: they say that what it has read is lost."""
    place = StagingPlace(instance + READS, lambda: (bytes(32), "memory"))
    gone = StagingPlace(instance + "-gone" + READS, lambda: (bytes(32), "other memory"))
    with gone.open() as here, contextlib.suppress(FileNotFoundError):
        os.close(here.append("lock.1"))

    def doubted() -> bool:
        return any(item.instance == instance and READS in item.text for item in examine())

    server = serve()
    with subprocess.Popen([sys.executable], stdin=subprocess.PIPE) as ended:
        mine, dead = (f"{pid}-{procfs.start_time(pid)}" for pid in (os.getpid(), ended.pid))
    with place.open() as here:
        names = {f"a.{dead}": {}, "b.0-0": {"above": [dead]}, "read.x.1": {}, "lock.1": {}}
        kept = {
            f"c.{mine}": {},
            "d.0-0": {"above": [mine]},
            "read.x.2": {},
            "strange": {},
            "e.0-0": {},
        }
        for name, words in (names | kept).items():
            with open(here.create(name), "w") as file:
                json.dump(words, file)
        locked = here.append("read.x.2")
        fcntl.flock(locked, fcntl.LOCK_SH)  # a task reads
        assert not doubted()
        server.kill(signal.SIGTERM)
        assert set(here.names()) == set(kept)
        assert not staged_paths(instance + "-gone" + READS, os.geteuid())
        assert doubted()
        os.close(locked)
        for name in kept.keys() - {"read.x.2"}:
            here.unlink(name)
    serve().kill(signal.SIGTERM)
    assert not staged_paths(instance + READS, os.geteuid())
    assert not doubted()


# ---- embedded ----


def leave(instance, state, messages):
    os.environ["XDG_STATE_HOME"] = state
    broker = shmq.Broker(instance=instance)
    broker.create_channel("t", "c")
    for _ in range(messages):
        broker.producer("t").publish(b"x")
    broker._server._stopping.set()  # so that its thread starts no other
    say(broker.data_path, broker.supervisor_pid)  # noqa: F821
    os.kill(broker.supervisor_pid, signal.SIGKILL)
    vanish()  # noqa: F821


@pytest.fixture
def embedded(
    child: Callable[..., Child], instance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Path]:
    """`embedded(messages)`: leave a killed embedded broker; the directory it made for itself."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def left(messages: int) -> Path:
        runner = child(leave, instance, str(tmp_path), messages)
        runner.die()
        path, pid = runner.lines[0].split()
        wait_ended(int(pid))
        return Path(path)

    return left


def test_an_embedded_broker_is_removed_with_the_directory_it_made(
    embedded: Callable[[int], Path], instance: str
) -> None:
    path = embedded(2)
    refused = run("rm", instance)
    assert refused.returncode == USAGE
    assert "holds 2 messages (" in refused.stderr
    done = run("rm", "--yes", instance)
    assert done.returncode == OK, done.stderr
    assert done.stdout.rstrip().endswith(f"and {path}")
    assert not path.exists()
    assert not shm.list_objects(instance)


def test_doctor_removes_an_embedded_broker_only_if_it_holds_nothing(
    embedded: Callable[[int], Path], instance: str
) -> None:
    path = embedded(0)
    found = run("doctor", f"--instance={instance}")
    assert found.returncode == DEGRADED
    assert f"with 0 messages, files in {path}" in found.stdout
    fixed = run("doctor", "--fix", "--yes", f"--instance={instance}")
    assert f"removed 4 objects and {path}" in fixed.stdout
    assert not path.exists()
    assert not shm.list_objects(instance)
    path = embedded(1)
    kept = run("doctor", "--fix", "--yes", f"--instance={instance}")
    assert kept.returncode == DEGRADED
    assert path.exists()
    remedy = re.search(r"to disk: (shmq serve --drain --instance \S+);", kept.stdout)
    assert remedy is not None
    words = remedy[1].split()[1:]
    assert run(*words).returncode == OK  # as it is pasted, from anywhere
    assert not shm.list_objects(instance)
    assert list(path.glob("t:c.diskqueue.*.dat"))


def test_a_name_from_shared_memory_removes_nothing_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    own = tmp_path / "shmq" / "x-abcdefgh"
    own.mkdir(parents=True)
    for name in ("nsqd.dat", "t:c.diskqueue.000000.dat", "t.deferred.000001.dat", "a.tmp"):
        (own / name).touch()
    (own / "precious").touch()
    uid = os.getuid()
    assert removal.own_directory("x", str(own), uid) == str(own)
    assert removal.own_directory("y", str(own), uid) is None
    assert removal.own_directory("x", str(own), uid + 1) is None
    assert removal.own_directory("x", str(tmp_path), uid) is None
    assert not removal.is_own_path("/var/lib/shmq/x", "x", uid)  # a service's
    assert not removal.is_own_path("/var/lib/shmq/x-abcdefgh", "x", uid)
    assert removal.is_own_path(f"{tmp_path}/shmq/x", "x", uid)
    assert not removal.is_own_path(f"{tmp_path}/shmq/../x", "x", uid)
    assert not removal.remove_own_directory(str(own), uid + 1)
    assert len(list(own.iterdir())) == 5
    assert not removal.remove_own_directory(str(own), uid)
    assert [path.name for path in own.iterdir()] == ["precious"]
    (own / "precious").unlink()
    assert removal.remove_own_directory(str(own), uid)
    assert not own.exists()


# ---- doctor ----


def test_doctor_of_an_instance_that_does_not_run_is_status_3(instance: str) -> None:
    done = run("doctor", f"--instance={instance}")
    assert done.returncode == NOT_RUNNING
    assert "not running" in done.stdout


def test_the_remedy_for_a_data_path_that_was_removed_is_a_command(
    serve: Serve, instance: str, data_path: Path
) -> None:
    serve()
    shutil.rmtree(data_path)
    found = run("doctor", f"--instance={instance}", "--json")
    assert found.returncode == DEGRADED
    (remedy,) = (
        item["remedy"]
        for item in map(json.loads, found.stdout.splitlines())
        if item["check"] == "data path"
    )
    assert "(deleted)" not in found.stdout
    subprocess.run(remedy, shell=True, check=True)
    assert data_path.is_dir()


def test_the_remedy_for_a_dead_supervisor_starts_it_where_its_files_are(
    dead: Path, instance: str, data_path: Path, keep: Callable[[Any], Any]
) -> None:
    found = run("doctor", f"--instance={instance}")
    remedy = re.search(r"start it again: (shmq serve [^;]*);", found.stdout)
    assert remedy is not None
    assert f"--data-path {data_path}" in remedy[1]
    argv = [sys.executable, "-m", *remedy[1].split(), *NO_GATEWAY]
    server = keep(Child(argv))
    eventually(lambda: sources.supervisor_alive(sources.open_readonly(instance).directory))
    assert server.kill(signal.SIGTERM) == 0


# ---- the shell's completion ----


def completed(*words: str, incomplete: str = "") -> list[str]:
    """The completions that bash would offer after these words."""
    line = ["shmq", *words, incomplete]
    done = run(
        _SHMQ_COMPLETE="bash_complete", COMP_WORDS=" ".join(line), COMP_CWORD=str(len(line) - 1)
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.split()]


def test_names_of_instances_topics_and_channels_are_completed(
    serve: Serve, instance: str, data_path: Path, tmp_path: Path, new_instance: Callable[[], str]
) -> None:
    serve()
    with shmq.attach(instance) as broker:
        for topic, channel in (("jobs", "small"), ("jobs", "large"), ("mail", "out")):
            broker.create_channel(topic, channel)
    where = ("--instance", instance)
    assert completed("stat", "--instance", incomplete=instance[:-1]) == [instance]
    assert completed("rm", incomplete=instance) == [instance]
    assert completed("peek", *where) == ["jobs", "mail"]
    assert completed("peek", *where, "jobs") == ["large", "small"]
    assert completed("channel", "pause", *where, "jobs", incomplete="s") == ["small"]
    assert completed("stat", *where, "--topic", incomplete="m") == ["mail"]
    assert completed("pub", *where, incomplete="j") == ["jobs"]
    fifo = new_instance()
    path = shm.directory_path(fifo)
    os.mkfifo(path)
    try:
        assert completed("peek", "--instance", fifo) == []
    finally:
        os.unlink(path)
    assert completed("peek", "--instance", "nothing/like it") == []
    other = new_instance()
    server = serve_child(other, tmp_path)  # without a topic
    assert completed("peek", "--instance", other) == []
    server.kill(signal.SIGTERM)
    server.close()
