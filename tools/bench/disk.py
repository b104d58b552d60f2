"""Overflow to disk and back, beside the go-diskqueue that nsqd does it with.

Both write and read records of 256 bytes (4 more for the length) in files of the same size on the
same file system, and sync after every 2500 records or 2 seconds at the latest. go-diskqueue is
measured by its own benchmark, which hands a goroutine one record after the other. shmq is measured
from end to end: a producer fills a channel that nobody reads until all but what fits memory is on
disk; a consumer takes it back, makes bodies and finishes. So shmq's figure has the producer, or the
consumer, and the supervisor on the machine's cores.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from runs import (
    LINES,
    PATIENCE,
    RESTORE,
    SPILL,
    Contestant,
    Lacking,
    Outcome,
    Plan,
)

MODULE, VERSION = "github.com/nsqio/go-diskqueue", "v1.1.0"
SYNC_EVERY, SYNC_TIMEOUT = 2500, 2.0  # what its benchmarks call New with
FILE_BYTES = {SPILL: 1024768 * 100, RESTORE: 1024768}
MEMORY = 10_000  # shmq's mem_queue_size: nsqd's default
HEADER = 26  # of a record: timestamp, attempts, id
CHANNEL = "bench"


class OurDisk(Contestant):
    name = "shmq"
    lines: ClassVar[tuple[str, ...]] = (SPILL, RESTORE)
    note = "from its producer, to its consumer"

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def version(self) -> str:
        import shmq

        return shmq.__version__

    def run(self, plan: Plan) -> Outcome:
        with self._broker(plan) as broker:
            spilled = _spill(broker, plan)
            return spilled if plan.line == SPILL else _restore(broker, plan)

    @contextmanager
    def _broker(self, plan: Plan) -> Iterator[Any]:
        import shmq

        with (
            tempfile.TemporaryDirectory(dir=self._scratch) as path,
            shmq.Broker(
                path,
                f"bench-disk-{os.getpid()}",
                mem_queue_size=MEMORY,
                max_bytes_per_file=FILE_BYTES[plan.line],
                sync_every=SYNC_EVERY,
                sync_timeout=SYNC_TIMEOUT,
            ) as broker,
        ):
            broker.create_channel("t", CHANNEL)
            try:
                yield broker
            finally:  # nothing is worth flushing
                broker.delete_topic("t")


def _stats(broker: Any) -> Any:
    return broker.stats().channel("t", CHANNEL)


def _spill(broker: Any, plan: Plan) -> Outcome:
    producer = broker.producer("t")
    size = (LINES[plan.line].size or 0) - HEADER
    bodies = [bytes(bytearray(os.urandom(size))) for _ in range(plan.count)]
    began = time.monotonic()
    while time.monotonic() < began + plan.seconds:
        producer.publish_many(bodies, timeout=PATIENCE)
    seconds = time.monotonic() - began
    return Outcome(_stats(broker).spilled, seconds)


def _restore(broker: Any, plan: Plan) -> Outcome:
    before, received = _stats(broker), 0
    with broker.consumer("t", CHANNEL, max_in_flight=1000) as consumer:
        began = time.monotonic()
        while received < before.depth:
            batch = consumer.take_many(plan.count, PATIENCE)
            received += len(batch.bodies())
            batch.finish()
            if not batch:
                raise TimeoutError(f"no message for {PATIENCE:g} s, {received} of {before.depth}")
        seconds = time.monotonic() - began
    return Outcome(_stats(broker).restored - before.restored, seconds)


class GoDiskQueue(Contestant):
    name = "go-diskqueue"
    lines: ClassVar[tuple[str, ...]] = (SPILL, RESTORE)
    note = "its own benchmark"

    def __init__(self, scratch: Path, build: Path) -> None:
        self._scratch, self._module = scratch / "go", build / "go-diskqueue"

    def version(self) -> str:
        """The module is fetched by Go's own client, into a module of ours that only requires it."""
        if shutil.which("go") is None:
            raise Lacking("no Go compiler")
        if not (self._module / "go.sum").exists():
            shutil.rmtree(self._module, ignore_errors=True)
            self._module.mkdir(parents=True)
            self._go("mod", "init", "bench")
            self._go("get", f"{MODULE}@{VERSION}")
        self._scratch.mkdir(exist_ok=True)
        return f"{VERSION}, {self._go('version').split()[2]}"

    def run(self, plan: Plan) -> Outcome:
        size = LINES[plan.line].size
        name = f"BenchmarkDiskQueue{'Put' if plan.line == SPILL else 'Get'}{size}"
        words = ["-run=^$", f"-bench=^{name}$", f"-benchtime={plan.seconds}s"]
        report = self._go("test", *words, MODULE)
        found = re.search(rf"^{name}\S*\s+(\d+)\s+([\d.]+) ns/op", report, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"no result of {name} in: {report.strip()[-200:]}")
        count = int(found[1])
        return Outcome(count, count * float(found[2]) / 1e9)

    def _go(self, *words: str) -> str:
        environment = os.environ | {"TMPDIR": str(self._scratch)}
        if not self._scratch.exists():
            del environment["TMPDIR"]
        done = subprocess.run(
            ["go", *words],
            cwd=self._module,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no word"]
            raise Lacking(f"go {words[0]}: {lines[-1]}")
        return done.stdout
