"""A Spark standalone cluster on loopback: a master, and workers of one core and 512 MB each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

from shmq.spark.sessions import find_java

EXECUTOR_MEMORY = "512m"
#: For JVMs that do not live long: one compiler, which is fast, and a small collector.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

_DAEMON = "org.apache.spark.deploy"
_EXECUTOR = "CoarseGrainedExecutorBackend"
_WORKER_OF_PYTHON = "pyspark.daemon"


class SparkCluster:
    """A master and workers, each a JVM of its own; executors are JVMs below the workers."""

    def __init__(self, home: Path, scratch: Path, workers: int, env: Mapping[str, str]) -> None:
        """home: SPARK_HOME. scratch: for what they write. env: for them and their executors."""
        find_java()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.master = f"spark://127.0.0.1:{port}"
        self._log = (scratch / "cluster.log").open("ab")
        self._env = {
            **os.environ,
            **env,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
            "SPARK_LOCAL_DIRS": str(scratch / "local"),
            # a storm kills more executors of one application than Spark thinks are good
            "SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1",
        }
        place = ("--host", "127.0.0.1", "--webui-port", "0")
        self._processes = [self._start("master.Master", *place, "--port", str(port))]
        size = ("--cores", "1", "--memory", EXECUTOR_MEMORY, "--work-dir", str(scratch / "work"))
        self._processes += [
            self._start("worker.Worker", *place, *size, self.master) for _ in range(workers)
        ]

    def _start(self, kind: str, *words: str) -> subprocess.Popen[bytes]:
        program = str(Path(self._env["SPARK_HOME"], "bin", "spark-class"))
        return subprocess.Popen(
            [program, f"{_DAEMON}.{kind}", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env=self._env,
        )

    def executors(self) -> list[int]:
        """The JVMs of the executors."""
        return [process.pid for process in self._below() if _has(process, _EXECUTOR)]

    def python_workers(self) -> list[int]:
        """The Python processes below the executors."""
        return [process.pid for process in self._below() if _has(process, _WORKER_OF_PYTHON)]

    def _below(self) -> list[psutil.Process]:
        found = []
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(process.pid).children(recursive=True)
        return found

    def close(self) -> None:
        """Kill them all."""
        rest = self._below()
        for process in self._processes:
            process.kill()
            process.wait()
        for each in rest:
            with contextlib.suppress(psutil.Error):
                each.send_signal(signal.SIGKILL)
        psutil.wait_procs(rest)
        self._log.close()


def _has(process: psutil.Process, word: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word in each for each in process.cmdline())
    return False
