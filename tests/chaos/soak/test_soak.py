"""A soak of half a minute: all kinds of work and of deaths, nothing lost, and a planted leak found.

`tools/dev soak` runs a long one; `test_soak_judge.py` shows what its verdict sees.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import HELPERS, ROOT, Child, eventually

from shmq import shm

SOAK = str(ROOT / "tools" / "chaos" / "soak.py")


def soak(tmp_path: Path, seconds: float, *words: str) -> tuple[int, dict[str, Any], str]:
    """Its status, its result and what it printed."""
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, SOAK, f"--hours={seconds / 3600}", f"--json={result}", "--seed=1", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **HELPERS},
    )
    return done.returncode, json.loads(result.read_text()), done.stdout + done.stderr


@pytest.mark.deep
def test_a_short_soak_is_flat_and_loses_nothing(tmp_path: Path) -> None:
    status, result, said = soak(tmp_path, 30)
    assert result["problems"] == [], said
    assert status == 0, said
    assert all(finding["flat"] for finding in result["findings"])
    assert result["deaths"]["supervisor"] > 1
    assert result["deaths"]["gateway"] > 0
    assert sum(result["deaths"].values()) > 15
    assert result["published"] > 5000
    assert {name for name, count in result["counts"].items() if not count} <= {"ephemeral_refused"}
    assert "flat, and nothing is lost" in said


@pytest.mark.deep
def test_a_soak_finds_a_leak(tmp_path: Path) -> None:
    status, result, said = soak(tmp_path, 16, "--plant")
    assert status == 1
    assert not result["problems"], said
    grows = {finding["name"] for finding in result["findings"] if not finding["flat"]}
    assert {"topics", "segments"} <= grows


def test_ctrl_c_ends_it_in_order(keep: Any) -> None:
    child = keep(Child([sys.executable, "-u", SOAK, "--hours=1"], HELPERS))
    eventually(lambda: "published" in child.errors)
    instance = child.errors.partition("instance ")[2].partition(",")[0]
    assert shm.list_objects(instance)
    child.process.send_signal(signal.SIGINT)
    assert child.wait() == 130
    assert not shm.list_objects(instance)
    assert "interrupted" in child.lines[-1]
