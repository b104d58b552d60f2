"""Killed processes leave files in /dev/shm and elsewhere: who removes them, and who names them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.test_instances import run
from support.deliveries import take_all
from support.processes import Child, eventually, say, wait_ended
from support.processes import serve as serve_child

import shmq
from shmq import homes, procfs
from shmq.cli.status import DEGRADED, OK
from shmq.diagnostics.doctor import examine, mend
from shmq.staging_place import READS, StagingPlace, staged_paths

Serve = Callable[..., Child]

# ---- staged ----


def put(place: StagingPlace, *names: str) -> None:
    """Make files. A broker that starts meanwhile may remove the directory while it is empty, so the
    first one is of a living process."""
    while True:
        with contextlib.suppress(FileNotFoundError), place.open() as here:
            for name in names:
                os.close(here.append(name))
            return


def test_the_next_start_removes_what_is_staged_for_memory_that_is_gone(
    serve: Serve,
    instance: str,
    new_instance: Callable[[], str],
    tmp_path: Path,
    keep: Callable[[Any], Any],
) -> None:
    """Not what belongs to a living application: its rows, and notes of what it reads."""
    rows, notes = (
        StagingPlace(f"{instance}-gone{end}", lambda: (bytes(32), "memory")) for end in ("", READS)
    )
    with subprocess.Popen([sys.executable], stdin=subprocess.PIPE) as ended:
        mine, dead = (f"{pid}-{procfs.start_time(pid)}" for pid in (os.getpid(), ended.pid))
    own = StagingPlace(instance, lambda: (bytes(32), "memory"))
    put(rows, f"0a.2.{mine}.b.arrow", f"0a.1.{dead}.b.arrow")
    put(notes, f"c.{mine}", f"a.{dead}", "lock.1")
    with rows.open() as here, notes.open() as read:
        with own.open("gateway", "memory") as staged:
            os.close(staged.create("some.rows"))
        serve()
        eventually(lambda: not staged_paths(instance, os.geteuid()))
        eventually(lambda: here.names() == [f"0a.2.{mine}.b.arrow"])
        eventually(lambda: read.names() == [f"c.{mine}"])
        here.unlink(f"0a.2.{mine}.b.arrow")
        read.unlink(f"c.{mine}")
    (tmp_path / "other").mkdir()
    keep(serve_child(new_instance(), tmp_path / "other"))
    for end in ("", READS):
        eventually(lambda end=end: not staged_paths(f"{instance}-gone{end}", os.geteuid()))


def test_a_start_leaves_what_is_staged_for_an_instance_that_is_there(
    serve: Serve,
    instance: str,
    new_instance: Callable[[], str],
    tmp_path: Path,
    keep: Callable[[Any], Any],
) -> None:
    """Its supervisor was killed: the next one goes on with the rows of its memory."""
    serve().kill()
    place = StagingPlace(instance, lambda: (bytes(32), "memory"))
    with place.open("gateway", "memory") as here:
        os.close(here.create("some.rows"))
        (tmp_path / "other").mkdir()
        other = keep(serve_child(new_instance(), tmp_path / "other"))
        assert other.kill(signal.SIGTERM) == 0
        assert here.names() == ["some.rows"]


def test_notes_of_reads_from_many_instances_end_with_their_application_after_a_day(
    serve: Serve,
) -> None:
    """Nobody on this host knows whether the leases of a younger note live."""
    place = StagingPlace(READS, lambda: (bytes(32), "memory"))
    with subprocess.Popen([sys.executable], stdin=subprocess.PIPE) as ended:
        mine, dead = (f"{pid}-{procfs.start_time(pid)}" for pid in (os.getpid(), ended.pid))
    names = {f"old-{mine}.{dead}", f"young-{mine}.{dead}", f"old-{mine}.{mine}"}
    put(place, f"old-{mine}.{mine}", *names)
    with place.open() as here:
        for name in names:
            if name.startswith("old"):
                os.utime(here.path / name, (0, 0))
        serve()
        eventually(lambda: names & {*here.names()} == names - {f"old-{mine}.{dead}"})
        for name in names:
            here.unlink(name)


# ---- data paths of embedded brokers ----


def leave_in_memory(instance):
    broker = shmq.Broker(instance=instance, disk=False)
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"x")
    broker._server._stopping.set()  # so that its thread starts no other
    say(broker.data_path, broker.supervisor_pid)
    os.kill(broker.supervisor_pid, signal.SIGKILL)
    vanish()  # noqa: F821


def test_what_a_killed_broker_in_memory_left_is_named_with_what_removes_it(
    child: Callable[..., Child], instance: str
) -> None:
    """With its instance, and when that is gone."""
    runner = child(leave_in_memory, instance)
    runner.die()
    path, pid = runner.lines[0].split()
    wait_ended(int(pid))
    found = run("doctor", f"--instance={instance}")
    assert found.returncode == DEGRADED
    assert f"with 1 messages, files in {path}, where nothing is kept" in found.stdout
    assert f"shmq rm {instance}" in found.stdout
    assert "serve" not in found.stdout.partition("where nothing is kept")[2]
    kept = f"{path}-kept"
    shutil.copytree(path, kept)
    done = run("rm", "--yes", instance)
    assert done.returncode == OK, done.stderr
    assert done.stdout.rstrip().endswith(f"and {path}")
    assert not os.path.exists(path)
    os.rename(kept, path)  # as if it had been killed while it ended
    (line,) = (line for line in run("ls").stderr.splitlines() if path in line)
    assert line.endswith(f": shmq doctor --fix, or rm -r {path}")
    (finding,) = (item for item in examine() if path in item.text)
    with homes._locked(Path(path), fcntl.LOCK_EX):  # a supervisor has it
        assert mend(finding).level == "error"
        assert not [item for item in examine() if path in item.text]
    assert mend(finding).level == "fixed"
    assert not os.path.exists(path)


def leave_a_temporary_one(instance, messages):
    with shmq.Broker(instance=instance) as broker:
        broker.create_channel("t", "c")
        for _ in range(messages):
            broker.producer("t").publish(b"x")
        say(broker.data_path, broker.supervisor_pid)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_data_path_among_temporary_files_that_a_killed_broker_left_is_named(
    child: Callable[..., Child], instance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home directory cannot be written. The next broker of this kind removes one that holds
    nothing; `doctor` and `ls` say how to get the messages of another."""
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/state")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def left(messages: int) -> Path:
        runner = child(leave_a_temporary_one, instance, messages)
        runner.die()
        path, pid = runner.lines[0].split()
        wait_ended(int(pid))  # it has written everything down
        return Path(path)

    empty, full = left(0), left(3)
    assert empty.parent == full.parent == tmp_path
    assert not empty.exists()
    (finding,) = (item for item in examine() if str(full) in item.text)
    assert finding.fix is None
    line = next(line for line in run("ls").stderr.splitlines() if str(full) in line)
    assert finding.remedy in line
    with shmq.Broker(full, instance) as broker:
        bodies = take_all(broker, "t", "c").bodies
    assert bodies == [b"x"] * 3
    (finding,) = (item for item in examine() if str(full) in item.text)
    assert mend(finding).level == "fixed"
    assert not full.exists()
