"""A nats-server, and forwarders as processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import Child
from support.real_nats import NatsServer

#: Functions of a forwarder after or before which a test ends it: name -> class and method.
POINTS = {
    "before the batch is sent": ("jetstream.JetStream", "send", "before"),
    "when the batch was sent": ("jetstream.JetStream", "send", "after"),
    "when the batch was stored": ("jetstream.JetStream", "confirm", "after"),
    "when the lease was finished": ("forwarder.Forwarder", "_finish", "after"),
    "when nsqd got the batch": ("nsqd.Nsqd", "send", "after"),
}

#: The planted fault: markers are neither read nor compared.
FAULT = """
from shmq.forward.jetstream import JetStream
JetStream._read_marker = lambda self: None
JetStream._fence = lambda self: b""
"""

_DEATH = """
import os, shmq.forward.forwarder, shmq.forward.jetstream, shmq.forward.nsqd
kind = shmq.forward.{kind}
real, calls = kind.{method}, []
def dying(*args):
    calls.append(1)
    if len(calls) == {count} and "{when}" == "before":
        os.kill(os.getpid(), 9)
    answer = real(*args)
    if len(calls) == {count}:
        os.kill(os.getpid(), 9)
    return answer
kind.{method} = dying
"""

Forward = Callable[..., Child]


@pytest.fixture
def nats(tmp_path: Path, keep: Callable[[Any], Any]) -> NatsServer:
    """A nats-server with an empty stream S of the subjects `s` and `shmq.S.>`."""
    server: NatsServer = keep(NatsServer(tmp_path / "nats"))
    assert "error" not in server.make("S", "s", "shmq.S.>")
    return server


@pytest.fixture
def forward(instance: str, keep: Callable[[Any], Any]) -> Forward:
    """`forward(target, *words)`: a `shmq forward t c` of `instance`.

    die: a name of POINTS; it kills itself there at the `count`-th time. fault: with FAULT.
    """

    def start(
        target: str, *words: str, die: str = "", count: int = 3, fault: bool = False
    ) -> Child:
        code = "import sys, shmq\n"
        if fault:
            code += FAULT
        if die:
            kind, method, when = POINTS[die]
            code += _DEATH.format(kind=kind, method=method, when=when, count=count)
        code += "from shmq.__main__ import main\nsys.exit(main())\n"
        argv = [sys.executable, "-c", code, "forward", "t", "c", target]
        return keep(Child([*argv, f"--instance={instance}", "--json", *words]))

    return start
