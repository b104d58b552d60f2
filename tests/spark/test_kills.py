"""A short run of tools/chaos/spark_kills.py: everything that a stream through Spark
consists of is killed once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.processes import HELPERS, ROOT

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("installed"), pytest.mark.deep]


def test_streams_through_spark_give_each_message_once_whoever_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "chaos" / "spark_kills.py"), "--kills", "5"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **HELPERS},
    )
    words = done.stdout + done.stderr
    assert done.returncode == 0, words[-40_000:]
    for kind in ("driver", "JVM", "worker", "planner", "supervisor"):
        assert f"{kind} 1" in words
    assert "each came once, in its first attempt, and nothing is left" in words
