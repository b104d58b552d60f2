"""A short storm: some hundred kills of every kind of process, and nothing that was promised broke.

`tools/dev storm` runs a long one; `test_storm_checker.py` shows what its verdict sees.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.storm.celery_actors import INSTALLED
from chaos.storm.errand_actors import FRAMEWORKS
from support.processes import HELPERS, ROOT

CELERY = {"celery-worker", "celery-caller"} if INSTALLED else set()
#: Of the frameworks' actors some are killed, not all in every short storm.
WORKERS, CALLERS = ({f"{name}-{end}" for name in FRAMEWORKS} for end in ("worker", "caller"))
ROLES = {
    "producer",
    "consumer",
    "requeuer",
    "async-consumer",
    "holder",
    "operator",
    "supervisor",
    "gateway",
    "remote-producer",
    "remote-consumer",
    "remote-requeuer",
    "policy-producer",
    "failer",
    "undertaker",
    "many-consumer",
    "results-user",
    "visitor",
    "putter",
    "getter",
    "submitter",
    "caller",
    *CELERY,
}


@pytest.mark.timeout(1800)
def test_a_storm_breaks_no_promise(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["--kills=300", "--round-kills=150", "--long-stop=3", "--late=15"]
    words += [f"--json={result}", f"--directory={tmp_path}"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "chaos" / "storm.py", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **HELPERS},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["violations"] == []
    assert found["killed"].keys() >= ROLES
    assert found["killed"].keys() & WORKERS or not FRAMEWORKS
    assert found["killed"].keys() & CALLERS or not FRAMEWORKS
    assert sum(found["killed"].values()) >= 300
    assert sum(found["stopped"].values()) > 0
    counts = found["counts"]
    for what in (
        "publishes that returned",
        "publishes cut off by a death",
        "of these not the first",
        "of these over TCP",
        "messages owed to channels",
        "messages finished",
        "first deliveries in order",
        "clients reaped",
        "dead letters, rejected",
        "dead letters, attempts",
        "dead letters sent back",
        "deliveries of messages that expire",
        "of these dropped or expired",
        "calls on a results store",
        "additions to numbers",
        "of these to consumers of many topics",
        "errands of visitors",
        "errands of item-queue",
        "errands of chore-queue",
        "errands of errands",
    ):
        assert counts[what] > 0, (what, counts)
    assert counts["errands of celery"] > 0 or not CELERY
    assert all(counts[f"errands of {name}"] > 0 for name in FRAMEWORKS)
    assert len(found["delays"]) + len(found["disturbed"]) > 0
