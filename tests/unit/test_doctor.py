"""shmq doctor: each check on a made-up host, and removal of what is provably dead."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_segments import FakeDirectory, FakeQueue
from support.processes import WATCHDOG

import shmq
from shmq import procfs, shm
from shmq.diagnostics import host, instance_checks, instances, removal
from shmq.diagnostics.container import check_container, memory_limit
from shmq.diagnostics.findings import Finding
from shmq.diagnostics.segment import boot_id
from shmq.errors import ShmqError
from shmq.layout import Ready

# ---- the host ----


def levels(findings: list[Finding]) -> set[str]:
    return {finding.level for finding in findings}


def problems(findings: list[Finding]) -> str:
    """Their texts; every one has a remedy."""
    found = [finding for finding in findings if finding.level == "problem"]
    assert all(finding.remedy for finding in found)
    return " | ".join(finding.text for finding in found)


@pytest.fixture
def systemd(tmp_path: Path) -> Path:
    """A root on which systemd runs."""
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    for folder in ("etc", "run", "usr/lib"):
        (tmp_path / folder / "systemd/logind.conf.d").mkdir(parents=True)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).write_text(text)


def test_remove_ipc_is_systemds_default(systemd: Path) -> None:
    assert host.remove_ipc(systemd) == (True, "systemd's default")
    write(systemd, "etc/systemd/logind.conf", "[Login]\n#RemoveIPC=no\n")
    assert host.remove_ipc(systemd) == (False, "systemd's default")  # what it was built with
    write(systemd, "etc/systemd/logind.conf", "[Login]\nRemoveIPC = yes\n[Other]\nRemoveIPC=no\n")
    assert host.remove_ipc(systemd) == (True, "/etc/systemd/logind.conf")


def test_remove_ipc_of_drop_ins_comes_last_and_by_name(systemd: Path) -> None:
    write(systemd, "etc/systemd/logind.conf", "[Login]\nRemoveIPC=yes\n")
    write(systemd, "usr/lib/systemd/logind.conf.d/50-x.conf", "[Login]\nRemoveIPC=no\n")
    assert host.remove_ipc(systemd)[0] is False
    write(systemd, "run/systemd/logind.conf.d/60-y.conf", "[Login]\nRemoveIPC=on\n")
    assert host.remove_ipc(systemd) == (True, "/run/systemd/logind.conf.d/60-y.conf")
    write(systemd, "etc/systemd/logind.conf.d/60-y.conf", "[Login]\n# RemoveIPC=on\n")  # masks it
    assert host.remove_ipc(systemd)[0] is False
    write(systemd, "etc/systemd/logind.conf.d/70-z.conf", "[Login]\nRemoveIPC=\n")
    assert host.remove_ipc(systemd) == (True, "systemd's default")


def test_remove_ipc_spares_system_users_and_who_lingers(systemd: Path, tmp_path: Path) -> None:
    def check(*uids: int) -> list[Finding]:
        return list(host.check_remove_ipc(uids, systemd))

    assert levels(check(0, 999)) == {"ok"}
    assert "uid 12345 " in problems(check(0, 12345))
    (systemd / "etc/login.defs").write_text("SYS_UID_MAX 20000\n")
    assert levels(check(0, 12345)) == {"ok"}
    (systemd / "etc/systemd/logind.conf").write_text("[Login]\nRemoveIPC=no\n")
    assert levels(check(54321)) == {"ok"}
    assert levels(list(host.check_remove_ipc([54321], tmp_path / "nothing"))) == {"ok"}


def test_shared_memory_that_is_missing_full_or_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert levels(list(host.check_shared_memory())) <= {"ok", "problem"}
    assert "No such file" in problems(list(host.check_shared_memory(str(tmp_path / "shm"))))

    def check(kind: str, options: dict[str, str], blocks: int, free: int, **more: int) -> str:
        values = [
            4096,
            4096,
            blocks,
            free,
            free,
            10**6,
            10**6,
            more.get("inodes", 10**6),
            more.get("flags", 0),
            255,
        ]
        with monkeypatch.context() as patch:
            patch.setattr(host, "_mount_of", lambda directory: (kind, options))
            patch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
            patch.setattr(os, "access", lambda *args, **how: True)
            return problems(list(host.check_shared_memory(str(tmp_path))))

    gib = (1 << 30) // 4096
    assert check("tmpfs", {}, gib, gib) == ""
    assert "64.0 MiB" in check("tmpfs", {}, 1 << 14, 1 << 14)  # docker's default
    assert "free" in check("tmpfs", {}, gib, 10)
    assert "not a tmpfs" in check("overlay", {}, gib, gib)
    assert "read-only" in check("tmpfs", {}, gib, gib, flags=os.ST_RDONLY)
    assert "inodes" in check("tmpfs", {}, gib, gib, inodes=5)
    assert "huge=always" in check("tmpfs", {"huge": "always"}, gib, gib)
    tmp_path.chmod(0o777)
    assert "not sticky" in check("tmpfs", {}, gib, gib)


def test_kernels() -> None:
    assert levels(list(host.check_kernel())) <= {"ok", "problem"}
    assert levels(list(host.check_kernel("5.14.0-1"))) == {"ok"}
    assert "5.10.0" in problems(list(host.check_kernel("5.10.0")))


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    low = {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_NOFILE: 256, resource.RLIMIT_FSIZE: 1 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (low[which], low[which]))
    text = problems(list(host.check_limits()))
    assert all(name in text for name in ("RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_FSIZE"))
    raised = low | {resource.RLIMIT_NOFILE: 65536}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, raised[which]))
    assert "RLIMIT_NOFILE" not in problems(list(host.check_limits())), "serve raises it"
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: infinite)
    assert levels(list(host.check_limits())) == {"ok"}


def test_memory_settings(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8 kB\nCommitLimit:  1000000 kB\nCommitted_AS: 999000 kB\n")
    (tmp_path / "max_map_count").write_text("65530\n")
    (tmp_path / "overcommit_memory").write_text("0\n")
    assert levels(list(host.check_memory(tmp_path, meminfo))) == {"ok"}
    (tmp_path / "overcommit_memory").write_text("2\n")
    (tmp_path / "max_map_count").write_text("1000\n")
    text = problems(list(host.check_memory(tmp_path, meminfo)))
    assert "max_map_count is 1000" in text
    assert "overcommit_memory is 2" in text


def test_a_data_path_without_inodes_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = os.statvfs(tmp_path)
    values = [*room[:5], 10_000, 3, 3, *room[8:]]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    assert "has only 3 inodes left" in problems(list(host.check_data_path(tmp_path, None)))


def test_data_paths(tmp_path: Path) -> None:
    (fine,) = host.check_data_path(tmp_path, None)
    assert (fine.level, "not in use" in fine.text) == ("ok", True)
    assert "No such file" in problems(list(host.check_data_path(tmp_path / "nothing", None)))
    file = tmp_path / "t.diskqueue.000003.dat.bad"
    file.write_bytes(b"")
    assert "t.diskqueue.000003.dat.bad" in problems(list(host.check_data_path(tmp_path, None)))
    assert "not a directory" in problems(list(host.check_data_path(file, None)))
    file.unlink()
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        (mine,) = host.check_data_path(tmp_path, os.getpid())
        assert f"locked by pid {os.getpid()}" in mine.text
        assert "not by its supervisor" in problems(list(host.check_data_path(tmp_path, 1)))
        assert host.data_path_of(os.getpid()) == tmp_path
    finally:
        os.close(fd)


# ---- instances ----


@pytest.fixture
def put(instance: str) -> Callable[..., Path]:
    """`put(bytes, serial=None)`: an object of this instance in /dev/shm; removed at the end."""

    def make(data: bytes, serial: int | None = None) -> Path:
        name = shm.directory_name(instance)
        path = Path(shm.path_of(name if serial is None else f"{name}.{serial}"))
        path.write_bytes(data)
        path.chmod(0o600)
        return path

    return make


def directory(**changes: int) -> bytes:
    """A directory segment of this boot; changes: fields of its head, and pid_namespace."""
    made = FakeDirectory()
    head = made.header["segment"]
    head["boot_id"] = boot_id()
    made.header["pid_namespace"] = os.stat("/proc/self/ns/pid").st_ino
    for name, value in changes.items():
        (made.header if name in ("pid_namespace",) else head)[name] = value
    return bytes(made.buffer)


def examine(instance: str) -> list[Finding]:
    return list(instance_checks.check_instance(instance))


def the_fix(instance: str) -> Callable[[], str]:
    (finding,) = (finding for finding in examine(instance) if finding.fix is not None)
    assert finding.fix is not None
    assert finding.level == "problem"
    return finding.fix


@pytest.mark.parametrize("kind", ["empty", "raw", "closed", "boot"])
def test_dead_instances_are_removed(instance: str, put: Callable[..., Path], kind: str) -> None:
    data = {
        "empty": b"",
        "raw": directory(ready=Ready.RAW),
        "closed": directory(ready=Ready.CLOSED),
        "boot": directory(boot_id=(1, 2)),  # type: ignore[arg-type]
    }[kind]
    put(data)
    put(bytes(FakeQueue().buffer), 3)
    assert instances.instance_names().count(instance) == 1
    assert "2 objects" in the_fix(instance)()
    assert not shm.list_objects(instance)


def test_orphans_are_removed(instance: str, put: Callable[..., Path]) -> None:
    put(bytes(FakeQueue().buffer), 3)
    put(bytes(FakeQueue().buffer), 12)
    shm.Permits.create(instance, 5, 0o600).close()
    assert instance in instances.instance_names()
    assert the_fix(instance)() == "removed 3 objects"
    assert not shm.list_objects(instance)


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"layout_version": 99}, "layout"),
        ({"fingerprint": 5}, "layout"),
        ({"magic": 5}, "segments"),
        ({"pid_namespace": 5}, "namespace"),
        ({}, "supervisor"),  # dead, but another one can take it up
    ],
)
def test_what_may_hold_messages_is_never_removed(
    instance: str, put: Callable[..., Path], changes: dict[str, int], check: str
) -> None:
    put(directory(**changes))
    found = [finding for finding in examine(instance) if finding.level == "problem"]
    assert check in [finding.check for finding in found]
    assert all(finding.fix is None and finding.remedy for finding in found)
    with pytest.raises(ShmqError, match="come to life"):
        removal.remove_leftover(instance)
    assert shm.list_objects(instance)


def test_what_a_process_has_mapped_stays(instance: str, put: Callable[..., Path]) -> None:
    for serial, data in ((None, directory(ready=Ready.CLOSED)), (3, bytes(FakeQueue().buffer))):
        path = put(data, serial)
        fd = os.open(path, os.O_RDWR)
        mapped = mmap.mmap(fd, 4096)  # keeps it open for writing, as attached clients do
        os.close(fd)
        remove = removal.remove_leftover if serial is None else removal.remove_orphans
        with pytest.raises(ShmqError, match="a process uses it"):
            remove(instance)
        assert path.exists()
        assert not [finding for finding in examine(instance) if finding.fix and serial]
        mapped.close()
        assert remove(instance) == 1


def test_what_a_supervisor_has_locked_stays(instance: str, put: Callable[..., Path]) -> None:
    path = put(b"")
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert {finding.level for finding in examine(instance)} == {"note"}  # it is being made
        with pytest.raises(ShmqError, match="supervisor has it"):
            removal.remove_leftover(instance)
    finally:
        os.close(fd)
    assert path.exists()


def test_what_was_set_aside_is_named_and_stays(
    instance: str, put: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    paths = []
    for serial in (3, 12):
        put(bytes(FakeQueue().buffer), serial)
        paths.append(Path(shm.set_aside_queue(instance, serial)))
        request.addfinalizer(paths[-1].unlink)
    assert shm.list_set_aside(instance) == sorted(map(str, paths))
    assert instances.instance_names().count(instance) == 1
    found = examine(instance)
    assert f"{min(paths)} and 1 more" in problems(found)
    (aside,) = (finding for finding in found if finding.level == "problem")
    assert f"shmq inspect {min(paths)}" in aside.remedy
    assert all(f" {path}" in aside.remedy.partition("rm")[2] for path in paths)
    assert aside.fix is None
    put(directory())
    assert str(min(paths)) in problems(examine(instance))  # of one that runs, too


def test_orphans_stay_when_an_instance_of_the_name_comes_up(
    instance: str, put: Callable[..., Path]
) -> None:
    put(bytes(FakeQueue().buffer), 3)
    fix = the_fix(instance)
    put(directory())
    with pytest.raises(ShmqError, match="come up"):
        fix()
    assert len(shm.list_objects(instance)) == 2


def test_missing_and_stray_segments(
    instance: str, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FakeDirectory()
    made.header["segment"]["boot_id"] = boot_id()
    made.header["pid_namespace"] = os.stat("/proc/self/ns/pid").st_ino
    made.header["supervisor_pid"] = os.getpid()
    made.header["supervisor_start_time"] = procfs.start_time(os.getpid())
    made.header["next_serial"] = 9
    made.topic(0, "t")
    made.queue(0, 0, "c", 4)
    put(bytes(made.buffer))
    put(bytes(FakeQueue(serial=5).buffer), 5)
    monkeypatch.setattr(instance_checks, "_LONG_AGO", -1.0)
    found = examine(instance)
    text = problems(found)
    assert "queue 4 (c) was removed" in text
    assert "semaphore is gone" in text
    assert "belong to no queue" in " ".join(item.text for item in found if item.level == "note")


# ---- a container ----


@pytest.mark.parametrize(
    ("line", "file", "none"),
    [
        ("0::/a/b\n", "sys/fs/cgroup/a/memory.max", "max\n"),
        ("0::/a/b\n", "sys/fs/cgroup/memory.max", "max\n"),  # of which the path is not to be seen
        ("4:cpu:/\n3:memory:/a\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes", f"{2**63}\n"),
    ],
)
def test_a_memory_limit_below_the_shared_memory_is_a_problem(
    tmp_path: Path, line: str, file: str, none: str
) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    assert "mount /proc" in next(iter(check_container(tmp_path))).remedy
    (tmp_path / "proc/self/ns/pid").touch()
    (tmp_path / "proc/self/cgroup").write_text(line)
    assert levels(list(check_container(tmp_path))) == {"ok"}
    limit = tmp_path / file
    limit.parent.mkdir(parents=True)
    limit.write_text(none)
    assert levels(list(check_container(tmp_path))) == {"ok"}
    limit.write_text("4096\n")
    assert "4.0 KiB" in problems(list(check_container(tmp_path)))
    assert memory_limit(tmp_path) == (4096, str(limit))
    limit.write_text(f"{2**59}\n")
    assert levels(list(check_container(tmp_path))) == {"ok"}


def test_permits_that_the_supervisor_cannot_set_right(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    permits = shm.Permits(broker.instance)
    path = shm.semaphore_path_of(shm.attach_semaphore_name(broker.instance))

    def found() -> list[str]:
        findings = instance_checks.check_instance(broker.instance)
        return [each.text for each in findings if "permits to attach" in each.text]

    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as a client that was stopped amid its attach
        permits.take()
        monkeypatch.setattr(instance_checks, "_PERMITS_RIGHT", 0.0)
        assert ["1 permits to attach are missing" in text for text in found()] == [True]
    monkeypatch.setattr(instance_checks, "_PERMITS_RIGHT", WATCHDOG)
    assert not found()
    permits.close()
