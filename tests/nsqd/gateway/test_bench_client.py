"""The client in C with which tools/bench/gateway.py measures counts as the servers do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.nsq_client import Server
from support.processes import ROOT, WATCHDOG

SOURCE = ROOT / "tools" / "bench" / "nsq_client.c"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client."""
    made = tmp_path_factory.mktemp("bench") / SOURCE.stem
    words = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread", "-D_GNU_SOURCE"]
    subprocess.run([os.environ.get("CC", "cc"), *words, "-o", made, SOURCE], check=True)
    return made


@pytest.mark.parametrize("mode", ["pub", "mpub", "http-pub", "http-mpub", "roundtrip"])
def test_it_counts_what_was_published(server: Server, topic: str, program: Path, mode: str) -> None:
    protocol = "http" if mode.startswith("http") else "tcp"
    words = ["--address", f"127.0.0.1:{server.port(protocol)}", "--topic", topic]
    words += ["--seconds", "0.05", "--connections", "2", "--batch", "7", "--size", "30"]
    said = subprocess.run(
        [program, mode, *words], capture_output=True, check=True, timeout=WATCHDOG
    )
    messages = json.loads(said.stdout)["messages"]
    first = mode == "roundtrip"  # one that is not measured
    assert server.topic(topic)["message_count"] == messages + first > first
