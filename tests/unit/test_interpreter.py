"""Which Python the processes of shmq are started by."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import spawn
from pathlib import Path

import pytest

import shmq
from shmq import interpreter


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(sys.executable))
    return monkeypatch


def test_a_python_that_the_program_has_named_is_used(
    named: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, log = sys.executable, tmp_path / "log"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho start >> {log}\nexec {real} "$@"\n')
    python.chmod(0o755)
    named.setattr(sys, "executable", "/no/python")
    spawn.set_executable(str(python))
    with shmq.Broker(disk=False) as broker:
        broker.producer("topic").publish(b"body")
    assert log.read_text().splitlines() == ["start"]


def test_a_frozen_application_does_not_start_itself(named: pytest.MonkeyPatch) -> None:
    started = []
    named.setattr(sys, "frozen", True, raising=False)
    named.setattr(subprocess, "Popen", lambda *args, **_: started.append(args))
    for use in (shmq.Broker, lambda: interpreter.run_code("pass")):
        with pytest.raises(shmq.ShmqError, match=r"is a frozen application.*set_executable"):
            use()
    assert not started


def test_a_program_that_embeds_python_is_told_what_to_name(named: pytest.MonkeyPatch) -> None:
    named.setattr(spawn, "_python_exe", None)
    named.setattr(sys, "executable", "")
    with pytest.raises(shmq.ShmqError, match=r"this program embeds Python.*set_executable"):
        interpreter.run_code("pass")


@pytest.mark.parametrize(("python", "why"), [("/no/python", "No such file"), ("/", "Permission")])
def test_a_python_that_cannot_be_started_is_named(
    named: pytest.MonkeyPatch, python: str, why: str
) -> None:
    spawn.set_executable(python)
    with pytest.raises(shmq.ShmqError, match=rf"by {python}: {why}.*set_executable"):
        shmq.Broker(disk=False)
