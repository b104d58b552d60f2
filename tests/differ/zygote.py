"""Runs programs of one kind on one side, each in a forked child: `python -m differ.zygote KIND SIDE
[FAULT]`. Programs come as lines of JSON, and so do the answers go.

The child leads a session of its own, whose processes are killed after it. A program that says
nothing for a long time hangs; that is an observation like any other.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any


def main() -> None:
    name, side, fault = sys.argv[1:4]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind = importlib.import_module(f"differ.{name}")
    if fault:
        importlib.import_module("differ.planted").plant(fault)
    kind.begin(side)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _run(kind, side, request["program"], request["silence"])
        out.write(json.dumps(answer) + "\n")
        out.flush()
    kind.end(side)


def _run(kind: Any, side: str, program: Any, silence: float) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            os.close(read)
            quiet = os.open(os.devnull, os.O_RDWR)
            os.dup2(quiet, 0)
            if not os.environ.get("DIFFER_LOUD"):
                os.dup2(quiet, 2)
                os.dup2(quiet, 1)
            os.set_inheritable(write, False)

            def say(*seen: object) -> None:
                os.write(write, json.dumps(seen).encode() + b"\n")

            kind.run(side, program, say)
            status = 0
        except BaseException:
            os.write(write, json.dumps(["error", traceback.format_exc()]).encode() + b"\n")
        finally:
            os._exit(status)
    os.close(write)
    found, hung = bytearray(), False
    poll = select.poll()
    poll.register(read, select.POLLIN)
    child = os.pidfd_open(pid)
    poll.register(child, select.POLLIN)
    while True:
        ready = dict(poll.poll(silence * 1000))
        if not ready:
            hung = True
            break
        if read in ready:
            data = os.read(read, 1 << 16)
            if not data:
                break
            found += data
        elif child in ready:  # a grandchild may hold the pipe
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    getattr(kind, "after", int)(pid)
    os.close(read)
    os.close(child)
    seen = [json.loads(line) for line in bytes(found).splitlines()]
    return {"seen": seen, "hangs": hung}


if __name__ == "__main__":
    main()
