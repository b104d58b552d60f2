"""A disk that fails at any system call: nothing is lost, and every error is one that says so.

SHMQ_FAULTS=all (`tools/dev faults`): at every call; otherwise at some of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import WATCHDOG

FAULTS = Path(__file__).parent
EVERY = {
    "overflow": 7,
    "stop": 13,
    "begin": 5,
    "adopt": 3,
    "rename": 9,
    "later": 3,
    "empty": 17,
    "names": 3,
    "results": 3,
    "results_begin": 2,
    "limits": 19,
    "dead": 19,
    "expiry": 19,
    "settings": 5,
    "properties": 19,
}
WHOLE = os.environ.get("SHMQ_FAULTS") == "all"


@pytest.fixture(scope="module")
def interposer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preloaded, it makes system calls fail."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    assert compiler, "no C compiler"
    path = tmp_path_factory.mktemp("faults") / "interpose.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", path, FAULTS / "interpose.c", "-ldl"],
        check=True,
    )
    return path


def run(interposer: Path, program: str, *words: str) -> list[str]:
    before = os.environ.get("LD_PRELOAD")  # a sanitizer has to be the first
    done = subprocess.run(
        [sys.executable, FAULTS / program, *words],
        env={**os.environ, "LD_PRELOAD": f"{before}:{interposer}" if before else str(interposer)},
        capture_output=True,
        text=True,
        timeout=None if WHOLE else WATCHDOG * 4,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(0 if WHOLE else 900)
@pytest.mark.parametrize("scene", EVERY)
def test_nothing_is_lost_whichever_call_fails(interposer: Path, scene: str) -> None:
    stride = 1 if WHOLE else EVERY[scene]
    *wrong, last = run(interposer, "faults.py", scene, str(stride))
    assert not wrong, "\n".join(wrong)
    print(f"{scene}: {last}")
    cases, calls = int(last.split()[0]), int(last.split()[2])
    assert calls > 15, last
    assert cases >= calls // stride, last


@pytest.mark.parametrize(
    ("scene", "stride"), [("overflow", 2), ("limits", 20), ("properties", 6), ("settings", 9)]
)
def test_a_write_that_failed_and_is_believed_is_found(
    interposer: Path, scene: str, stride: int
) -> None:
    *wrong, last = run(interposer, "faults.py", scene, str(stride), "mutant")
    assert len(wrong) > 2, last
    if scene != "settings":
        assert all("lost" in line for line in wrong), wrong


def test_a_low_water_mark_that_says_nothing_lets_the_disk_be_read(interposer: Path) -> None:
    *wrong, last = run(interposer, "scribble.py", "1", "low_water")
    assert not wrong, "\n".join(wrong)
    assert int(last.split()[0]) > 5, last


@pytest.mark.timeout(0 if WHOLE else 900)
def test_garbage_in_a_queues_header_costs_no_message(interposer: Path) -> None:
    *wrong, last = run(interposer, "scribble.py", "1" if WHOLE else "29")
    assert not wrong, "\n".join(wrong)
    print(f"garbage: {last}")
    assert int(last.split()[0]) > 30, last


def test_an_impossible_word_about_emptied_chunks_deletes_none(interposer: Path) -> None:
    *wrong, last = run(interposer, "scribble.py", "1", "deferred_gone")
    assert not wrong, "\n".join(wrong)
    assert int(last.split()[0]) == 10, last


def test_a_queue_that_is_not_salvaged_is_found(interposer: Path) -> None:
    *wrong, last = run(interposer, "scribble.py", "101", "mutant")
    assert any("lost" in line for line in wrong), last
