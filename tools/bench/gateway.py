"""nsqd's own bench_writer and bench_reader against a real nsqd and against shmq's gateway.

Both servers live as long as the bench and keep everything in memory; the server that is measured
has the cores. Programs: `tools/dev peers`."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import ClassVar

from runs import LINES, PATIENCE, PUB, PUBS, SUB, Contestant, Lacking, Outcome, Plan

BIN = Path(__file__).parents[2] / "build" / "peers" / "bin"
READY = 2500  # RDY of bench_reader: nsqd's highest
MEMORY = ("--mem-queue-size=4000000", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
LISTENING = re.compile(r"(TCP|HTTP): listening on (\S+)")
DONE = re.compile(r"duration: (\S+) .* ([0-9.]+)ops/s")


class _Server(Contestant):
    """Started for its first run."""

    lines: ClassVar[tuple[str, ...]] = (PUBS, SUB, PUB)

    def __init__(self, scratch: Path) -> None:
        self._data = scratch / self.name.replace(" ", "-")
        self._log = scratch / f"{self._data.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._addresses: dict[str, str] = {}
        self._numbers = itertools.count()

    def _argv(self) -> list[str]:
        raise NotImplementedError

    def version(self) -> str:
        for tool in ("nsqd", "bench_writer", "bench_reader"):
            if not (BIN / tool).exists():
                raise Lacking(f"no {tool}: tools/dev peers")
        return "1.3.0"

    def run(self, plan: Plan) -> Outcome:
        if self._process is None:
            self._start()
        topic = f"t{next(self._numbers)}"
        batch = 1 if plan.line == PUB else plan.count
        seconds = plan.seconds / 2 if plan.line == SUB else plan.seconds  # the reader is slower
        try:
            done = self._measure(
                "bench_writer", plan, topic, f"-runfor={seconds}s", f"-batch-size={batch}"
            )
            if plan.line == SUB:
                words = (f"-runfor={plan.seconds}s", "-channel=ch", f"-rdy={READY}")
                done = self._measure("bench_reader", plan, topic, *words)
        finally:
            url = f"http://{self._addresses['HTTP']}/topic/delete?topic={topic}"
            urllib.request.urlopen(url, b"", PATIENCE).close()
        return done

    def _measure(self, tool: str, plan: Plan, topic: str, *words: str) -> Outcome:
        argv = [str(BIN / tool), f"-nsqd-tcp-address={self._addresses['TCP']}", f"-topic={topic}"]
        argv += [f"-size={LINES[plan.line].size}", *words]
        run = subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=plan.seconds + 3 * PATIENCE
        )
        found = DONE.search(run.stderr + run.stdout)
        if found is None:
            raise RuntimeError(f"{tool} said no rate but {run.stderr.strip()[-200:]}")
        seconds = _seconds(found[1])
        return Outcome(round(float(found[2]) * seconds), seconds)

    def _start(self) -> None:
        self._data.mkdir()
        argv = [*self._argv(), *MEMORY, f"--data-path={self._data}"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(argv, stderr=log)
        deadline = time.monotonic() + PATIENCE
        while len(self._addresses) < 2:
            said = self._log.read_text()
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not listen: {said[-500:]}")
            self._addresses = dict(LISTENING.findall(said))
            time.sleep(0.01)

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


class Nsqd(_Server):
    name = "nsqd"

    def _argv(self) -> list[str]:
        return [str(BIN / "nsqd")]


class OurGateway(_Server):
    name = "shmq gateway"

    def version(self) -> str:
        import shmq

        super().version()
        return shmq.__version__

    def _argv(self) -> list[str]:
        instance = f"bench-gateway-{os.getpid()}"
        return [
            sys.executable,
            "-m",
            "shmq",
            "serve",
            f"--instance={instance}",
            f"--arena-size={4 << 30}",
            "--on-stop=flush",
        ]


def _seconds(text: str) -> float:
    """Go's duration below a minute: 1.5s, 900ms."""
    found = re.fullmatch(r"([0-9.]+)(m?s)", text)
    if found is None:
        raise RuntimeError(f"not a duration in seconds: {text}")
    return float(found[1]) / (1 if found[2] == "s" else 1000)
