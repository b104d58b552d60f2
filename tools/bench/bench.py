"""Throughput and latency of shmq beside other ways from one process to another.

All contestants take turns: every round runs each of them once, in rotated order, in processes of
its own; the table shows medians and quartiles over the rounds. shmq acknowledges every message; of
the others only Redis Streams and NATS JetStream do. Nothing here judges: a goal that is missed is a
line, not a failure.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import click
from disk import GoDiskQueue, OurDisk
from ecal_peer import Ecal
from forwarding import NatsPy, OurForwarder
from gateway import Nsqd, OurGateway
from iceoryx import Iceoryx
from javapeers import AeronIpc, ChronicleQueue
from jetstream import JetStream
from kills import OurKills, OurPoolKills, kills
from ours import cores, ours
from peers import peers
from ray_peer import RayQueue
from runs import (
    APART,
    EXPIRY,
    FORWARD,
    IN_PLACE,
    KILL,
    LARGE,
    LINES,
    LOOPED,
    MADE,
    MANY,
    NUMPY,
    ONE,
    POST,
    POSTS,
    PUB,
    PUB_2,
    PUB_8,
    PUBS,
    PUBS_NEW,
    RESTORE,
    SPARK,
    SPARK_DISK,
    SPARK_PARQUET,
    SPARK_READ,
    SPARK_STREAM,
    SPARK_WRITE,
    SPILL,
    SUB,
    TAILS,
    TOGETHER,
    Contestant,
    Lacking,
    Outcome,
    Plan,
    compile_c,
)

TOP = Path(__file__).resolve().parents[2]
#: (line, ours, theirs, goal): at least where more is better, at most where less is
GOALS = (
    (ONE, "shmq", "pyzmq ipc", 3.0),
    (ONE, "shmq", "mp.Queue", 12.0),
    (ONE, "shmq", "Redis Streams", None),
    (ONE, "shmq", "posix_ipc queue", None),
    (ONE, "shmq", "iceoryx2", None),
    (ONE, "shmq", "NATS JetStream", None),
    (ONE, "C core", "Aeron IPC", None),
    (ONE, "C core", "Chronicle Queue", None),
    (MADE, "shmq", "faster-fifo", 25.0),
    (MADE, "shmq", "faster-fifo raw", None),
    (MADE, "shmq", "Redis Streams", None),
    (MADE, "shmq", "NATS JetStream", None),
    (LOOPED, "shmq", "faster-fifo", 12.0),
    (LOOPED, "shmq", "faster-fifo raw", None),
    (NUMPY, "shmq numpy", "C core", 0.7),
    (NUMPY, "shmq Arrow", "C core", 0.7),
    (MANY, "shmq", "faster-fifo", 10.0),
    (MANY, "shmq", "faster-fifo raw", None),
    (MANY, "shmq", "Redis Streams", None),
    (APART, "shmq", "mp.Pipe", 0.6),
    (TOGETHER, "shmq", "mp.Pipe", 0.6),
    (APART, "shmq", "pyzmq REQ/REP", None),
    (TOGETHER, "shmq", "pyzmq REQ/REP", None),
    (APART, "shmq", "iceoryx2", None),
    (APART, "shmq", "eCAL", None),
    (TOGETHER, "shmq", "iceoryx2", None),
    *((line, "C core", "Aeron IPC", None) for line in (APART, TOGETHER)),
    *((line, "C core", "Chronicle Queue", None) for line in (APART, TOGETHER)),
    (APART, "shmq request", "pyzmq REQ/REP", None),
    (TOGETHER, "shmq request", "pyzmq REQ/REP", None),
    (APART, "shmq request", "nsqd", None),
    (APART, "shmq gateway", "nsqd", None),
    (TOGETHER, "shmq gateway", "nsqd", None),
    (KILL, "shmq", "nsqd", None),
    (KILL, "shmq gateway", "nsqd", None),
    (KILL, "shmq", "Redis Streams", None),
    (KILL, "shmq Executor", "ProcessPoolExecutor", None),
    (LARGE, "shmq in place", "memcpy", 0.8),
    (LARGE, "shmq in place", "memcpy in cache", None),
    (LARGE, "shmq copied", "pyzmq ipc", None),
    (IN_PLACE, "shmq 1024 KiB", "shmq 8 KiB", 1.2),
    (SPILL, "shmq", "go-diskqueue", 3.0),
    (RESTORE, "shmq", "go-diskqueue", 3.0),
    (EXPIRY, "10^6", "10^3", 2.4),
    (PUBS, "shmq gateway", "nsqd", 1.0),
    (SUB, "shmq gateway", "nsqd", 1.0),
    *((line, "shmq gateway", "nsqd", 1.0) for line in (PUB, PUB_2, PUB_8)),
    *((line, "shmq gateway", "nsqd", None) for line in (PUBS_NEW, POST, POSTS)),
    (FORWARD, "shmq forward", "nats-py", 0.9),
    (SPARK_READ, "shmq", "only copies", 0.9),
    (SPARK_READ, "shmq over TCP", "shmq", 0.8),
    (SPARK_STREAM, "shmq", "only copies", 0.9),
    (SPARK_DISK, "shmq", "only copies", 0.8),
    (SPARK_WRITE, "shmq", "only copies", 0.9),
    (SPARK_WRITE, "shmq publish=immediate", "only copies", None),
    (SPARK_PARQUET, "shmq", "parquet in memory", 1.0),
    (SPARK_PARQUET, "shmq publish=immediate", "parquet in memory", None),
    (SPARK_PARQUET, "only copies", "parquet in memory", None),
    (SPARK_PARQUET, "shmq", "only copies", None),
)


@dataclass
class Results:
    """All runs of one contestant on one line."""

    line: str
    contestant: str
    size: int
    note: str
    outcomes: list[Outcome] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def measured(self) -> list[Outcome]:
        """Those with a figure: where every message was lost, there is none."""
        return [outcome for outcome in self.outcomes if outcome.messages or not outcome.lost]

    def quartiles(self) -> tuple[float, float, float]:
        values = [LINES[self.line].value(outcome, self.size) for outcome in self.measured]
        if len(values) == 1:
            return values[0], values[0], values[0]
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return low, middle, high

    @property
    def value(self) -> float:
        """The value that goals compare, in the line's unit."""
        return self.quartiles()[1]

    def remarks(self) -> str:
        fills = [outcome.fill for outcome in self.outcomes if outcome.fill is not None]
        found = []
        if fills:
            fill = statistics.median(fills)
            word = "full" if fill > 0.8 else "empty" if fill < 0.2 else "in between"
            if self.contestant == "C core":
                found.append(f"{fill:.0%} of its waits were the producer's")
            else:
                found.append(f"ran {word} ({fill:.0%})")
        pauses = sum(outcome.paused for outcome in self.outcomes)
        if pauses:
            found.append(f"producer paused {pauses}x")
        spilled = sum(outcome.spilled for outcome in self.outcomes)
        if spilled:
            found.append(f"SPILLED {spilled:,} TO DISK")
        if lost := sum(outcome.lost for outcome in self.outcomes):
            found.append(f"{lost} LOST")
        if self.failures:
            found.append(f"{len(self.failures)} FAILED: {self.failures[0]}")
        return "; ".join([*found, self.note] if self.note else found)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "quartiles": self.quartiles() if self.measured else None}


# ---- the machine ---------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _first_line_of("/proc/cpuinfo", "model name"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "disk": _output("stat", "--file-system", "--format=%T", tempfile.gettempdir()),
        "load": os.getloadavg()[0],
        "real_time": os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO),
        "git": _output("git", "-C", str(TOP), "describe", "--always", "--dirty", "--abbrev=12"),
    }


def _first_line_of(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def core_executable(scratch: Path) -> Path | None:
    """A built bench_core that is newer than its sources and has no sanitizer; else one compiled
    here, as the extension is."""
    sources = [*(TOP / "native/core").rglob("*.c"), TOP / "native/bench/bench_core.c"]
    headers = [*(TOP / "native/core").rglob("*.h"), *(TOP / "native/include").glob("*.h")]
    newest = max(path.stat().st_mtime for path in sources + headers)
    for path in TOP.glob("build/**/bench_core"):
        slow = {"asan", "tsan", "debug", "killpoints"} & set(path.parts)
        if path.is_file() and path.stat().st_mtime > newest and not slow:
            return path
    folders = [f"-I{TOP / 'native' / name}" for name in ("include", "core")]
    words = ["-std=gnu11", "-O3", "-DNDEBUG", "-flto", *folders]
    try:
        return compile_c(scratch / "bench_core", sources, *words)
    except Lacking as error:
        click.echo(f"without the core in C: {error}", err=True)
        return None


# ---- the runs ------------------------------------------------------------------------------------


@contextmanager
def contestants(scratch: Path, memory: int, lines: list[str]) -> Iterator[list[Contestant]]:
    """All that can run here, in the order of the table; a line on stderr for each that cannot."""
    with our_broker(scratch, memory) as mine, ExitStack() as stack:
        found: list[Contestant] = []
        disks: list[Contestant] = [OurDisk(scratch), GoDiskQueue(scratch, TOP / "build")]
        servers = [OurGateway(scratch), Nsqd(scratch)]
        others = peers(scratch)
        killed = kills(servers, others)
        core = cores(core_executable(scratch))
        spark = _in_spark(scratch) if any(LINES[line].group == SPARK for line in lines) else []
        stream = JetStream(scratch)
        others += [
            Iceoryx(),
            Ecal(),
            stream,
            OurForwarder(scratch, stream),
            NatsPy(scratch, stream),
            RayQueue(scratch),
            AeronIpc(scratch),
            ChronicleQueue(scratch),
        ]
        for contestant in [*mine, *core, *disks, *servers, *spark, *others, *killed]:
            stack.callback(contestant.close)
            try:
                contestant.version()
            except (ImportError, Lacking) as error:
                click.echo(f"without {contestant.name}: {error}", err=True)
            else:
                found.append(contestant)
        yield found


def _in_spark(scratch: Path) -> list[Contestant]:
    try:
        from spark import in_spark
    except ImportError as error:
        click.echo(f"without Spark: {error}", err=True)
        return []
    return in_spark(scratch)


@contextmanager
def our_broker(scratch: Path, memory: int) -> Iterator[list[Contestant]]:
    try:
        import shmq
    except ImportError as error:
        click.echo(f"without shmq: {error}", err=True)
        yield []
        return
    instance = f"bench-{os.getpid()}"
    path = scratch / "broker"
    path.mkdir()
    with shmq.Broker(data_path=path, instance=instance, mem_queue_size=memory) as broker:
        yield [*ours(broker, instance), OurKills(broker, instance), OurPoolKills()]


def play(found: list[Contestant], plans: list[Plan], rounds: int) -> list[Results]:
    results = {
        (plan.line, contestant.name): Results(
            plan.line, contestant.name, plan.size, _note(contestant, plan)
        )
        for plan in plans
        for contestant in found
        if plan.line in contestant.lines
    }
    runs = len(results) * rounds
    with click.progressbar(
        length=runs, label="runs", file=sys.stderr, show_pos=True, hidden=not sys.stderr.isatty()
    ) as bar:
        for number in range(rounds):
            if not sys.stderr.isatty():
                click.echo(f"round {number + 1} of {rounds}", err=True)
            turn = number % len(found)
            for plan in plans:
                for contestant in found[turn:] + found[:turn]:
                    if plan.line not in contestant.lines:
                        continue
                    result = results[plan.line, contestant.name]
                    try:
                        result.outcomes.append(contestant.run(plan))
                    except Exception as error:
                        result.failures.append(f"{type(error).__name__}: {error}")
                    bar.update(1)
    return list(results.values())


def _note(contestant: Contestant, plan: Plan) -> str:
    return (plan.in_lists and contestant.list_note) or contestant.note


# ---- the tables ----------------------------------------------------------------------------------


def show(results: list[Results]) -> None:
    for name, line in LINES.items():
        of_line = [result for result in results if result.line == name]
        if not of_line:
            continue
        tail = f" {TAILS[name]:>9}" if name in TAILS else ""
        click.echo()
        click.secho(
            f"{line.title + ', ' + line.unit:40} {'median':>9} {'quartiles':>17}{tail}", bold=True
        )
        for result in sorted(of_line, key=_rank):
            click.echo(f"  {result.contestant:38} {_numbers(result)}  {result.remarks()}".rstrip())


def _rank(result: Results) -> float:
    if not result.measured:
        return float("inf")
    return result.value if LINES[result.line].less_is_better else -result.value


def _numbers(result: Results) -> str:
    if not result.measured:
        return f"{'-':>9} {'':17}"
    digits = 3 if LINES[result.line].unit == "M/s" else 1
    low, middle, high = (f"{value:.{digits}f}" for value in result.quartiles())
    text = f"{middle:>9} {f'{low} to {high}':>17}"
    if result.line in TAILS:
        text += f" {LINES[result.line].tail(result.measured):9.1f}"
    return text


def ratios(results: list[Results]) -> list[dict[str, Any]]:
    values = {(r.line, r.contestant): r.value for r in results if r.measured}
    found = []
    for line, mine, theirs, goal in GOALS:
        if (line, mine) in values and (line, theirs) in values:
            ratio = values[line, mine] / values[line, theirs]
            less = LINES[line].less_is_better
            met = goal is None or (ratio <= goal if less else ratio >= goal)
            found.append(
                {
                    "line": line,
                    "contestant": mine,
                    "beside": theirs,
                    "ratio": ratio,
                    "goal": goal,
                    "met": met,
                }
            )
    return found


def show_ratios(found: list[dict[str, Any]]) -> None:
    if found:
        click.echo()
    for item in found:
        line = LINES[item["line"]]
        sign = "<=" if line.less_is_better else ">="
        goal = "" if item["goal"] is None else f"  (goal {sign} {item['goal']:g})"
        title = f"{line.title}: {item['contestant']} / {item['beside']}"
        click.secho(f"{title:66} {item['ratio']:7.2f}x{goal}", fg=None if item["met"] else "yellow")


def on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


# ---- the command ---------------------------------------------------------------------------------


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Turns of everybody.")
@click.option("--seconds", type=click.FloatRange(min=0.05), default=1.0, help="Of each run.")
@click.option("--size", type=click.IntRange(min=8), default=100, help="Bytes of a body.")
@click.option("--count", type=click.IntRange(min=2), default=200, help="Bodies in a list.")
@click.option(
    "--capacity",
    type=click.IntRange(min=1000),
    default=10000,
    help="Messages that may wait, for peers that can be told.",
)
@click.option(
    "--memory", type=click.IntRange(min=1000), default=100_000, help="shmq's mem_queue_size."
)
@click.option(
    "--window",
    type=click.IntRange(min=0),
    default=None,
    help="shmq's producer pauses when this many are under way, so that nothing goes to disk; 0: "
    "it never does.  [default: half the memory]",
)
@click.option(
    "--rows", type=click.IntRange(min=1000), default=1_000_000, help="Of a query in Spark."
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help=f"A line ({', '.join(LINES)}), `spark` for all of Spark's, which are measured only if "
    "named, or a contestant (shmq, C core, mp.Pipe...); repeatable.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all runs there.")
def main(
    rounds: int,
    seconds: float,
    size: int,
    count: int,
    capacity: int,
    memory: int,
    window: int | None,
    rows: int,
    only: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Measure shmq and its peers; one producer and one consumer in two processes, if not said
    otherwise."""
    signal.signal(signal.SIGTERM, on_sigterm)
    window = memory // 2 if window is None else window
    lines = [name for name, line in LINES.items() if name in only or line.group in only]
    lines = lines or [name for name, line in LINES.items() if line.group is None]
    plan = Plan(ONE, seconds, size, count, capacity, memory, window, rows)
    plans = [replace(plan, line=line, size=LINES[line].size or size) for line in lines]
    scratch = Path(tempfile.mkdtemp(prefix="shmq-bench-"))
    try:
        with contestants(scratch, memory, lines) as found:
            names = [name for name in only if name not in LINES and name != SPARK]
            if unknown := set(names) - {contestant.name for contestant in found}:
                raise click.BadParameter(f"not here: {', '.join(sorted(unknown))}")
            found = [item for item in found if not names or item.name in names]
            machine = facts() | {"versions": {item.name: item.version() for item in found}}
            click.echo(" · ".join(f"{key} {machine[key]}" for key in machine if key != "versions"))
            click.echo(" · ".join(f"{k} {v}" for k, v in machine["versions"].items() if v))
            click.echo(
                f"{size}-byte bodies, lists of {count}, at most {capacity} waiting (shmq: "
                f"mem_queue_size={memory}, producer pauses at {window or 'none'}), "
                f"{rounds} rounds of {seconds:g} s each"
            )
            if machine["load"] > machine["cores"] / 4:
                click.secho("others use this machine now: take no figure seriously", fg="yellow")
            results = play(found, plans, rounds)
        show(results)
        compared = ratios(results)
        show_ratios(compared)
        if json_path:
            document = {
                "machine": machine,
                "plan": asdict(plan) | {"line": None, "rounds": rounds},
                "results": [result.to_json() for result in results],
                "ratios": compared,
            }
            json_path.write_text(json.dumps(document, indent=1) + "\n")
    except KeyboardInterrupt:
        click.echo("\nbench: interrupted", err=True)
        sys.exit(130)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
