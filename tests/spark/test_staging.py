"""Rows that wait for their commit: nobody else may read or replace them, and no file that another
user of the host puts in their way changes that. The other user is one: these tests run as root,
with setpriv."""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.external_programs import missing
from support.processes import eventually

import shmq

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from shmq.private import Private  # noqa: E402
from shmq.spark import staging, workers  # noqa: E402
from shmq.spark.options import Settings  # noqa: E402
from shmq.spark.reading import ShmqReader  # noqa: E402

STRANGER = 65534
Stranger = Callable[..., None]


@pytest.fixture
def stranger() -> Stranger:
    """Runs shell words as somebody else, without any capability."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    if shutil.which("setpriv") is None:
        missing("setpriv", "install Debian's util-linux")

    def run(script: str, *words: object) -> None:
        identity = [f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
        argv = ["setpriv", *identity, "--bounding-set=-all", "sh", "-euc", script, "sh"]
        subprocess.run([*argv, *map(str, words)], check=True, cwd="/")

    return run


@pytest.fixture
def sticky(tmp_path: Path) -> Iterator[Path]:
    """A directory as /dev/shm: everybody may make names in it."""
    path = Path("/dev/shm") / f"shmq-test-{os.getpid()}-{tmp_path.name}"
    path.mkdir()
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def settings(broker: shmq.Broker, base: Path | None, **more: str) -> Settings:
    given = {"instance": broker.instance, "topic": "t", **more}
    return Settings(given | ({} if base is None else {"staging": str(base)}))


def stage(where: Settings, *bodies: bytes) -> staging.Staged:
    batch = pa.record_batch({"body": pa.array(bodies, pa.binary())})
    made = staging.stage([batch], where, "q", 0, staging.application())
    assert made is not None
    return made


def came(broker: shmq.Broker) -> list[bytes]:
    with broker.consumer("t", "c") as consumer:
        batch = consumer.take_many(100, 0)
        found = batch.bodies() if batch else []
        if batch:
            batch.finish()
    return found


def test_a_directory_that_somebody_else_made_is_refused(
    broker: shmq.Broker, sticky: Path, stranger: Stranger
) -> None:
    broker.create_channel("t", "c")
    here = sticky / broker.instance
    for script in ('mkdir -m 0777 "$1"', 'mkdir -m 0700 "$1"', 'ln -s /tmp "$1"', 'touch "$1"'):
        stranger(script, here)
        with pytest.raises(shmq.ShmqError, match=broker.instance):
            stage(settings(broker, sticky), b"secret")
        stranger('rm -rf "$1"', here)
    assert not list(sticky.iterdir())


def test_the_default_directory_is_not_taken_by_somebody_who_makes_it_first(
    broker: shmq.Broker, stranger: Stranger
) -> None:
    broker.create_channel("t", "c")
    where = settings(broker, None)
    with staging.directory(where) as here:  # the name that is next, which nobody else can know
        seen = here.path
    seen.rmdir()
    stranger('mkdir -m 0777 "$1"', seen)
    try:
        item = stage(where, b"secret")
        assert not list(seen.iterdir())
        stranger('rmdir "$1"', seen)  # and the rows are found as before
        assert staging.commit([item], where, "q", 0) == 1
    finally:
        shutil.rmtree(seen, ignore_errors=True)
    assert came(broker) == [b"secret"]


def test_what_is_staged_is_closed_to_others_whatever_the_umask_says(
    broker: shmq.Broker, sticky: Path, stranger: Stranger
) -> None:
    broker.create_channel("t", "c")
    before = os.umask(0)
    try:
        where = settings(broker, sticky / "made" / "too")
        item = stage(where, b"secret")
    finally:
        os.umask(before)
    path = sticky / "made" / "too" / broker.instance / item.file
    for each in (path, *path.parents[:3]):
        assert not stat.S_IMODE(each.stat().st_mode) & 0o077, each
    with pytest.raises(subprocess.CalledProcessError):
        stranger('cat "$1"', path)
    with pytest.raises(subprocess.CalledProcessError):
        stranger('mv "$1" "$1".mine', path.parents[2])
    assert staging.commit([item], where, "q", 0) == 1
    assert came(broker) == [b"secret"]


def test_a_directory_of_an_earlier_version_is_closed(broker: shmq.Broker, tmp_path: Path) -> None:
    here = tmp_path / broker.instance
    here.mkdir(mode=0o755)
    here.chmod(0o755)
    stage(settings(broker, tmp_path), b"a")
    assert stat.S_IMODE(here.stat().st_mode) == 0o700
    here.chmod(0o770)  # somebody else may have put something there
    with pytest.raises(shmq.ShmqError, match="closed to others"):
        stage(settings(broker, tmp_path), b"a")


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../{other}", "{topic}.0.manifest", "x.arrow", "", "."]
)
def test_a_manifest_that_names_anything_but_staged_files_publishes_nothing(
    name: str, broker: shmq.Broker, tmp_path: Path
) -> None:
    broker.create_channel("t", "c")
    where = settings(broker, tmp_path)
    item = stage(where, b"mine")
    outside = tmp_path / item.file
    shutil.copy(tmp_path / broker.instance / item.file, outside)
    prefix = item.file.partition(".")[0]
    planted = replace(item, file=name.format(other=item.file, topic=prefix))
    manifest = tmp_path / broker.instance / f"{prefix}.0.manifest"
    manifest.write_text(json.dumps([asdict(planted)]))
    manifest.chmod(0o600)
    with pytest.raises(shmq.ShmqError, match="no file that a task staged"):
        staging.commit([item], where, "q", 0)
    manifest.unlink()
    with pytest.raises(shmq.ShmqError, match="no file that a task staged"):
        staging.commit([planted], where, "q", 0)
    assert came(broker) == []
    assert outside.exists()


def test_what_no_manifest_can_be_is_said(broker: shmq.Broker, tmp_path: Path) -> None:
    broker.create_channel("t", "c")
    where = settings(broker, tmp_path)
    item = stage(where, b"mine")
    manifest = tmp_path / broker.instance / f"{item.file.partition('.')[0]}.0.manifest"
    for text in ("", "{", '["a"]', '[{"file": 1}]'):
        manifest.write_text(text)
        manifest.chmod(0o600)
        with pytest.raises(shmq.ShmqError, match="no manifest of this version"):
            staging.commit([item], where, "q", 0)
    manifest.chmod(0o644)
    with pytest.raises(shmq.ShmqError, match="closed to others"):
        staging.commit([item], where, "q", 0)
    assert came(broker) == []


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _replace_by(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def _another(path: Path) -> None:
    path.write_bytes(b"x" * 100)
    path.chmod(0o600)


@pytest.mark.parametrize(
    "change",
    [
        _cut,
        _replace_by(lambda path: path.symlink_to("/etc/passwd")),
        _replace_by(os.mkfifo),
        _replace_by(_another),
        _replace_by(Path.mkdir),
    ],
    ids=["cut", "symlink", "fifo", "another file", "directory"],
)
def test_a_staged_file_that_was_changed_is_not_published(
    change: Callable[[Path], None], broker: shmq.Broker, tmp_path: Path
) -> None:
    broker.create_channel("t", "c")
    where = settings(broker, tmp_path)
    item = stage(where, b"mine")
    path = tmp_path / broker.instance / item.file
    change(path)
    with pytest.raises(shmq.ShmqError, match=str(path)):
        staging.commit([item], where, "q", 0)
    assert came(broker) == []


def test_the_memory_of_what_was_staged_is_free_soon_after_its_commit(
    broker: shmq.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_MAPPED", 2)
    broker.create_channel("t", "c")
    where = settings(broker, tmp_path)
    items = [stage(where, b"%d" % number) for number in range(5)]
    mapped: list[str] = []  # while the last one is published

    def maps() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in lines if str(tmp_path) in line]

    clear = staging._clear

    def looking(*given: Any) -> None:
        mapped.extend(maps())
        clear(*given)

    monkeypatch.setattr(staging, "_clear", looking)
    assert staging.commit(items, where, "q", 0) == 5
    assert len(mapped) == 2
    assert sorted(came(broker)) == [b"0", b"1", b"2", b"3", b"4"]
    eventually(lambda: not maps())


def test_a_commit_needs_no_threads(
    broker: shmq.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would only save time: one touches pages beforehand, one unmaps them."""
    tried: list[str] = []

    class Limited(threading.Thread):
        def start(self) -> None:
            tried.append(self.name)
            raise RuntimeError("can't start new thread")

    where = settings(broker, tmp_path)
    items = [stage(where, b"1", b"2"), stage(where, b"3")]
    monkeypatch.setattr(staging.threading, "Thread", Limited)
    assert staging.commit(items, where, "q", 0) == 3
    assert sorted(came(broker)) == [b"1", b"2", b"3"]
    assert tried == ["shmq-touch", "shmq-touch", "shmq-unmap"]


def test_a_file_is_touched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pages = tmp_path / "staged", 101  # more than the kernel maps at one fault
    path.write_bytes(bytes((pages - 1) * mmap.PAGESIZE + 1))
    monkeypatch.setattr(staging, "_TOUCHED", 20)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        staging._touch(data)
        _, _, mine = Path("/proc/self/smaps").read_text().partition(str(path))
    resident = next(line for line in mine.splitlines() if line.startswith("Rss:"))
    assert int(resident.split()[1]) * 1024 == pages * mmap.PAGESIZE


def test_the_modules_of_a_task_are_left_out_of_garbage_collections(
    broker: shmq.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(workers, "_left", 2)
    broker.producer("t").publish(b"a")
    reader = ShmqReader(settings(broker, tmp_path, channel="c"))
    broker.create_channel("t", "c")
    for part in reader.partitions() * 2:
        assert sum(len(batch) for batch in reader.read(part)) == 1
    assert frozen == [True, True]


def test_nothing_is_overwritten_by_what_is_staged(
    broker: shmq.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = settings(broker, tmp_path)
    with staging.directory(where) as here:
        fixed = "0" * 32
        monkeypatch.setattr(staging.uuid, "uuid4", lambda: type("U", (), {"hex": fixed})())
        target = tmp_path / "target"
        target.write_text("kept")
        name = f"{staging._prefix('q', 't')}.0.{staging.application()}.{fixed}.arrow"
        (here.path / name).symlink_to(target)
        with pytest.raises(FileExistsError):
            stage(where, b"mine")
    assert target.read_text() == "kept"


def test_the_directory_goes_with_its_last_file(
    broker: shmq.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "staged"
    where = settings(broker, base)
    first, second = stage(where, b"1"), stage(where, b"2")
    staging.drop([second], where)
    assert [path.name for path in (base / broker.instance).iterdir()] == [first.file]
    assert staging.commit([first], where, "q", 0) == 1
    assert base.is_dir()  # its user made it, or may have
    assert list(base.iterdir()) == []

    # and once more while another task, between opening it and its first file, wants it
    create = Private.create
    removed: list[str] = []

    def late(self: Private, name: str) -> int:
        if not removed:
            removed.append(name)
            self.remove()
        return create(self, name)

    monkeypatch.setattr(Private, "create", late)
    third = stage(where, b"3")
    assert removed
    assert staging.commit([third], where, "q", 1) == 1
    assert came(broker) == [b"1", b"3"]
