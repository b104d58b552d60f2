"""An instance that a group of users shares."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.other_users import RUN
from support.processes import Child, eventually, python_child, say

import shmq
from shmq import shm, sources

SUPERVISOR, CLIENT, STRANGER = 64001, 64002, 64003  # made up: ids need no accounts
GROUP, OWN = 64100, 64200

need_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@pytest.fixture
def foreign_path() -> Iterator[Path]:
    """A data path of the supervisor's user, in directories that everybody may enter."""
    path = Path(tempfile.mkdtemp(prefix="shmq-test-", dir="/tmp"))
    os.chown(path, SUPERVISOR, OWN)
    yield path
    shutil.rmtree(path)


def become(uid: int, *groups: int) -> str:
    """Python that makes its process another user's. The code it will need may lie where that user
    cannot read, so it is imported before."""
    return (
        "import importlib, pkgutil, psutil, shmq.cli, shmq.supervisor.supervisor\n"
        "for found in pkgutil.iter_modules(shmq.cli.__path__, 'shmq.cli.'):\n"
        "    importlib.import_module(found.name)\n"
        "import numpy.linalg, concurrent.futures.thread, encodings.idna\n"
        f"os.setgroups({list(groups)}); os.setgid({OWN}); os.setuid({uid})\n"
    )


@pytest.fixture
def group_service(
    instance: str,
    foreign_path: Path,
    keep: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Child]:
    """`shmq serve` as the supervisor's user, whom this process and its children trust; returns when
    it answers or has ended."""
    monkeypatch.setenv("SHMQ_OWNER", str(SUPERVISOR))

    def start(
        *words: str, groups: tuple[int, ...] = (GROUP,), command: tuple[str, ...] = ()
    ) -> Child:
        code = f"import os, sys\nos.umask(0o077)\n{become(SUPERVISOR, *groups)}{RUN}"
        argv = [*command, sys.executable, "-c", code, "serve", f"--instance={instance}"]
        argv += [f"--data-path={foreign_path}", *processes.NO_GATEWAY]
        server: Child = keep(Child([*argv, *words]))
        eventually(
            lambda: processes.answers(instance, server.pid) or server.process.poll() is not None
        )
        return server

    return start


@pytest.fixture
def person(child: object, keep: Callable[[Any], Any]) -> Callable[..., Child]:
    """`person(uid, groups, function, *args)`: as `child`, but another user."""

    def start(uid: int, groups: tuple[int, ...], function: Callable[..., Any], *args: Any) -> Child:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "PRELUDE", f"{processes.PRELUDE}\n{become(uid, *groups)}")
            made: Child = keep(python_child(function, *args))
            return made

    return start


def use_everything(instance: str, data_path: str) -> None:
    broker = shmq.attach(instance)
    broker.create_channel("mine", "c")
    producer = broker.producer("mine")
    producer.publish_many([b"%d" % number for number in range(10)])
    consumer = broker.consumer("mine", "c")
    batch = consumer.take_many(10, timeout=10)
    assert batch.bodies() == [b"%d" % number for number in range(10)]
    batch.finish()
    broker.pause_channel("mine", "c")
    broker.unpause_channel("mine", "c")
    assert broker.stats().topics[0].name == "mine"
    try:
        os.listdir(data_path)
    except PermissionError:
        say("data path closed")
    broker.delete_channel("mine", "c")
    broker.close()
    say("done")


@need_root
def test_two_users_of_a_group_work_together(
    group_service: Callable[..., Child],
    person: Callable[..., Child],
    instance: str,
    foreign_path: Path,
) -> None:
    server = group_service(f"--group={GROUP}")
    assert server.process.poll() is None, server.errors
    other = person(CLIENT, (GROUP,), use_everything, instance, str(foreign_path))
    other.said("data path closed")
    other.said("done")
    assert other.wait() == 0
    made = person(CLIENT, (GROUP,), publish_to_a_new_topic, instance)
    assert made.wait() == 0, made.errors

    objects = shm.list_objects(instance, everybodys=True)
    assert {item.kind for item in objects} == {"directory", "history", "queue", "semaphore"}
    for item in objects:
        path = shm.path_of(item.name)
        if item.kind == "semaphore":
            path = shm.semaphore_path_of(item.name)
        status = os.stat(path)
        owner = (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode))
        mode = 0o640 if item.kind == "history" else 0o660  # the supervisor alone writes it
        assert owner == (SUPERVISOR, GROUP, mode), path

    server.process.terminate()
    assert server.wait() == 0
    for path in [foreign_path, *foreign_path.iterdir()]:
        assert os.stat(path).st_uid == SUPERVISOR
        assert os.stat(path).st_mode & 0o077 == 0, f"{path} is the supervisor's alone"


def publish_to_a_new_topic(instance: str) -> None:
    with shmq.attach(instance) as broker:
        broker.create_channel("later", "c")
        broker.producer("later").publish(b"x")


def take_and_hold(instance: str, end: str) -> None:
    consumer = shmq.attach(instance).consumer("t", "c", msg_timeout=None)
    message = consumer.take(timeout=30)
    say("holds", message.attempts)
    sys.stdin.readline()
    if end == "exec":
        os.execv("/bin/sleep", ["sleep", "3600"])
    vanish()  # noqa: F821 - of PRELUDE


@need_root
@pytest.mark.parametrize("end", ["killed", "exec"])
def test_what_another_users_client_held_comes_back_at_once(
    end: str, group_service: Callable[..., Child], person: Callable[..., Child], instance: str
) -> None:
    server = group_service(f"--group={GROUP}")
    broker = person(CLIENT, (GROUP,), publish_one, instance)
    assert broker.wait() == 0, broker.errors
    holder = person(CLIENT, (GROUP,), take_and_hold, instance, end)
    holder.said("holds 1")
    eventually(lambda: clients(instance) == 2, what="supervisor and holder are attached")
    time.sleep(0.3)  # the reaper looks for new clients every 100 ms
    next_one = person(STRANGER, (GROUP,), take_and_hold, instance, "killed")
    holder.tell("")
    next_one.said("holds 2")
    eventually(lambda: "1 messages returned" in server.errors)
    what = "became another program (exec)" if end == "exec" else "died"
    assert re.search(
        rf"client \d+ \(pid {holder.pid}.*\) ({re.escape(what)}|exited)", server.errors
    )


def publish_one(instance: str) -> None:
    with shmq.attach(instance) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish(b"x")


def clients(instance: str) -> int:
    return int((sources.open_readonly(instance).directory.clients["state"] != 0).sum())


def refused(instance: str, timeout: float) -> None:
    try:
        shmq.attach(instance, timeout=timeout)
    except shmq.ShmqError as exc:
        say(type(exc).__name__, exc)


@need_root
def test_a_third_user_is_refused_with_the_remedy(
    group_service: Callable[..., Child], person: Callable[..., Child], instance: str
) -> None:
    group_service(f"--group={GROUP}")
    line = person(STRANGER, (), refused, instance, 10.0).said("ShmqError")
    assert f"run as a member of group {GROUP}" in line
    assert f"uid {STRANGER}" in line


@need_root
def test_a_private_instance_says_how_to_share_it(
    group_service: Callable[..., Child], person: Callable[..., Child], instance: str
) -> None:
    group_service()
    line = person(CLIENT, (GROUP,), refused, instance, 0).said("ShmqError")
    assert "start the supervisor with --group" in line


@need_root
def test_a_supervisor_outside_of_the_group_says_so(
    group_service: Callable[..., Child], instance: str
) -> None:
    server = group_service(f"--group={GROUP}", groups=())
    assert server.wait() == 1
    assert f"cannot give it to group {GROUP}: this user (uid {SUPERVISOR}) is no member" in (
        server.errors
    )
    assert shm.list_objects(instance, everybodys=True) == []


def attach_early(instance: str) -> None:
    say("ready")
    shmq.attach(instance, timeout=30).close()
    say("attached")


@need_root
def test_a_client_that_waits_for_the_instance_is_not_refused_while_it_is_made(
    group_service: Callable[..., Child], person: Callable[..., Child], instance: str
) -> None:
    early = [person(CLIENT, (GROUP,), attach_early, instance) for _ in range(2)]
    for one in early:
        one.said("ready")
    group_service(f"--group={GROUP}")
    for one in early:
        one.said("attached")


HIDE = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t proc -o hidepid=2 proc /proc && exec "$@"',
    "sh",
)


@need_root
def test_a_proc_that_hides_other_users_makes_nobody_look_dead(
    group_service: Callable[..., Child], person: Callable[..., Child], instance: str
) -> None:
    if subprocess.run([*HIDE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no proc file system can be mounted here")
    server = group_service(f"--group={GROUP}", command=HIDE)
    made = person(CLIENT, (GROUP,), publish_one, instance)
    assert made.wait() == 0, made.errors
    holder = person(CLIENT, (GROUP,), take_and_hold, instance, "killed")
    holder.said("holds 1")
    time.sleep(0.5)  # the reaper looks at it some times
    assert clients(instance) == 2
    assert "returned" not in server.errors.replace("0 messages returned", "")
    holder.tell("")
    eventually(lambda: "1 messages returned" in server.errors)
