"""The main job: executors' forked Python workers exchange tasks, one of them is killed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peers import missing, peer

TOP = Path(__file__).resolve().parents[2]
FILES = 60

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def spark() -> None:
    peer("java")
    for module in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(module) is None:
            missing(module, "tools/dev test installs it")


def demo(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOP / "tools" / "demo.py"), *options, str(directory)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
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


def test_a_killed_driver_costs_no_event_and_doubles_none(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    done = demo(source_tree(tree), "--streaming", "--limit", "12000", "--rate", "0")
    words = done.stdout + done.stderr
    assert done.returncode == 0, words[-4000:]
    assert "the driver and its JVM are killed" in words
    assert "12000 events in" in words
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("shmq.demo-")]
