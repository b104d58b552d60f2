"""A short run of tools/spark_kills.py: everything that a stream through Spark consists of is killed
once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("installed")]


def test_streams_through_spark_give_each_message_once_whoever_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "spark_kills.py"), "--kills", "5"],
        capture_output=True,
        text=True,
        check=False,
    )
    words = done.stdout + done.stderr
    assert done.returncode == 0, words[-6000:]
    for kind in ("driver", "JVM", "worker", "planner", "supervisor"):
        assert f"{kind} 1" in words
    assert "each came once, in its first attempt, and nothing is left" in words
