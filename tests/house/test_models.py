"""The models of the crash protocol find nothing wrong with the rules that the code follows, and do
find what is wrong with a naive one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="the models need g++")


def test_no_death_breaks_the_protocol() -> None:
    done = subprocess.run([ROOT / "tools" / "dev", "model"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("OK exhaustive") == 4


def test_a_wake_up_that_is_not_passed_on_is_found() -> None:
    command = [ROOT / "docs" / "model" / "run", "wake", "-DKILLS=1", "-DPASS=0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "VIOLATION" in done.stdout
