"""A driver that is killed in the middle of `foreachBatch`, and started again on its checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.deliveries import take_all
from support.processes import ROOT
from support.spark_home import spark_home

import shmq

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("installed"), pytest.mark.deep]

JOB = Path(__file__).parent / "foreach_batch_job.py"


def test_each_message_comes_once_wherever_in_foreach_batch_the_driver_is_killed(
    broker: shmq.Broker, tmp_path: Path
) -> None:
    for topic, channel in (("t", "c"), ("out", "o"), ("more", "o")):
        broker.create_channel(topic, channel)
    bodies = [b"%05d" % number for number in range(900)]
    broker.producer("t").publish_many(bodies)
    home = spark_home(tmp_path / "home")
    ends = [("begin", 0), ("between", 1), ("end", 2), ("never", 0)]
    for point, epoch in ends:
        words = [broker.instance, str(tmp_path / "checkpoint"), point, str(epoch)]
        done = subprocess.run(
            [sys.executable, JOB, *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "SPARK_HOME": str(home)},
            cwd=tmp_path,
            start_new_session=True,
            capture_output=True,
            text=True,
            check=False,
        )
        wanted = 0 if point == "never" else -signal.SIGKILL
        assert done.returncode == wanted, (point, done.stdout[-4000:], done.stderr[-20_000:])
    for topic in ("out", "more"):
        came = take_all(broker, topic, "o")
        assert sorted(came.bodies) == bodies
        assert set(came.attempts) == {1}
    counts = broker.stats().channel("t", "c")
    assert (counts.depth, counts.in_flight) == (0, 0)
