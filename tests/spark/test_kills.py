"""Short runs of spark_kills.py and fleet_kills.py in tools/chaos: everything that a stream through
Spark consists of is killed once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.processes import HELPERS, ROOT

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("installed"), pytest.mark.deep]


@pytest.mark.parametrize(
    ("program", "kinds", "end"),
    [
        ("spark_kills.py", ("driver", "JVM", "worker", "planner", "supervisor"), "nothing is left"),
        (
            "fleet_kills.py",
            ("driver", "JVM", "worker", "planner", "supervisor", "gateway", "pause"),
            "no lease is left",
        ),
    ],
)
def test_streams_through_spark_give_each_message_once_whoever_is_killed(
    program: str, kinds: tuple[str, ...], end: str
) -> None:
    path = ROOT / "tools" / "chaos" / program
    done = subprocess.run(
        [sys.executable, str(path), "--kills", str(len(kinds))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **HELPERS},
    )
    words = done.stdout + done.stderr
    assert done.returncode == 0, words[-40_000:]
    for kind in kinds:
        assert f"{kind} 1" in words
    assert f"each came once, in its first attempt, and {end}" in words
