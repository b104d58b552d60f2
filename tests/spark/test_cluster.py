"""The source, the sink and the exchange where executors are JVMs of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.deliveries import take_all
from support.processes import ROOT
from support.spark_home import spark_home

import shmq

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("installed"), pytest.mark.deep]

MESSAGES = 2000
JOB = Path(__file__).with_name("cluster_job.py")


def test_executors_in_two_processes_share_one_broker(broker: shmq.Broker, tmp_path: Path) -> None:
    broker.create_channel("t", "c")
    broker.create_channel("out", "o")
    numbers = [b"%d" % number for number in range(MESSAGES)]
    broker.producer("t").publish_many(numbers)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    home = spark_home(tmp_path / "spark")
    done = subprocess.run(
        [sys.executable, str(JOB), broker.instance, str(scratch)],
        env={**os.environ, "SPARK_HOME": str(home), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    assert len(list((scratch / "executors").iterdir())) == 2
    came = take_all(broker, "out", "o")
    assert sorted(came.bodies) == sorted(numbers)
    assert set(came.attempts) == {1}
    assert broker.channel_stats("t", "c").leased == 0

    told = json.loads(done.stdout.splitlines()[-1])
    assert told["killed"]
    answers = [body.split() for body in take_all(broker, "answers", "a").bodies]
    # one process was killed after an answer, before it could say that the message is done
    assert {number for _, number in answers} == set(numbers)
    first = next(int(jvm) for jvm, number in answers if number == b"0")
    assert first != told["asking"]
    assert {int(jvm) for jvm, _ in answers} == {first, told["answering"]}
    assert broker.channel_stats("tasks", "work").in_flight == 0
