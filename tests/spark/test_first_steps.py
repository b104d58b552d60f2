"""The first things that users of Spark do: paste the README, ask for help, lack something."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.deliveries import take_all
from support.processes import ROOT, WATCHDOG, eventually
from support.slow_spark import was_too_slow

import shmq
import shmq.spark
from shmq.spark import NoPySpark, sessions, versions

PAGE = ROOT / "docs" / "spark.md"


def python(code: str, cwd: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words, "-c", textwrap.dedent(code)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=10 * WATCHDOG,
        check=False,
        env={**os.environ, **env},
    )


# ---- without Spark, or with another one ----


def pretend(directory: Path, version: str | None) -> dict[str, str]:
    """An environment in which PySpark is this version, or (None) not there."""
    package = directory / "pyspark"
    package.mkdir()
    text = f"__version__ = {version!r}\n"
    (package / "__init__.py").write_text(text if version else "raise ImportError('no pyspark')\n")
    return {"PYTHONPATH": str(directory)}


@pytest.mark.parametrize("call", ["Exchange('x', 't')", "session()", "register(None)", "source"])
def test_without_pyspark_the_extra_is_named(call: str, tmp_path: Path) -> None:
    done = python(f"import shmq.spark; shmq.spark.{call}", tmp_path, **pretend(tmp_path, None))
    last = done.stderr.splitlines()[-1]
    assert last.startswith("shmq.spark.versions.NoPySpark: shmq.spark."), done.stderr
    assert "pip install 'shmq[spark]'" in last


@pytest.mark.parametrize("version", ["3.5.6", "2.4.8"])
def test_a_pyspark_without_python_sources_is_named(version: str, tmp_path: Path) -> None:
    env = pretend(tmp_path, version)
    for call in ("Exchange('x', 't')", "session()"):
        done = python(f"import shmq.spark; shmq.spark.{call}", tmp_path, **env)
        last = done.stderr.splitlines()[-1]
        assert "needs PySpark 4.0 or newer" in last, done.stderr
        assert f"this is {version}" in last


def test_what_is_too_old_for_one_thing_is_told_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    pyspark = pytest.importorskip("pyspark")
    monkeypatch.setattr(pyspark, "__version__", "4.0.1")
    from shmq.spark.source import ShmqDataSource

    source = ShmqDataSource({"topic": "t"})
    reader = pickle.loads(pickle.dumps(source.streamReader(None)))
    for call, what in (
        (reader.initialOffset, "streaming read"),
        (lambda: reader.partitions({}, {}), "streaming read"),
        (lambda: source.streamWriter(None, False), "streaming write"),
    ):
        with pytest.raises(NoPySpark, match=f"{what} with shmq needs PySpark 4.3") as caught:
            call()
        assert "4.0.1" in str(caught.value)
        assert "Batches and shmq.spark.Exchange work" in str(caught.value)
    source.reader(None)
    source.writer(None, False)
    monkeypatch.setattr(pyspark, "__version__", "4.3.0.dev1")
    source.streamReader(None)
    assert issubclass(NoPySpark, ImportError)
    assert versions.STREAM == (4, 3)


# ---- help ----


def test_help_is_there_after_the_import(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    done = python("import shmq.spark; help(shmq.spark.source.ShmqDataSource)", tmp_path)
    assert done.returncode == 0, done.stderr
    for option in shmq.spark.options.OPTIONS:
        assert (f" {option.name} (" in done.stdout) == option.is_listed


def test_the_page_has_every_option_that_is_listed() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    found = {line.split("|")[1].strip(" `"): line for line in rows}
    listed = {option.name: option for option in shmq.spark.options.OPTIONS if option.is_listed}
    assert found.keys() == listed.keys()
    for name, option in listed.items():
        assert f"| {option.where} |" in found[name]
        assert option.help in found[name]


def test_names_stay_what_they_are_however_often_they_are_asked_for() -> None:
    pytest.importorskip("pyspark")
    for name in shmq.spark.__all__:
        first = getattr(shmq.spark, name)
        assert callable(first)
        assert getattr(shmq.spark, name) is first
    with pytest.raises(AttributeError):
        _ = shmq.spark.nothing


# ---- the owner ----


def test_an_owner_is_named_to_attach_and_only_if_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pyspark")
    from shmq.spark import reading
    from shmq.spark.options import Settings

    calls: list[Any] = []
    monkeypatch.setattr(reading, "_brokers", {})
    monkeypatch.setattr(shmq, "attach", lambda *words, **more: calls.append((words, more)))
    reading.attached("x")
    settings = Settings({"instance": "x", "topic": "t", "owner": "shmq"})
    reading.attached(settings.instance, settings.owner)
    assert calls == [(("x",), {"timeout": 2.0}), (("x",), {"timeout": 2.0, "owner": "shmq"})]


# ---- in Spark ----


def installed() -> None:
    for name in ("pyspark", "pyarrow", "pandas"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} not installed: tools/dev test installs it")


@pytest.mark.deep
@pytest.mark.spark
def test_modules_are_found_beside_the_script_and_not_in_the_working_directory(
    tmp_path: Path,
) -> None:
    installed()
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    planted = f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n"
    for name in ("pyarrow", "pandas", "shmq", "json"):
        (elsewhere / f"{name}.py").write_text(planted)
    (home / "beside.py").write_text("def twice(number):\n    return 2 * number\n")
    (home / "job.py").write_text(
        textwrap.dedent("""
        import os
        from pathlib import Path
        import beside
        import shmq.spark

        def work(numbers):
            return [beside.twice(number) for number in numbers]

        before = dict(os.environ)
        spark = shmq.spark.session("local[1]")
        spark.sparkContext.setLogLevel("OFF")
        assert "PYTHONSAFEPATH" not in os.environ
        assert os.environ.get("PYTHONPATH") == before.get("PYTHONPATH")
        print("sum", spark.sparkContext.parallelize(range(5), 1).mapPartitions(work).sum())
        sockets = Path(spark.conf.get("spark.python.unix.domain.socket.dir"))
        assert sockets.stat().st_mode & 0o077 == 0
        assert any(name.is_socket() for name in sockets.iterdir())
        print("sockets", sockets)
        spark.read.format("shmq").options(topic="t", instance="none").load().printSchema()
        spark.stop()
    """)
    )
    done = subprocess.run(
        [sys.executable, home / "job.py"],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        timeout=10 * WATCHDOG,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sum 20" in done.stdout
    _, _, sockets = done.stdout.partition("sockets ")
    assert not Path(sockets.splitlines()[0]).exists()
    assert "attempts: integer" in done.stdout
    assert not (tmp_path / "ran").exists()
    assert "replaced a statically registered" not in done.stderr


def test_sockets_whose_address_would_be_too_long_are_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    sessions._sockets.cache_clear()
    assert sessions._sockets() is None
    assert not list(long.iterdir())
    sessions._sockets.cache_clear()


@pytest.mark.deep
@pytest.mark.spark
def test_the_readmes_spark_program_runs_as_pasted(
    installed: None,
    spark: Any,
    broker: shmq.Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the names of the instance and of the checkpoint are the test's."""
    section = PAGE.read_text()
    program, batch = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert program.count('"jobs"') == 4
    program = program.replace('"jobs"', repr(broker.instance))
    program = program.replace('"/var/tmp/report"', repr(str(tmp_path / "report")))
    broker.create_channel("out", "seen")
    broker.create_channel("tasks", "spark")
    broker.create_channel("results", "spark")
    # one JVM serves all tests: the program gets the session that is there
    monkeypatch.setattr(shmq.spark, "session", lambda *_, **__: spark, raising=False)
    names: dict[str, Any] = {}
    queries: list[Any] = []

    def start() -> None:
        exec(compile(program, str(PAGE), "exec"), names)
        queries[:] = spark.streams.active

    def has_come() -> bool:
        if queries and not queries[0].isActive:
            assert was_too_slow(queries[0].exception())
            start()
        return broker.channel_depth("out", "seen") == 2

    start()
    try:
        broker.producer("clicks").publish_many([b"a", b"b"])
        eventually(has_come, 9 * WATCHDOG)
        names["tasks"].publish([b"task"])
        rows = spark.range(2).repartition(2)
        assert rows.mapInArrow(names["work"], rows.schema).count() == 2
        assert take_all(broker, "results", "spark").bodies == [b"TASK"]
    finally:
        for query in spark.streams.active:
            query.stop()
    assert sorted(take_all(broker, "out", "seen").bodies) == [b"A", b"B"]
    eventually(lambda: broker.lease_owner("clicks", "report", "report").process is None)
    for lease in broker.lease_owner("clicks", "report", "report").leases:
        broker.finish_lease("clicks", "report", lease.id)  # its next run would have done that
    broker.producer("clicks").publish_many([b"c", b"d"])
    batch = batch.replace('"jobs"', repr(broker.instance))
    batch = batch.replace('"/var/tmp/clicks"', repr(str(tmp_path / "clicks")))
    exec(compile(batch, str(PAGE), "exec"), names)
    written = spark.read.parquet(str(tmp_path / "clicks")).collect()
    assert sorted(bytes(row.body) for row in written) == [b"c", b"d"]
    assert broker.channel_stats("clicks", "report").depth == 0
