"""The driver of fleet_kills.py: a program that keeps one query alive, and who starts that program.

python fleet_driver.py drive WORK
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chaos.fleet.verdict import NAMED, is_of_a_task
from spark_kills import PAUSE, PER_TRIGGER, Driver, Rest
from support.spark_cluster import EXECUTOR_MEMORY, JAVA_OPTIONS

#: Status of a driver that found another one of its query.
SUPERSEDED = 3
#: Words of the errors with which a query ends that finds a newer one of its kind.
_OTHERS = (
    "LeaseFenced",
    "CONCURRENT_STREAM_LOG_UPDATE",
    "ConcurrentModificationException",
    "multiple concurrent streaming queries",
)
#: Seconds that leases live: far longer than a driver takes to start beside much other work.
TTL = 600.0
#: How long an instance may take for an answer.
_TIMEOUT = "5s"
_LIVES = "a query whose leases live for s: "
_SAID = "the query ended with "


@dataclass(frozen=True)
class Work:
    """The parameters of a driver. reading: options of the source. writing: of the sink; None: it
    writes parquet files."""

    reading: dict[str, str]
    writing: dict[str, str] | None
    scratch: str
    master: str
    available_now: bool
    transport: str
    ttl: float


def output(scratch: Path) -> Path:
    """Where the query writes."""
    return scratch / "output"


class Orders:
    """The orders to a driver on its stdin: how long leases are to live from the next query on,
    which begins at once; and at the end of its stdin that it is to stop."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self.stopping = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.ttl = float(line)
        self.stopping.set()


def drive(work: Work) -> None:
    """The query, begun again whenever it ends, until stdin ends. A query that ended with a loss
    goes on once without what was lost, as its error says; the one after it is strict again."""
    import shmq.spark

    spark = shmq.spark.session(
        work.master,
        "shmq fleet kills",
        spark_executor_memory=EXECUTOR_MEMORY,
        spark_executor_extraJavaOptions=JAVA_OPTIONS,
        spark_driver_extraJavaOptions=JAVA_OPTIONS,
        spark_sql_shuffle_partitions=2,
        spark_log_level="OFF",
        spark_local_dir=work.scratch,
    )
    orders = Orders(work.ttl)
    stopping = orders.stopping
    query, rest, loose, ttl = None, Rest(), False, work.ttl
    while not stopping.wait(PAUSE) or (query is not None and query.isActive):
        if query is not None and query.isActive:
            if orders.ttl != ttl or (stopping.is_set() and not work.available_now):
                query.stop()
            continue
        if query is not None:
            error = query.exception()
            loose = error is not None and _tell(str(error))
            if error is not None:
                rest.failed(query.lastProgress is not None)
            query = None
        if not stopping.is_set() and rest.over:
            ttl = orders.ttl
            query = _start(spark, replace(work, ttl=ttl), loose)
            print(f"{_LIVES}{ttl}", flush=True)
    spark.stop()


def _tell(error: str) -> bool:
    """Print how a query ended; whether with a loss. Ends the process if it is not the newest. A
    task that finds its lease ended is no loss yet: the next query says so if it is one."""
    print(error[:3000], flush=True)
    named = NAMED.findall(error)
    for name, text in named:
        print(f"{_SAID}{name}: {text}", flush=True)
    if any(word in error for word in _OTHERS):
        os._exit(SUPERSEDED)
    return any(
        name == "DataLoss" or (name == "LeaseLost" and not is_of_a_task(name, text))
        for name, text in named
    )


def _start(spark: Any, work: Work, loose: bool) -> Any:
    read = {**work.reading, "topic": "t", "channel": "c", "consumer": "kills"}
    read |= {"transport": work.transport, "onMissingHost": "wait", "hostTimeout": _TIMEOUT}
    read |= {"leaseTtl": f"{work.ttl}s", "minPartitionRows": "100", "numPartitions": "3"}
    if loose:
        read |= {"failOnDataLoss": "false", "onLostLease": "warn"}
    rows = spark.readStream.format("shmq").options(**read, maxMessagesPerTrigger=PER_TRIGGER).load()
    writer = _writer(rows, work).option("checkpointLocation", f"{work.scratch}/checkpoint")
    now = work.available_now or loose
    trigger = {"availableNow": True} if now else {"processingTime": "100 milliseconds"}
    return writer.trigger(**trigger).start()


def _writer(rows: Any, work: Work) -> Any:
    if work.writing is None:
        files = rows.select("id", "body", "attempts").writeStream.format("parquet")
        return files.option("path", str(output(Path(work.scratch))))
    body = rows.selectExpr("concat_ws(' ', id, cast(body as string), attempts) as body")
    write = {**work.writing, "hostTimeout": _TIMEOUT, "timeout": _TIMEOUT}
    if not work.available_now:
        write["onMissingHost"] = "wait"  # else the query fails, and writes its rows again
    return body.writeStream.format("shmq").options(**write)


class FleetDriver(Driver):
    """The driver that lives, and those before it: with the triggers, and the transports, in
    turns."""

    def __init__(
        self,
        reading: dict[str, str],
        writing: dict[str, str] | None,
        master: str,
        scratch: Path,
    ) -> None:
        """reading, writing: of `Work`."""
        self._reading, self._writing = reading, writing
        self.ttl = TTL
        """Seconds that leases live, of this driver and of the next ones."""
        self._master = self._next_master = master
        self._transports = itertools.cycle(("tcp", "auto", "tcp"))
        self.transport = ""
        self._log_path = scratch / "drivers.log"
        super().__init__("", scratch)

    def _begin(self) -> subprocess.Popen[bytes]:
        self.transport = next(self._transports)
        work = Work(
            self._reading,
            self._writing,
            str(self._scratch),
            self._next_master,
            next(self._available_now),
            self.transport,
            self.ttl,
        )
        self._next_master = self._master
        return self._launch(__file__, json.dumps(asdict(work)))

    def order(self, ttl: float) -> None:
        """Have leases live for so many seconds from the next query on, which begins soon."""
        self.ttl = ttl
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has died, and the next one is told at its start
            self.process.stdin.write(f"{ttl}\n".encode())
            self.process.stdin.flush()

    def obeys(self) -> bool:
        """Whether the last query that began has leases that live as long as they are to."""
        said = self._log_path.read_text(errors="replace").splitlines()
        begun = [line for line in said if line.startswith(_LIVES)]
        return bool(begun) and begun[-1] == f"{_LIVES}{self.ttl}"

    def named(self) -> list[tuple[str, str]]:
        """The errors, of those that the documentation names, that queries ended with."""
        said = self._log_path.read_text(errors="replace")
        lines = [line[len(_SAID) :] for line in said.splitlines() if line.startswith(_SAID)]
        return [found for line in lines for found in NAMED.findall(line)]

    def signal_all(self, number: int) -> None:
        """Send a signal to the driver and what it has started: its JVM, its Python processes."""
        for process in self.processes(""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def replace(self) -> subprocess.Popen[bytes]:
        """Start another driver, without a cluster, whose cores this one holds. Returns this one,
        which is not ended."""
        older, self._next_master = self.process, "local[2,4]"
        self.process = self._begin()
        return older

    def resume(self, older: subprocess.Popen[bytes]) -> None:
        """SIGCONT for all processes of an older driver."""
        for process in self.processes("", old=True):
            with contextlib.suppress(OSError):
                if os.getsid(process.pid) == older.pid:
                    os.kill(process.pid, signal.SIGCONT)


if __name__ == "__main__":
    drive(Work(**json.loads(sys.argv[2])))
