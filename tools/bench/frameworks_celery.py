"""Celery on shmq beside Celery on a Redis server on a Unix socket, defaults on both sides.

    tools/dev bench frameworks_celery [--tasks 20000] [--rounds 3] [--json FILE]

Each round starts both brokers and both workers anew, one after the other, so that they meet the
same machine. The figures are medians over the rounds, and ratios to Redis's. `kill` is the time
from the SIGKILL of a worker with all its processes until its task begins again in another worker
that has nothing to do; with Redis that takes its visibility timeout of 3600 s, so there it is given
up after `--patience` seconds."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import celery
import kombu.pools
import psutil
from frameworks import quantiles

HERE = Path(__file__).parent
LOG = "BENCH_CELERY_LOG"
START_SECONDS = 60.0

app = celery.Celery("frameworks_celery")
app.conf.update(broker_url=os.environ.get("BENCH_CELERY_URL", "shmq://"))
app.conf.update(result_backend=app.conf.broker_url, worker_hijack_root_logger=False)


def note(words: bytes) -> None:
    """Append to the log in one write."""
    if not hasattr(note, "fd"):
        note.fd = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # type: ignore[attr-defined]
    os.write(note.fd, words)  # type: ignore[attr-defined]


@app.task
def nothing() -> None:
    note(b".")


@app.task
def timed() -> None:
    note(b"%d\n" % time.monotonic_ns())


@app.task(acks_late=True)
def held() -> None:
    note(b"%d\n" % time.monotonic_ns())
    time.sleep(3600)


# ---- the brokers ----


class Broker:
    """A server of its own in a directory, and its URL."""

    name = ""
    url = ""
    process: subprocess.Popen[bytes]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def memory(self) -> int:
        """Bytes of memory that broker and results take."""
        return int(psutil.Process(self.process.pid).memory_full_info().uss)


class Shmq(Broker):
    name = "shmq"

    def __init__(self, directory: Path) -> None:
        import shmq

        instance = f"bench-{os.getpid()}"
        self.url = f"shmq://{instance}"
        (directory / "data").mkdir()
        words = ["serve", "--instance", instance, "--data-path", str(directory / "data")]
        argv = [sys.executable, "-m", "shmq", *words, "--tcp-address=", "--http-address="]
        self.instance = instance
        self.process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        shmq.attach(instance, timeout=START_SECONDS).close()

    def memory(self) -> int:
        shared = sum(
            path.stat().st_blocks * 512 for path in Path("/dev/shm").glob(f"shmq.{self.instance}*")
        )
        return super().memory() + shared


class Redis(Broker):
    name = "redis"

    def __init__(self, directory: Path) -> None:
        path = directory / "redis.sock"
        self.url = f"redis+socket://{path}"
        argv = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", ""]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, cwd=directory)
        wait_for(path.exists)


BROKERS: tuple[type[Any], ...] = (Shmq, Redis)


def wait_for(condition: Callable[[], Any], patience: float = START_SECONDS) -> bool:
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


class Bench:
    """One broker with its log and its workers."""

    def __init__(self, kind: type[Any], directory: Path) -> None:
        self.broker = kind(directory)
        self.log = directory / "log"
        self.log.touch()
        self._workers: list[subprocess.Popen[bytes]] = []
        app.pool.force_close_all()
        app._pool = None
        app.amqp._producer_pool = None
        app._local.__dict__.pop("backend", None)
        app._backend_cache = None
        kombu.pools.reset()
        app.conf.update(broker_url=self.broker.url, result_backend=self.broker.url)

    def worker(self, concurrency: int = 2) -> subprocess.Popen[bytes]:
        """A worker that is ready."""
        name = f"w{time.monotonic_ns()}@bench"
        words = ["-A", "frameworks_celery", "worker", "-c", str(concurrency), "-n", name]
        ready = self.log.with_name(name)
        env = {
            **os.environ,
            LOG: str(self.log),
            "BENCH_CELERY_URL": self.broker.url,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "C_FORCE_ROOT": "1",
        }
        with ready.open("wb") as output:
            made = subprocess.Popen(
                [sys.executable, "-m", "celery", *words, "-l", "INFO", "--without-gossip"],
                env=env,
                stdout=output,
                stderr=output,
            )
        self._workers.append(made)
        assert wait_for(lambda: b" ready." in ready.read_bytes()), ready.read_text()
        return made

    def size(self) -> int:
        return self.log.stat().st_size

    def clear(self) -> None:
        os.truncate(self.log, 0)

    def close(self) -> None:
        for worker in self._workers:
            kill(worker)
        self.broker.close()


def kill(worker: subprocess.Popen[bytes]) -> int:
    """SIGKILL to a worker and its pool. Returns when that was, in ns."""
    if worker.poll() is not None:
        return 0
    pool = psutil.Process(worker.pid).children(recursive=True)
    at = time.monotonic_ns()
    worker.kill()
    for process in pool:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    worker.wait()
    return at


@contextlib.contextmanager
def bench(kind: type[Any]) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as directory:
        made = Bench(kind, Path(directory))
        try:
            yield made
        finally:
            made.close()


# ---- measures ----


def throughput(made: Bench, tasks: int) -> dict[str, float]:
    """Many tasks, whose results are stored: enqueued while a worker of two processes runs them."""
    made.worker()
    nothing.delay()
    assert wait_for(lambda: made.size() == 1)
    times = []
    began = time.perf_counter()
    for _ in range(tasks):
        before = time.perf_counter()
        nothing.delay()
        times.append(time.perf_counter() - before)
    enqueued = time.perf_counter() - began
    assert wait_for(lambda: made.size() == tasks + 1, 600)
    done = time.perf_counter() - began
    return {
        "enqueue p50, us": statistics.median(times) * 1e6,
        "all enqueued, s": enqueued,
        "all done, s": done,
        "memory, MiB": made.broker.memory() / (1 << 20),
    }


def latency(made: Bench, count: int) -> dict[str, float]:
    """From the call of `delay` to the task's first line, when the worker has nothing else to do."""
    made.worker()
    times = []
    for number in range(count + 20):
        made.clear()
        before = time.monotonic_ns()
        timed.delay()
        assert wait_for(lambda: made.log.read_bytes().endswith(b"\n"))
        if number >= 20:
            times.append((int(made.log.read_bytes()) - before) / 1e6)
        time.sleep(0.01)
    return {"idle start p50, ms": statistics.median(times)}


def kills(made: Bench, count: int, patience: float) -> list[float]:
    """ms from each SIGKILL of a worker to its task's next start in the worker beside it; `patience`
    in place of one that did not come."""
    times = []
    held.delay()
    worker = made.worker(1)
    assert wait_for(lambda: made.size())
    for _ in range(count):
        other = made.worker(1)
        made.clear()
        at = kill(worker)
        if not wait_for(lambda: made.log.read_bytes().endswith(b"\n"), patience):
            times.append(patience * 1e3)
            break
        times.append((int(made.log.read_bytes()) - at) / 1e6)
        worker = other
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--patience", type=float, default=20)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    words = subprocess.run(["redis-server", "--version"], capture_output=True, text=True).stdout
    print(f"Celery {celery.__version__}; {words.strip()}")
    found: dict[str, dict[str, list[float]]] = {}

    def add(name: str, values: dict[str, float]) -> None:
        for label, value in values.items():
            found.setdefault(label, {}).setdefault(name, []).append(value)
            print(f"  {name}: {label} {value:.2f}", flush=True)

    for _ in range(chosen.rounds):
        for kind in BROKERS:
            with bench(kind) as made:
                add(kind.name, throughput(made, chosen.tasks))
            with bench(kind) as made:
                add(kind.name, latency(made, 300))
    for kind in BROKERS:
        with bench(kind) as made:
            p50, p99, _ = quantiles(kills(made, chosen.kills, chosen.patience))
            add(kind.name, {"kill p50, ms": p50, "kill p99, ms": p99})
    result = {}
    for label, by_name in found.items():
        medians = {name: statistics.median(values) for name, values in by_name.items()}
        ratio = medians["shmq"] / medians["redis"]
        result[label] = {**medians, "ratio": ratio}
        shown = "  ".join(f"{name} {value:.2f}" for name, value in medians.items())
        print(f"{label:20s} {shown}  ratio {ratio:.2f}")
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
