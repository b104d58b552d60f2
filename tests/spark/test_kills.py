"""Short runs of spark_kills.py and fleet_kills.py in tools/chaos: what a stream through Spark
consists of is killed once each, and an instance of a fleet loses its answers and its memory. A
stream into a fleet is killed and cut off amid its commits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import network
from support.external_programs import peer
from support.processes import HELPERS, ROOT

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("installed"), pytest.mark.deep]


SECURE = ("--no-write", "--tls", "--lookupd")
PLAIN = ("--write", "--no-tls", "--no-lookupd")


@pytest.mark.parametrize(
    ("program", "kinds", "round_", "end"),
    [
        (
            "spark_kills.py",
            ("driver", "JVM", "worker", "planner", "supervisor"),
            (),
            "nothing is left",
        ),
        ("fleet_kills.py", ("executor", "answer", "memory", "lookupd"), SECURE, "no lease is left"),
        (
            "fleet_kills.py",
            ("half", "worker", "unanswered", "supervisor"),
            PLAIN,
            "no lease is left",
        ),
    ],
    ids=["one host", "from a fleet", "into a fleet"],
)
def test_streams_through_spark_give_each_message_once_whoever_is_killed(
    program: str, kinds: tuple[str, ...], round_: tuple[str, ...], end: str
) -> None:
    words = ["--kills", str(len(kinds)), *round_]
    if program == "fleet_kills.py":
        words += ["--kinds", ",".join(kinds)]
        if (reason := network.why_not()) is not None:
            pytest.skip(reason)
    if "--lookupd" in words:
        peer("nsqlookupd")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "chaos" / program), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **HELPERS},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-40_000:]
    for kind in kinds:
        assert f"{kind} 1" in said
    assert "each came once, in its first attempt" in said or "each of the others" in said
    assert end in said
