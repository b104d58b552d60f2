"""The main job: executors' forked Python workers exchange tasks, one of them is killed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.external_programs import missing, peer
from support.spark_home import spark_home

import shmq

TOP = Path(__file__).resolve().parents[2]
FILES = 60


@pytest.fixture
def java() -> None:
    peer("java")
    for module in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(module) is None:
            missing(module, "tools/dev test installs it")


def demo(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    home = spark_home(directory.parent / "spark")
    return subprocess.run(
        [sys.executable, str(TOP / "tools" / "demo" / "demo.py"), *options, str(directory)],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
        env={**os.environ, "SPARK_HOME": str(home)},
    )


def source_tree(directory: Path) -> Path:
    """Modules to parse, one of which is none."""
    for number in range(FILES - 1):
        package = directory / f"package{number % 4}"
        package.mkdir(exist_ok=True)
        text = "import os\n\n" + f"def f{number}(x):\n    return x\n\n" * (200 + number)
        (package / f"module{number}.py").write_text(text)
    (directory / "broken.py").write_text("def (:\n")
    return directory


@pytest.mark.deep
@pytest.mark.spark
@pytest.mark.usefixtures("java")
def test_a_killed_worker_costs_no_path_and_doubles_none(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    done = demo(source_tree(tree), "--output", str(tmp_path / "out"))
    words = done.stdout + done.stderr
    assert done.returncode == 0, words[-4000:]
    assert f"every one of {FILES} paths is there exactly once" in words
    assert re.search(r"killed Python worker \d+, which held [1-9]", words), words[-4000:]
    assert list((tmp_path / "out").rglob("*.parquet"))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("shmq.demo-")]


@pytest.mark.deep
@pytest.mark.spark
@pytest.mark.usefixtures("java")
def test_a_killed_driver_costs_no_event_and_doubles_none(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    done = demo(source_tree(tree), "--streaming", "--limit", "12000", "--rate", "0")
    words = done.stdout + done.stderr
    assert done.returncode == 0, words[-4000:]
    assert "the driver and its JVM are killed" in words
    assert "12000 events in" in words
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("shmq.demo-")]


def test_what_is_published_while_nobody_looks_is_waited_for(
    broker: shmq.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publishing process may do all its work, and end, between two looks at the topic."""
    monkeypatch.syspath_prepend(str(TOP / "tools" / "demo"))
    streaming: Any = importlib.import_module("streaming")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "module.py").write_text("pass\n" * 50)
    work = streaming.Work(broker.instance, str(tree), str(tmp_path), 40, 0.0)
    broker.create_channel(streaming.EVENTS, streaming.QUERY)
    broker.create_channel(streaming.COUNTS, streaming.TABLE)
    # the driver is somebody who does nothing; the publishing process ends as soon as it may
    programs = {"produce": "import sys; sys.stdin.read()", "drive": "import time; time.sleep(1000)"}
    started: dict[str, subprocess.Popen[bytes]] = {}

    def start(what: str, _: Any) -> subprocess.Popen[bytes]:
        started[what] = subprocess.Popen(
            [sys.executable, "-c", programs[what]], stdin=subprocess.PIPE, start_new_session=True
        )
        return started[what]

    takes, take = [0], streaming.Table.take

    def slow_take(table: Any, timeout: float) -> Any:
        takes[0] += 1
        if takes[0] == 1:
            streaming.produce(work)
            started["produce"].communicate()
        elif takes[0] == 3:
            rows = json.loads(work.tally.read_text())
            counts = [{"window": window, "package": name, "count": n} for window, name, n in rows]
            producer = broker.producer(streaming.COUNTS)
            producer.publish_many([json.dumps(row).encode() for row in counts])
        return take(table, min(timeout, 0.05))

    monkeypatch.setattr(streaming, "start", start)
    monkeypatch.setattr(streaming.Table, "take", slow_take)
    table = streaming.count(broker, work, with_kill=False)
    for process in started.values():
        assert process.stdin is not None
        process.stdin.close()
    assert table.total == 40
    streaming.compare(table, work)


def test_a_driver_that_ends_by_itself_is_started_again(
    broker: shmq.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark ends a query whose Python worker does not start within ten seconds."""
    monkeypatch.syspath_prepend(str(TOP / "tools" / "demo"))
    streaming: Any = importlib.import_module("streaming")
    work = streaming.Work(broker.instance, str(tmp_path), str(tmp_path), 40, 0.0)
    broker.create_channel(streaming.EVENTS, streaming.QUERY)
    broker.create_channel(streaming.COUNTS, streaming.TABLE)
    programs = {"produce": "import time; time.sleep(1000)", "drive": "raise SystemExit(3)"}
    started = []

    def start(what: str, _: Any) -> subprocess.Popen[bytes]:
        started.append(what)
        return subprocess.Popen([sys.executable, "-c", programs[what]], start_new_session=True)

    monkeypatch.setattr(streaming, "start", start)
    with pytest.raises(streaming.Different, match="the driver ended with status 3"):
        streaming.count(broker, work, with_kill=False)
    assert started == ["produce", *["drive"] * (1 + streaming.RESTARTS)]
