"""The main job: a PySpark application whose jobs exchange tasks through shmq.

One job's executors publish a task for every source file of a tree; at the same time another job's
executors take these tasks, parse the files and publish a result for each. In the middle one of
these workers is killed while it holds messages. At the end a third job drains the results, Spark
SQL reduces them to one for each path and adds them up, and all of it is compared with a plain
computation in this process, without shmq and without Spark.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click
import psutil
import tasks

import shmq
from shmq import procfs

SLOTS = 4
PUBLISHERS, PARSERS, REDUCERS = 2, 3, 2  # partitions of the three jobs
KILL_AT = 0.4  # of the results
POLL_SECONDS = 0.02
STREAMED = 200_000  # events of the second job


def say(text: str) -> None:
    click.secho(f"--- {text}", bold=True)


class Different(Exception):
    """The result that came through Spark and shmq differs from the plain computation's."""


# ---- progress ----


class Progress:
    """A bar on stderr, or where that is no terminal a line at every tenth."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done, self._tenth = label, total, 0, 0
        self._bar = click.progressbar(length=total, label=label, file=sys.stderr, show_pos=True)
        self._tty = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        if self._tty:
            self._bar.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._tty:
            self._bar.__exit__(*exc)

    def at(self, done: int) -> None:
        done = min(done, self.total)
        step, self.done = done - self.done, done
        if self._tty:
            self._bar.update(step)
        elif self.total and done * 10 // self.total > self._tenth:
            self._tenth = done * 10 // self.total
            click.echo(f"{self.label}: {done} of {self.total}", err=True)


# ---- what the broker says ----


class Monitor:
    """The broker's statistics, as far as the demo asks for them."""

    def __init__(self, broker: shmq.Broker) -> None:
        self._broker = broker

    def channel(self, topic: str, channel: str) -> shmq.ChannelStats:
        return self._broker.stats().channel(topic, channel)

    def published(self, topic: str) -> int:
        return self._broker.stats().topic(topic).message_count

    def is_drained(self, topic: str, channel: str) -> bool:
        found = self.channel(topic, channel)
        return not (found.depth or found.in_flight or found.deferred)

    def holders(self) -> Counter[int]:
        """The processes that hold file tasks: pids and numbers of messages."""
        held: Counter[int] = Counter()
        for session in self.channel(tasks.TASKS, tasks.PARSERS).sessions:
            held[session.client.pid] += session.in_flight
        return +held


# ---- the worker that dies ----


@dataclass
class Kill:
    """One worker killed on purpose, and what became of the messages it held."""

    pid: int
    held: int
    at: int  # CLOCK_MONOTONIC, ns
    returned_ms: float | None = None

    def __str__(self) -> str:
        back = (
            "not seen back" if self.returned_ms is None else f"back {self.returned_ms:.0f} ms later"
        )
        return f"killed Python worker {self.pid}, which held {self.held} messages ({back})"


def kill_a_holder(monitor: Monitor) -> Kill | None:
    """SIGKILL one parsing worker that holds messages for certain; None: just now there is none.

    It is stopped first, so that what the statistics then say of it stays true until it is dead.
    """
    for pid, _ in monitor.holders().most_common():
        if not _is_worker(pid):
            continue
        os.kill(pid, signal.SIGSTOP)
        while _state(pid) not in "TZX":
            time.sleep(0.001)
        held = monitor.holders()[pid]
        if held:
            return _kill(pid, held, monitor)
        os.kill(pid, signal.SIGCONT)
    return None


def _kill(pid: int, held: int, monitor: Monitor) -> Kill:
    def returned() -> int:
        return monitor.channel(tasks.TASKS, tasks.PARSERS).returned

    before = returned()
    kill = Kill(pid, held, time.monotonic_ns())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while kill.returned_ms is None and time.monotonic() < deadline:
        if returned() - before >= held:
            kill.returned_ms = (time.monotonic_ns() - kill.at) / 1e6
        else:
            time.sleep(0.001)
    return kill


def _state(pid: int) -> str:
    """The letter that ps(1) shows; X: gone."""
    stat = procfs.Stat.read(pid)
    return "X" if stat is None else stat.state


def _is_worker(pid: int) -> bool:
    try:
        return b"pyspark" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# ---- Spark ----


#: the worker that is killed on purpose is an ERROR with a stack trace; jobs that fail raise here.
#: Without an appender Spark would take its own configuration.
NO_LOG = """\
rootLogger.level = off
rootLogger.appenderRef.none.ref = none
appender.none.type = Null
appender.none.name = none
"""


@contextlib.contextmanager
def spark_session(scratch: Path) -> Iterator[Any]:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    logging.getLogger().setLevel(logging.CRITICAL + 1)  # py4j's stack traces when interrupted
    logging.getLogger("shmq").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    from pyspark.sql import SparkSession

    quiet = scratch / "log4j2.properties"
    quiet.write_text(NO_LOG)
    pools = scratch / "pools.xml"
    pools.write_text(
        "<allocations>"
        + "".join(
            f'<pool name="{name}"><schedulingMode>FAIR</schedulingMode>'
            "<weight>1</weight><minShare>1</minShare></pool>"
            for name in ("publish", "parse", "reduce")
        )
        + "</allocations>"
    )
    options = {
        # the second 4: a lost worker is not the end of the job, its task is tried again
        "spark.master": f"local[{SLOTS},4]",
        "spark.app.name": "shmq demo",
        "spark.scheduler.mode": "FAIR",
        "spark.scheduler.allocation.file": pools.as_uri(),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={quiet.as_uri()}",
        "spark.local.dir": str(scratch),
        "spark.sql.shuffle.partitions": str(REDUCERS),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder
    for name, value in options.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except BaseException:
        end_java()
        raise
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Spark's own calls into the JVM
    try:
        session.sparkContext.addPyFile(tasks.__file__)
        yield session
    except BaseException:
        with contextlib.suppress(Exception):  # it may be half stopped
            session.sparkContext.cancelAllJobs()
        raise
    finally:
        session.stop()


def end_java() -> None:
    """End the JVM of a session that was interrupted while it started: it might stay for ever."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "pyspark-shell" in child.cmdline():
                child.kill()


class Job(threading.Thread):
    """A Spark job of its own driver thread and FAIR pool; its result is the sum over its tasks."""

    def __init__(
        self, context: Any, pool: str, partitions: int, task: Callable[[int], int]
    ) -> None:
        super().__init__(name=pool, daemon=True)
        self._context, self._partitions, self._task = context, partitions, task
        self.total = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._context.setLocalProperty("spark.scheduler.pool", self.name)
            numbers = self._context.parallelize(range(self._partitions), self._partitions)
            function = tasks.each_partition(self._task)
            self.total = numbers.mapPartitionsWithIndex(function).sum()
        except BaseException as error:
            self.error = error

    def is_over(self) -> bool:
        """Raises what the job failed with."""
        if self.is_alive():
            return False
        if self.error is not None:
            raise self.error
        return True


def run_pipeline(
    context: Any, monitor: Monitor, work: tasks.Work, total: int, with_kill: bool
) -> Kill | None:
    """Publish and parse at the same time, and kill one of the parsing workers in the middle.

    No job waits for another without an end: a parsing task ends when nothing has come for a while.
    If that was too early (no slot was left for the publishers, say), the job is started again.
    """
    publish = functools.partial(tasks.publish_tasks, work, PUBLISHERS)

    def parse(_: int) -> int:
        return tasks.parse_files(work)

    publishing = Job(context, "publish", PUBLISHERS, publish)
    parsing = Job(context, "parse", PARSERS, parse)
    publishing.start()
    parsing.start()
    kill: Kill | None = None
    with Progress("parse", total) as progress:
        while True:
            done = monitor.published(tasks.RESULTS)
            progress.at(done)
            if with_kill and kill is None and done >= KILL_AT * total:
                kill = kill_a_holder(monitor)
            if parsing.is_over():
                if publishing.is_over() and monitor.is_drained(tasks.TASKS, tasks.PARSERS):
                    break
                parsing = Job(context, "parse", PARSERS, parse)
                parsing.start()
            time.sleep(POLL_SECONDS)
    click.echo(
        f"published {publishing.total} file tasks, {monitor.published(tasks.RESULTS)} results"
    )
    return kill


def drain(context: Any, monitor: Monitor, work: tasks.Work) -> int:
    """The results into Parquet files; how many messages that were."""
    written = 0
    while not monitor.is_drained(tasks.RESULTS, tasks.REDUCER):
        job = Job(context, "reduce", REDUCERS, lambda _: tasks.drain_results(work))
        job.start()
        while not job.is_over():
            time.sleep(POLL_SECONDS)
        written += job.total
    return written


SCHEMA = (
    "path string, error string, lines long, code_lines long, tokens long, functions long, "
    "classes long, longest string, longest_lines long, imports array<string>, "
    "attempts int, taken long, worker long"
)

PACKAGES = """
    select package, count(*) as files, sum(lines) as lines, sum(functions) as functions,
           sum(classes) as classes, count(error) as errors,
           max_by(longest, longest_lines) as longest, max(longest_lines) as longest_lines
    from results group by package order by lines desc, package
"""
IMPORTS = """
    select module, count(*) as files, count(distinct package) as packages
    from (select package, explode(imports) as module from results)
    group by module order by files desc, module
"""
TOTALS = """
    select count(*) as files, count(error) as errors, sum(lines) as lines,
           sum(code_lines) as code_lines, sum(tokens) as tokens, sum(functions) as functions,
           sum(classes) as classes, max(longest_lines) as longest_lines,
           sum(size(imports)) as imports
    from results
"""


@dataclass(frozen=True)
class Reduced:
    rows: list[dict[str, Any]]
    totals: dict[str, int]
    redelivered: list[dict[str, Any]]  # deliveries that were not the first
    duplicates: int


def reduce(session: Any, raw: str, output: Path) -> Reduced:
    """One result for each path, the tables, the Parquet files."""
    from pyspark.sql import functions as sql

    everything = (
        session.read.parquet(raw)
        .select(sql.from_json(sql.col("body").cast("string"), SCHEMA).alias("result"))
        .select("result.*")
        .cache()
    )
    results = everything.dropDuplicates(["path"]).withColumn(
        "package",
        sql.when(sql.col("path").contains("/"), sql.split("path", "/")[0]).otherwise("(top level)"),
    )
    results.repartition(1).sortWithinPartitions("path").write.mode("overwrite").parquet(
        str(output / "files")
    )
    results = session.read.parquet(str(output / "files"))
    results.createOrReplaceTempView("results")
    packages, imports = session.sql(PACKAGES), session.sql(IMPORTS)
    packages.write.mode("overwrite").parquet(str(output / "packages"))
    imports.write.mode("overwrite").parquet(str(output / "imports"))
    say("packages, by lines")
    packages.show(12, truncate=32)
    say("imports, by files")
    imports.show(12, truncate=32)
    rows = [row.asDict() for row in results.collect()]
    return Reduced(
        rows=rows,
        totals=session.sql(TOTALS).first().asDict(),
        redelivered=[row.asDict() for row in everything.where("attempts > 1").collect()],
        duplicates=everything.count() - len(rows),
    )


# ---- the plain computation, and what must be equal ----


def plain(root: str, files: list[str]) -> list[dict[str, Any]]:
    results = []
    with Progress("plain", len(files)) as progress:
        for done, path in enumerate(files, 1):
            results.append(tasks.measure(root, path))
            progress.at(done)
    return results


def totals_of(results: list[dict[str, Any]]) -> dict[str, int]:
    """The same as the query TOTALS."""

    def total(name: str) -> int:
        return sum(result[name] for result in results)

    return {
        "files": len(results),
        "errors": sum(result["error"] is not None for result in results),
        "lines": total("lines"),
        "code_lines": total("code_lines"),
        "tokens": total("tokens"),
        "functions": total("functions"),
        "classes": total("classes"),
        "longest_lines": max((result["longest_lines"] for result in results), default=0),
        "imports": sum(len(result["imports"]) for result in results),
    }


def compare(reduced: Reduced, expected: list[dict[str, Any]]) -> None:
    """Show the totals side by side; `Different` if they or any one file's result differ."""
    totals = totals_of(expected)
    click.echo(f"{'':16} {'Spark and shmq':>16} {'plain':>12}")
    for name, value in totals.items():
        mark = "" if reduced.totals[name] == value else "  DIFFERENT"
        click.echo(f"{name:16} {reduced.totals[name] or 0:16,} {value:12,}{mark}")
    errors = Counter(result["error"] for result in expected if result["error"])
    if errors:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in errors.most_common())
        click.echo(f"files that could not be parsed, counted as results: {kinds}")

    differences = _differences(reduced.rows, expected)
    for difference in differences[:20]:
        click.secho(difference, fg="red", err=True)
    if differences or any(reduced.totals[name] != value for name, value in totals.items()):
        raise Different(f"{len(differences)} differences between the two computations")
    click.secho(f"every one of {len(expected)} paths is there exactly once, and equal", fg="green")


def _differences(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    found = []
    times = Counter(row["path"] for row in rows)
    found += [f"{path}: there {count} times" for path, count in times.items() if count > 1]
    ours = {row["path"]: row for row in rows}
    wanted = {row["path"]: row for row in expected}
    found += [f"{path}: missing" for path in wanted.keys() - ours.keys()]
    found += [f"{path}: not in the tree" for path in ours.keys() - wanted.keys()]
    for path in sorted(wanted.keys() & ours.keys()):
        found += [
            f"{path}: {name} is {ours[path][name]}, should be {wanted[path][name]}"
            for name in tasks.FIELDS
            if ours[path][name] != wanted[path][name]
        ]
    return found


def tell_of(kill: Kill | None, reduced: Reduced) -> None:
    if kill is None:
        click.echo(f"no worker was killed; duplicates removed: {reduced.duplicates}")
        return
    click.echo(str(kill))
    again = sorted((row["taken"] - kill.at) / 1e6 for row in reduced.redelivered)
    if again:
        paths = len({row["path"] for row in reduced.redelivered})
        click.echo(
            f"redelivered: {len(again)} ({paths} paths), taken again by other workers "
            f"{again[0]:.0f} to {again[-1]:.0f} ms after the kill"
        )
    click.echo(f"duplicates removed by the reduction: {reduced.duplicates}")
    if len(again) < kill.held:
        raise Different(f"of {kill.held} messages that were held only {len(again)} came again")


# ---- the command ----


def left_behind(instance: str) -> list[str]:
    """The objects that an ended instance has left in shared memory."""
    return [name for name in os.listdir("/dev/shm") if f"shmq.{instance}" in name]


def on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def show_stat(instance: str) -> None:
    say("shmq stat")
    sys.stdout.flush()
    subprocess.run(
        [sys.executable, "-m", "shmq", "stat", "--instance", instance, "-n", "1"], check=True
    )


def demonstrate(root: str, output: Path, limit: int | None, with_kill: bool) -> None:
    began = time.monotonic()
    files = tasks.source_files(root, limit)
    if not files:
        raise click.ClickException(f"no *.py file in {root}")
    say(f"{len(files)} source files in {root}")
    instance = f"demo-{os.getpid()}"
    scratch = Path(tempfile.mkdtemp(prefix="shmq-demo-"))
    work = tasks.Work(instance, root, limit, str(scratch / "raw"))
    for directory in (work.raw, scratch / "broker"):
        os.mkdir(directory)
    try:
        with shmq.Broker(data_path=str(scratch / "broker"), instance=instance) as broker:
            monitor = Monitor(broker)
            broker.create_channel(tasks.TASKS, tasks.PARSERS)
            broker.create_channel(tasks.RESULTS, tasks.REDUCER)
            say(f"broker `{instance}` runs; Spark starts")
            with spark_session(scratch) as session:
                context = session.sparkContext
                kill = run_pipeline(context, monitor, work, len(files), with_kill)
                if kill:
                    say(str(kill))
                say(f"drained {drain(context, monitor, work)} results")
                reduced = reduce(session, work.raw, output)
            show_stat(instance)
        say("the same tree in one process, without shmq and Spark")
        expected = plain(root, files)
        compare(reduced, expected)
        tell_of(kill, reduced)
        if with_kill and kill is None:
            click.secho(
                "the tree was too small: nobody held messages when it was time", fg="yellow"
            )
        if names := left_behind(instance):
            raise Different(f"left in shared memory: {', '.join(names)}")
        say(f"Parquet files are in {output}; took {time.monotonic() - began:.0f} s")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def stream(directory: str, limit: int, rate: float, with_kill: bool) -> None:
    """The second job."""
    import streaming

    try:
        streaming.demonstrate(directory, limit, rate, with_kill)
    except streaming.Different as difference:
        click.secho(f"demo: {difference}", fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("\ndemo: interrupted, everything is stopped", err=True)
        sys.exit(130)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "directory",
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    default=sysconfig.get_path("stdlib"),
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the Parquet files go.  [default: a new directory under the temporary one]",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only this many of the files.")
@click.option("--no-kill", is_flag=True, help="Let all workers live.")
@click.option("--streaming", is_flag=True, help="The second job: lines of the files as a stream.")
@click.option(
    "--rate",
    type=click.FloatRange(min=0),
    default=5000,
    show_default=True,
    help="Events a second with --streaming; 0: flat out.",
)
def main(
    directory: str,
    output: Path | None,
    limit: int | None,
    no_kill: bool,
    streaming: bool,
    rate: float,
) -> None:
    """Count what is in the Python files of DIRECTORY (default: Python's standard library) with
    PySpark jobs that exchange their tasks through shmq, and compare with a plain computation."""
    signal.signal(signal.SIGTERM, on_sigterm)
    if streaming:
        stream(directory, limit or STREAMED, rate, not no_kill)
        return
    if output is None:
        output = Path(tempfile.mkdtemp(prefix="shmq-demo-parquet-"))
    try:
        demonstrate(directory, output.absolute(), limit, with_kill=not no_kill)
    except Different as difference:
        click.secho(f"demo: {difference}", fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("\ndemo: interrupted, the broker and Spark are stopped", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
