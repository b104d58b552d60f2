"""A stranger creates names in /dev/shm before the broker does: he cannot guess those of queues, and
a great many of his files slow nothing down.

The stranger is another uid, so this needs root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.deliveries import sorted_bodies
from support.other_users import STRANGER, needed, run
from support.processes import NO_GATEWAY, Child

import shmq
from shmq import ownership, shm, sources
from shmq.diagnostics.doctor import examine
from shmq.diagnostics.instances import MOST_FOREIGN, everything, survey_all
from shmq.supervisor.registry import Topic

MANY = 60_000


@pytest.fixture
def squat(new_instance: object) -> Iterator[Callable[..., None]]:
    """`squat(code)`: run Python as the stranger; it prints the paths that it has created."""
    made: list[str] = []

    def plant(code: str) -> None:
        become = f"import os\nos.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})\n"
        make = (
            "def make(path):\n"
            "    try: os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o666))\n"
            "    except FileExistsError: return\n"
            "    print(path)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", become + make + code],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        made.extend(done.stdout.split())

    yield plant
    for path in made:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def serials(instance: str) -> list[int]:
    with sources.open_readonly(instance) as source:
        found = [entry.serial for entry in source.directory.live_queues()]
        found += [entry.serial for entry in source.directory.live_stores()]
    return sorted(found, key=shm.serial_number)


# ---- names ----


def test_serials_count_up_and_are_random_above(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker()
    for number in range(20):
        broker.create_channel("t", f"c{number}")
    broker.results("store")
    found = serials(broker.instance)
    assert [shm.serial_number(serial) for serial in found] == list(range(1, 22))
    assert len({serial >> 32 for serial in found}) > 15
    assert max(found) < 1 << 53  # what every reader of JSON has exactly
    first = found[0]
    broker.delete_channel("t", "c0")
    broker.create_channel("t", "c0")
    assert first not in serials(broker.instance)
    assert not Path(shm.path_of(shm.queue_name(broker.instance, first))).exists()


@needed
def test_names_of_queues_and_stores_cannot_be_taken_before(
    squat: Callable[[str], None],
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    instance: str,
) -> None:
    """Neither before the start nor while the broker runs, with what is to be seen of its names."""
    plain = f"/dev/shm/shmq.{instance}."
    squat(f"for n in range({MANY}): make({plain!r} + str(n))")
    serve()
    with attach() as broker:
        broker.create_channel("t", "a")
        broker.results("r1")
        mine = f"shmq.{instance}."
        squat(
            "for name in list(os.listdir('/dev/shm')):\n"
            f"    if name.startswith({mine!r}) and not os.stat('/dev/shm/' + name).st_uid:\n"
            "        serial = int(name.rpartition('.')[2])\n"
            f"        for n in range(serial + 1, serial + {MANY // 4}): make({plain!r} + str(n))\n"
        )
        for number in range(3):
            broker.create_channel("t", f"b{number}")
        broker.results("r2").set(b"key", b"value")
        broker.producer("t").publish(b"1")
        assert sorted_bodies(broker, "t", "b1") == [b"1"]
    assert len(serials(instance)) == 6


@needed
def test_a_start_makes_what_was_there_among_a_strangers_files(
    squat: Callable[[str], None],
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    instance: str,
) -> None:
    server = serve()
    with attach() as broker:
        for number in range(4):
            broker.create_channel("t", f"c{number}")
        broker.producer("t").publish(b"1")
    server.process.terminate()
    assert server.wait() == 0
    squat(f"for n in range({MANY}): make('/dev/shm/shmq.{instance}.' + str(n))")
    server = serve(on_stop="keep")
    with attach() as broker:
        assert sorted_bodies(broker, "t", "c3") == [b"1"]
    server.process.kill()
    server.wait()
    serve()  # adopts
    with attach() as broker:
        assert sorted_bodies(broker, "t", "c2") == [b"1"]


def test_a_set_aside_segment_finds_a_name(instance: str) -> None:
    path = shm.path_of(shm.queue_name(instance, 7))
    os.close(shm.create_queue(instance, 7, 0o600))
    os.mkdir(f"{path}.bad")
    try:
        bad = shm.set_aside_queue(instance, 7)
        assert bad != f"{path}.bad"
        assert shm.list_set_aside(instance) == sorted([bad, f"{path}.bad"])
        assert not os.path.lexists(path)
        os.unlink(bad)
    finally:
        os.rmdir(f"{path}.bad")


# ---- looking ----


@needed
def test_commands_look_at_a_strangers_files_without_opening_them(
    squat: Callable[[str], None],
    serve: Callable[..., Child],
    instance: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve()
    squat(
        f"for n in range({MANY}): make('/dev/shm/shmq.{instance}.' + str(n))\n"
        f"for n in range({MANY // 6}):\n"
        f"    make('/dev/shm/shmq.{instance}x' + str(n))\n"
        f"    make('/dev/shm/sem.shmq.{instance}y' + str(n) + '.attach')\n"
    )
    opened: list[str] = []
    open_owned = ownership.open_owned

    def counting(path: str, *words: object, **more: object) -> int:
        if instance in path:  # what other tests have in /dev/shm does not count
            opened.append(path)
        return open_owned(path, *words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ownership, "open_owned", counting)
    scans: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (scans.append(path), scandir(path))[1])
    found, more = survey_all()
    mine = next(item for item in found if item.name == instance)
    assert (mine.state, mine.uid) == ("running", 0)
    assert more > MANY // 4
    assert len(found) <= MOST_FOREIGN + 20
    list(examine())
    assert len(opened) < 1000
    assert len(scans) < 1000  # not one for each name
    assert instance in shm.list_instances()
    assert f"{instance}x1" not in shm.list_instances()
    done = run("ls", "--json")
    assert done.returncode == 0
    assert "are left out" in done.stderr
    done = run("doctor", f"--instance={instance}")
    assert f"owned by uid {STRANGER} and not by the broker's user ({MANY} such)" in done.stdout
    server.process.kill()
    server.wait()
    done = run("rm", "--yes", instance)
    assert done.returncode == 0, done.stderr
    assert shm.list_objects(instance) == []


@needed
def test_what_is_left_of_an_instance_of_ones_own_is_found_among_a_strangers_files(
    squat: Callable[[str], None], instance: str
) -> None:
    os.close(shm.create_queue(instance, 5, 0o600))
    squat(f"for n in range(5): make('/dev/shm/shmq.{instance}.' + str(n))")
    assert instance in everything()[0]
    (mine,) = (item for item in survey_all()[0] if item.name == instance)
    assert (mine.state, mine.uid, mine.objects) == ("orphaned", 0, 1)
    done = run("rm", "--yes", instance)
    assert done.returncode == 0, done.stderr
    assert shm.list_objects(instance) == []


@needed
def test_what_is_left_can_be_removed_although_a_stranger_has_the_directorys_name(
    squat: Callable[[str], None], instance: str
) -> None:
    os.close(shm.create_queue(instance, 5, 0o600))
    squat(f"make('/dev/shm/shmq.{instance}')")
    (mine,) = (item for item in survey_all()[0] if item.name == instance)
    assert (mine.state, mine.uid, mine.objects) == ("orphaned", 0, 1)
    done = run("rm", "--yes", instance)
    assert done.returncode == 0, done.stderr
    assert shm.list_objects(instance) == []


@needed
def test_the_remedy_for_a_taken_fixed_name_works_as_it_is_printed(
    squat: Callable[[str], None],
    serve: Callable[..., Child],
    instance: str,
    data_path: Path,
) -> None:
    for path in (
        shm.directory_path(instance),
        shm.semaphore_path_of(shm.attach_semaphore_name(instance)),
    ):
        squat(f"make({path!r})")
        done = run("serve", f"--instance={instance}", f"--data-path={data_path}", *NO_GATEWAY)
        assert done.returncode == 1
        remedy = done.stderr.strip().rpartition("remove the file: ")[2]
        assert remedy == f"rm -r {path}"
        subprocess.run(remedy, shell=True, check=True)
    server = serve()
    assert server.process.poll() is None


# ---- what the client learns ----


def test_the_reason_of_a_refusal_reaches_the_client(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], data_path: Path
) -> None:
    server = serve()
    with attach() as broker:
        broker.create_channel("t", "c")
        planted = data_path / "t:other.diskqueue.meta.dat"
        os.mkfifo(planted)
        said = r"refused it: it is a FIFO, and .* only a regular file .*; the supervisor's log"
        with pytest.raises(shmq.ShmqError, match=said) as caught:
            broker.create_channel("t", "other")
        assert not isinstance(caught.value, ValueError)
        planted.unlink()
        broker.create_channel("t", "other")
    assert "refused: " in server.errors


# ---- a dictionary that another thread changes ----


def test_the_channels_of_a_topic_can_be_walked_while_some_come_and_go() -> None:
    topic, walks = Topic(0, 0, "t"), 0
    for number in range(2000):
        topic.queues[str(number)] = None  # type: ignore[assignment]
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            for number in range(500):
                topic.queues[f"new {number}"] = None  # type: ignore[assignment]
            for number in range(500):
                del topic.queues[f"new {number}"]

    thread = threading.Thread(target=change)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for walks in range(300):  # noqa: B007 - it is how far the loop came
            assert len(topic.channels) >= 2000
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
    assert walks == 299
