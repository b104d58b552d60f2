"""The lines that tools/bench/bench.py measures, and how: runs in processes of their own.

A contestant makes a link in the parent; the link goes to fresh processes (spawned, not forked),
which open their ends of it and run their loops. The loops are measured, the code before
`ends.start` is not."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

PATIENCE = 10.0  # seconds to wait for a message or for room; longer means something is broken
QUIET = 0.5  # seconds without a message that tell one of many consumers that it was the last
CHECK_EVERY = 100  # messages between two looks at the clock
END = b"end"  # the last body of a run; shorter than any other
MANY_PROCESSES = 4  # producers, and as many consumers

ONE, MADE, LOOPED, NUMPY, MANY = "one", "lists", "loops", "numpy", "many"
APART, TOGETHER = "roundtrip", "roundtrip1"
LARGE, IN_PLACE = "large", "inplace"
SPILL, RESTORE = "spill", "restore"
EXPIRY = "expiry"
PUBS, PUBS_NEW, SUB, PUB, PUB_2, PUB_8 = "mpub", "mpub-new", "sub", "pub", "pub2", "pub8"
POST, POSTS = "http-pub", "http-mpub"
FORWARD = "forward"
KILL = "kill"
SPARK = "spark"
SPARK_READ, SPARK_STREAM, SPARK_DISK = "spark-read", "spark-stream", "spark-disk"
SPARK_WRITE, SPARK_PARQUET = "spark-write", "spark-parquet"
SPARK_HAND_OVER, SPARK_LISTS = "spark-handover", "spark-lists"
ROUND_TRIPS = (APART, TOGETHER)
#: Lines of times that show one more figure beside the median, and which.
TAILS = {**dict.fromkeys((*ROUND_TRIPS, SPARK_HAND_OVER), "p99"), KILL: "longest"}


@dataclass(frozen=True)
class Line:
    """One thing that is measured. Of `unit` ms, us and ns less is better, of the others more."""

    title: str
    unit: str = "M/s"
    size: int | None = None  # of a body, where it is not the one asked for
    group: str | None = None  # measured only if this, or the line, is named

    @property
    def less_is_better(self) -> bool:
        return self.unit in ("ms", "us", "ns")

    def value(self, outcome: Outcome, size: int) -> float:
        """The value that is compared: a rate, the median round trip, or the time of one message."""
        nbytes = outcome.rate * (self.size or size)
        return {
            "M/s": outcome.rate / 1e6,
            "k/s": outcome.rate / 1e3,
            "MB/s": nbytes / 1e6,
            "GB/s": nbytes / 1e9,
            "ms": (outcome.p50_us or 0.0) / 1e3,
            "us": outcome.p50_us or 0.0,
            "ns": 1e9 / outcome.rate,
        }[self.unit]

    def tail(self, outcomes: Sequence[Outcome]) -> float:
        """The figure of TAILS in the line's unit: the median of the p99, or the longest time."""
        longest = [outcome.longest_us for outcome in outcomes if outcome.longest_us is not None]
        tails = [outcome.p99_us or 0.0 for outcome in outcomes]
        microseconds = max(longest) if longest else statistics.median(tails)
        return microseconds / 1e3 if self.unit == "ms" else microseconds


LINES = {
    ONE: Line("one at a time"),
    MADE: Line("lists, bodies made"),
    LOOPED: Line("lists, bodies looped over"),
    NUMPY: Line("numpy and Arrow"),
    MANY: Line("lists, 4 producers x 4 consumers"),
    APART: Line("blocking round trip, two cores", "us"),
    TOGETHER: Line("blocking round trip, one core", "us"),
    LARGE: Line("1 MiB bodies", "GB/s", 1 << 20),
    IN_PLACE: Line("take, view, finish: one message", "ns"),
    SPILL: Line("to disk, 256-byte records", "MB/s", 256),
    RESTORE: Line("from disk, 256-byte records", "MB/s", 256),
    EXPIRY: Line("expiry of one message", "ns"),
    KILL: Line("SIGKILL to redelivery", "ms"),
    PUBS: Line("over TCP: MPUB of lists, 2 clients", "k/s", 200),
    PUBS_NEW: Line("over TCP: MPUB to a new topic", "k/s", 200),
    SUB: Line("over TCP: take and finish, 2 clients", "k/s", 200),
    PUB: Line("over TCP: PUB, 1 client", "k/s", 200),
    PUB_2: Line("over TCP: PUB, 2 clients", "k/s", 200),
    PUB_8: Line("over TCP: PUB, 8 clients", "k/s", 200),
    POST: Line("over HTTP: /pub, 2 clients", "k/s", 200),
    POSTS: Line("over HTTP: /mpub of lists, 2 clients", "k/s", 200),
    FORWARD: Line("a channel into JetStream", "k/s"),
    SPARK_READ: Line("Spark reads a batch", group=SPARK),
    SPARK_STREAM: Line("Spark reads a micro-batch", group=SPARK),
    SPARK_DISK: Line("Spark reads a batch from disk", group=SPARK),
    SPARK_WRITE: Line("Spark writes", group=SPARK),
    SPARK_PARQUET: Line("Spark writes, then reads", group=SPARK),
    SPARK_HAND_OVER: Line("from task to task, one at a time", "us", group=SPARK),
    SPARK_LISTS: Line("from task to task, lists of 1000", group=SPARK),
}


@dataclass(frozen=True)
class Plan:
    """The values that all contestants of a line share."""

    line: str
    seconds: float
    size: int
    count: int  # bodies in a list
    capacity: int  # messages that wait at most, for peers that can be told
    memory: int  # shmq's mem_queue_size
    window: int  # messages shmq's producer lets be under way before it pauses; 0: no such limit
    rows: int  # of a query in Spark

    @property
    def in_lists(self) -> bool:
        return self.line in (MADE, LOOPED, MANY)

    @property
    def cpus(self) -> tuple[int, int] | None:
        """Where the two processes of a round trip run, because the kernel's choice between one
        core and two would decide the figure; None: where it likes."""
        cpus = sorted(os.sched_getaffinity(0))
        if self.line not in ROUND_TRIPS:
            return None
        return (cpus[0], cpus[-1] if self.line == APART else cpus[0])


@dataclass
class Outcome:
    """One run: messages and seconds, or times and their quantiles in microseconds."""

    messages: int
    seconds: float
    p50_us: float | None = None
    p99_us: float | None = None
    longest_us: float | None = None
    fill: float | None = None  # median of the queue's fill level, 0 to 1
    spilled: int = 0
    paused: int = 0  # times the producer waited for the window
    lost: int = 0  # messages of killed consumers that nobody got

    @classmethod
    def reported(cls, report: dict[str, float]) -> Outcome:
        """From the object that one of the programs in C prints."""
        quantiles = (report.get("p50_us"), report.get("p99_us"))
        return cls(int(report["messages"]), report["seconds"], *quantiles)

    @property
    def rate(self) -> float:
        return self.messages / self.seconds


class Lacking(Exception):
    """A contestant that is not there, and why."""


class Contestant(ABC):
    name: ClassVar[str]
    lines: ClassVar[tuple[str, ...]]
    note: ClassVar[str] = ""
    list_note: ClassVar[str] = ""

    @abstractmethod
    def version(self) -> str:
        """Raises ImportError or Lacking when it cannot run here."""

    @abstractmethod
    def run(self, plan: Plan) -> Outcome: ...

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """Called at the end of all runs."""


# ---- the processes of a run ----------------------------------------------------------------------

Role = Callable[..., dict[str, float]]


class Ends:
    """One side of a run: reports when it is ready and begins together with the others."""

    def __init__(self, plan: Plan, pipe: Any, number: int) -> None:
        self.plan, self._pipe = plan, pipe
        self.number = number  # among those of its kind

    def start(self) -> int:
        gc.collect()
        gc.freeze()
        self._pipe.send("ready")
        self._pipe.recv()
        return time.monotonic_ns()


def _child(role: Role, link: Any, plan: Plan, number: int, cpu: int | None, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    try:
        pipe.send(role(link, Ends(plan, pipe, number)))
        pipe.recv()  # the others are done too: closing now loses nothing (it did with zmq)
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent is gone
            pipe.send(error if type(error).__module__ == "builtins" else RuntimeError(repr(error)))


def run_processes(
    roles: Sequence[tuple[Role, int | None]],
    link: Any,
    plan: Plan,
    level: Callable[[], float | None] = lambda: None,
) -> tuple[list[dict[str, float]], float | None]:
    """Each role in a process of its own, on the core it is given, who takes before who sends: what
    they report, and the median of `level`, which is asked 20 times a second meanwhile."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for index, (role, cpu) in enumerate(roles):
            number = sum(other is role for other, _ in roles[:index])
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child, args=(role, link, plan, number, cpu, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            _receive(pipe, 30)
        for pipe in pipes:
            pipe.send("go")
        levels = _sample(level, pipes[0], plan.seconds)
        reports = [_receive(pipe, plan.seconds + 3 * PATIENCE) for pipe in pipes]
        for pipe in pipes:
            pipe.send("done")
        for process in processes:
            process.join(PATIENCE)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join(1)
                process.kill()
    return reports, sorted(levels)[len(levels) // 2] if levels else None


def run_pair(
    first: Role,
    second: Role,
    link: Any,
    plan: Plan,
    level: Callable[[], float | None] = lambda: None,
) -> Outcome:
    """One process that sends and one that takes; or one that calls and one that answers."""
    here, there = plan.cpus or (None, None)
    (taken, sent), fill = run_processes([(second, there), (first, here)], link, plan, level)
    report = {**taken, **sent}
    return Outcome(
        messages=int(report["messages"]),
        seconds=(report["ended"] - report["began"]) / 1e9,
        p50_us=report.get("p50_us"),
        p99_us=report.get("p99_us"),
        fill=fill,
        paused=int(report.get("paused", 0)),
    )


def run_many(
    send: Role, take: Role, link: Any, plan: Plan, level: Callable[[], float | None]
) -> Outcome:
    """4 processes that send and 4 that take, from the first's begin to the last message."""
    n = MANY_PROCESSES
    reports, fill = run_processes([(take, None)] * n + [(send, None)] * n, link, plan, level)
    return Outcome(
        messages=int(sum(report["messages"] for report in reports[:n])),
        seconds=(
            max(report["ended"] for report in reports[:n])
            - min(report["began"] for report in reports[n:])
        )
        / 1e9,
        fill=fill,
        paused=int(sum(report.get("paused", 0) for report in reports[n:])),
    )


def compile_c(program: Path, sources: Sequence[Path], *words: str) -> Path:
    """Make the program. Raises Lacking if there is no compiler, or if it finds a fault."""
    command = [os.environ.get("CC", "cc"), *words, "-pthread", "-D_GNU_SOURCE"]
    command += ["-o", os.fspath(program), *map(os.fspath, sources)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise Lacking(f"{command[0]} does not run: {error}") from None
    except subprocess.CalledProcessError as error:
        raise Lacking(f"{program.name} does not compile: {error.stderr[-300:]}") from None
    return program


def report_of(program: Path, mode: str, options: dict[str, Any], seconds: float) -> Any:
    """The JSON that a program prints which measures for so many seconds."""
    words = [
        str(item)
        for name, value in options.items()
        for item in (f"--{name.replace('_', '-')}", value)
    ]
    done = subprocess.run(
        [os.fspath(program), mode, *words],
        capture_output=True,
        text=True,
        timeout=seconds + 3 * PATIENCE,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit status {done.returncode}")
    return json.loads(done.stdout)


def _receive(pipe: Any, timeout: float) -> Any:
    if not pipe.poll(timeout):
        raise TimeoutError(f"no answer from a process of the run within {timeout:.0f} s")
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _sample(level: Callable[[], float | None], pipe: Any, seconds: float) -> list[float]:
    """Fill levels while the producers are at it, without the first tenth."""
    levels = []
    began = time.monotonic()
    while (past := time.monotonic() - began) < seconds and not pipe.poll(0.05):
        now = level()
        if now is not None and past > seconds / 10:
            levels.append(now)
    return levels


# ---- what loops need -----------------------------------------------------------------------------


def list_of_bodies(plan: Plan) -> list[bytes]:
    """Each another object, or pickle would send one and 199 references to it."""
    return [bytes(bytearray(b"x" * plan.size)) for _ in range(plan.count)]


def quantiles(samples: array[int]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "messages": len(ordered),
        "p50_us": ordered[len(ordered) // 2] / 1e3,
        "p99_us": ordered[len(ordered) * 99 // 100] / 1e3,
    }
