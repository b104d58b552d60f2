"""A gateway with traffic of every kind, and a Prometheus that scrapes it and has the rules."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import processes
from support.external_programs import peer
from support.nsq_client import Server
from support.processes import ROOT, eventually

import shmq

RULES = ROOT / "docs" / "monitoring" / "shmq.rules.yml"

_CONFIG = """
global: {scrape_interval: 250ms, evaluation_interval: 250ms}
rule_files: [%s]
scrape_configs:
  - job_name: shmq
    static_configs: [{targets: ["%s"]}]
"""


class Prometheus:
    """A server on a port of its own."""

    def __init__(self, directory: Path, scraped: str) -> None:
        """scraped: host and port of a gateway."""
        config = directory / "prometheus.yml"
        config.write_text(_CONFIG % (RULES, scraped))
        argv = [
            peer("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        self._port = 0
        try:
            eventually(self._is_ready, what="Prometheus is ready")
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        for place in psutil.Process(self._process.pid).net_connections("tcp"):
            if place.status == psutil.CONN_LISTEN:
                self._port = place.laddr.port
        with contextlib.suppress(OSError):
            return self._port > 0 and b"Ready" in self._get("/-/ready")
        return False

    def _get(self, path: str) -> bytes:
        address = f"http://127.0.0.1:{self._port}{path}"
        with urllib.request.urlopen(address, timeout=processes.WATCHDOG) as answer:
            return answer.read()

    def ask(self, path: str, **params: str) -> Any:
        """`data` of an answer of its API. A query that cannot be parsed raises HTTPError."""
        answer = json.loads(self._get(f"/api/v1/{path}?{urllib.parse.urlencode(params)}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample of a vector, without NaN."""
        found = self.ask("query", query=expression)
        assert found["resultType"] == "vector", expression
        samples = [(item["metric"], float(item["value"][1])) for item in found["result"]]
        return [(labels, value) for labels, value in samples if value == value]

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


class Traffic:
    """Messages that are finished, requeued, rejected, deferred, left on disk."""

    def __init__(self, server: Server) -> None:
        self._done = threading.Event()
        self._failed: BaseException | None = None
        self._broker = broker = shmq.attach(server.instance, timeout=processes.WATCHDOG)
        broker.configure("jobs", "workers", max_attempts=3)
        for topic, channel in (("jobs", "workers"), ("pile", "slow"), ("nsq", "clients")):
            broker.create_channel(topic, channel)
        broker.pause_channel("pile", "slow")
        broker.create_topic("stopped")
        broker.pause_topic("stopped")
        pile = broker.producer("pile")
        for _ in range(100):  # more than is read ahead
            pile.publish_many([b"x" * 100] * 100)
        broker.producer("nsq").publish(b"x", defer=3600)
        self._client = server.connect()
        self._client.sub("nsq", "clients", ready=1)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            producer = self._broker.producer("jobs")
            consumer = self._broker.consumer("jobs", "workers")
            while not self._done.wait(0.05):
                producer.publish_many([b"x" * 200] * 4)
                for number in range(4):
                    message = consumer.take(timeout=processes.WATCHDOG)
                    assert message is not None
                    if number == 2:
                        message.requeue(0)
                    elif number == 3:
                        message.reject("cannot be done")
                    else:
                        message.finish()
        except BaseException as exc:
            self._failed = exc

    def close(self) -> None:
        """End it; what it raised is raised here."""
        self._done.set()
        self._thread.join()
        self._broker.close()
        if self._failed is not None:
            raise self._failed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A gateway with traffic."""
    peer("prometheus")  # before anything starts
    instance = f"test-{os.getpid()}-{secrets.token_hex(4)}"
    directory = tmp_path_factory.mktemp("gateway")
    try:
        with (
            contextlib.closing(
                Server("shmq", directory, instance, "--mem-queue-size=100")
            ) as found,
            contextlib.closing(Traffic(found)),
        ):
            yield found
    finally:
        processes.remove_instance(instance)


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the gateway."""
    directory = tmp_path_factory.mktemp("prometheus")
    with contextlib.closing(Prometheus(directory, server.addresses["http"])) as found:
        eventually(lambda: found.query("shmq_supervisor_up"), what="a scrape")
        yield found
