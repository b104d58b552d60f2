"""The models of the crash protocol find nothing wrong with the rules that the code follows, and do
find what is wrong with a naive one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="the models need g++")


@pytest.mark.deep
def test_no_death_breaks_the_protocol() -> None:
    done = subprocess.run([ROOT / "tools" / "dev", "model"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("OK exhaustive") == 7


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("wake -DKILLS=1 -DPASS=0", id="a wake-up is not passed on"),
        pytest.param("many -DCOUNT=0", id="a waker counts on a consumer that is awake"),
        pytest.param("many -DOWED=0", id="a ring for another queue is not passed on"),
        pytest.param("dead -DKILLS=1 -DNOTED=0", id="a move to a dead topic is not noted there"),
        pytest.param("results -DKILLS=0 -DREADLOCK=0", id="a reader takes no lock"),
    ],
)
def test_a_rule_that_is_left_out_is_missed(variant: str) -> None:
    command = [ROOT / "docs" / "model" / "run", *variant.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "VIOLATION" in done.stdout
