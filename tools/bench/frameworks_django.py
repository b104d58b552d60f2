"""Django's tasks on shmq beside django-tasks-rq on a Redis server on a Unix socket, defaults on
both sides.

    tools/dev bench frameworks_django [--tasks 20000] [--rounds 3]

Each round starts both brokers and both workers anew, one after the other, so that they meet the
same machine. The figures are medians over the rounds. `kill` is the time from the SIGKILL of a
worker with all its processes until its task begins again in another worker that has nothing to do.
RQ gives a job back much later, so there it is given up after `--patience` seconds. RQ's worker
forks a process for each job; with `--simple` it runs them itself."""

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
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import psutil
from frameworks import quantiles

START_SECONDS = 60.0

MANAGE = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""

SETTINGS = """
from pathlib import Path
BASE_DIR = Path(__file__).parent
SECRET_KEY = "bench"
DATABASES = {{}}
INSTALLED_APPS = {apps!r}
TASKS = {{"default": {{"BACKEND": {backend!r}, "OPTIONS": {options!r}}}}}
RQ_QUEUES = {{"default": {{"URL": "unix://{directory}/redis.sock"}}}}
"""

TASKS = """
import os, time
from pathlib import Path
from django_tasks import task

fd = os.open(Path(__file__).parent / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@task
def nothing():
    os.write(fd, b".")

@task
def timed():
    os.write(fd, b"%d\\n" % time.monotonic_ns())

@task
def held():
    os.write(fd, b"%d\\n" % time.monotonic_ns())
    time.sleep(3600)
"""

#: Runs in the process of a client, which has `work`, the tasks.
ENQUEUE = """
import sys, time, statistics, json, django
django.setup()
import work
for line in sys.stdin:
    name, count = line.split()
    task, times = getattr(work, name), []
    began = time.monotonic_ns()
    for _ in range(int(count)):
        before = time.perf_counter()
        task.enqueue()
        times.append(time.perf_counter() - before)
    print(json.dumps([began, statistics.median(times) * 1e6]), flush=True)
"""


def wait_for(condition: Callable[[], Any], patience: float = START_SECONDS) -> bool:
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


class Contestant:
    """A project in a directory, with its broker, a client and workers."""

    name = ""
    greeting = b""
    apps: tuple[str, ...] = ()
    backend = ""
    options: ClassVar[dict[str, object]] = {}

    def __init__(self, directory: Path, simple: bool) -> None:
        self.directory = directory
        self.simple = simple
        text = SETTINGS.format(
            apps=list(self.apps), backend=self.backend, options=self.options, directory=directory
        )
        (directory / "settings.py").write_text(text)
        (directory / "manage.py").write_text(MANAGE)
        (directory / "work.py").write_text(TASKS)
        self.log = directory / "log"
        self.log.touch()
        self._started: list[subprocess.Popen[bytes]] = []
        self.begin()
        self._client = self.start("-c", ENQUEUE, pipes=True)

    def begin(self) -> None:
        """Start the broker."""

    def start(self, *words: str, pipes: bool = False) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE if pipes else None
        env = {
            **os.environ,
            "PYTHONPATH": str(self.directory),
            "DJANGO_SETTINGS_MODULE": "settings",
        }
        output = (self.directory / f"output-{len(self._started)}").open("wb")
        made = subprocess.Popen(
            [sys.executable, *words],
            cwd=self.directory,
            env=env,
            stdin=pipe,
            stdout=pipe if pipes else output,
            stderr=None if pipes else output,
        )
        self._started.append(made)
        return made

    def ready(self, count: int) -> bool:
        """Whether so many workers that were started have said that they work."""
        said = [path.read_bytes() for path in self.directory.glob("output-*")]
        return sum(self.greeting in text for text in said) >= count

    def enqueue(self, task: str, count: int = 1) -> tuple[int, float]:
        """When it began, in ns, and the median of one call in us."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(f"{task} {count}\n".encode())
        self._client.stdin.flush()
        began, median = json.loads(self._client.stdout.readline())
        return began, median

    def workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        """Processes that run tasks, and a worker that is ready for each."""
        raise NotImplementedError

    def memory(self) -> int:
        """Bytes of memory that broker and results take."""
        raise NotImplementedError

    def close(self) -> None:
        for process in reversed(self._started):
            kill(process)

    def size(self) -> int:
        return self.log.stat().st_size

    def line(self) -> int | None:
        """The time in the last line of the log."""
        text = self.log.read_bytes()
        return int(text.splitlines()[-1]) if text.endswith(b"\n") else None

    def clear(self) -> None:
        os.truncate(self.log, 0)


class Shmq(Contestant):
    name = "shmq"
    greeting = b"processes for"
    apps = ("django_tasks", "shmq.integrations.django")
    backend = "shmq.integrations.django.Backend"
    options: ClassVar[dict[str, object]] = {"max_attempts": None}  # one task outlives all kills

    @property
    def instance(self) -> str:
        from shmq.integrations.django.home import instance_of

        return instance_of(self.directory / ".shmq")

    def workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        return [self.start("manage.py", "shmq_worker", "--processes", str(count))]

    def memory(self) -> int:
        segments = Path("/dev/shm").glob(f"shmq.{self.instance}*")
        shared = sum(path.stat().st_blocks * 512 for path in segments)
        return shared + sum(psutil.Process(pid).memory_full_info().uss for pid in self._servers())

    def _servers(self) -> list[int]:
        word = f"--instance={self.instance}"
        return [
            one.pid
            for one in psutil.process_iter(["cmdline"])
            if word in (one.info["cmdline"] or [])
        ]

    def close(self) -> None:
        servers = self._servers()
        super().close()  # the supervisor ends when nobody is attached
        assert wait_for(lambda: not any(map(psutil.pid_exists, servers)))


class Rq(Contestant):
    name = "django-tasks-rq"
    greeting = b"Listening on"
    apps = ("django_tasks", "django_rq", "django_tasks_rq")
    backend = "django_tasks_rq.RQBackend"

    def begin(self) -> None:
        path = self.directory / "redis.sock"
        argv = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", ""]
        self.server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, cwd=self.directory)
        assert wait_for(path.exists)

    def workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        words = ["manage.py", "rqworker", "default", "--job-class", "django_tasks_rq.Job"]
        words += ["--worker-class", "rq.SimpleWorker"] if self.simple else []
        return [self.start(*words) for _ in range(count)]

    def memory(self) -> int:
        return int(psutil.Process(self.server.pid).memory_full_info().uss)

    def close(self) -> None:
        super().close()
        self.server.terminate()
        self.server.wait()


CONTESTANTS: tuple[type[Contestant], ...] = (Shmq, Rq)


def kill(process: subprocess.Popen[bytes]) -> int:
    """SIGKILL to a process and its children. Returns when that was, in ns."""
    if process.poll() is not None:
        return 0
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "serve" not in child.cmdline()
        ]
    at = time.monotonic_ns()
    process.kill()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGKILL)
    process.wait()
    return at


def throughput(made: Contestant, tasks: int) -> dict[str, float]:
    """Many tasks, whose results are stored: enqueued while two processes run them."""
    made.workers(2)
    made.enqueue("nothing", 10)
    assert wait_for(lambda: made.size() == 10)
    before = time.perf_counter()
    _, median = made.enqueue("nothing", tasks)
    enqueued = time.perf_counter() - before
    assert wait_for(lambda: made.size() == tasks + 10, 1200)
    return {
        "enqueue p50, us": median,
        "all enqueued, s": enqueued,
        "all done, s": time.perf_counter() - before,
        "memory, MiB": made.memory() / (1 << 20),
    }


def latency(made: Contestant, count: int) -> dict[str, float]:
    """From the call of `enqueue` to the task's first line, when the worker has nothing to do."""
    times = []
    made.clear()
    for number in range(count + 10):
        began, _ = made.enqueue("timed")
        assert wait_for(made.line)
        times += [((made.line() or 0) - began) / 1e6] if number >= 10 else []
        made.clear()
        time.sleep(0.02)
    return {"enqueue to start p50, ms": statistics.median(times)}


def kills(made: Contestant, count: int, patience: float) -> list[float]:
    """ms from each SIGKILL of a worker to its task's next start in the worker beside it; `patience`
    in place of one that did not come."""
    times = []
    made.clear()
    made.enqueue("held")
    [worker] = made.workers(1)
    assert wait_for(made.line)
    for number in range(count):
        [other] = made.workers(1)
        assert wait_for(lambda number=number: made.ready(number + 2))
        made.clear()
        made.enqueue("nothing")  # the worker that is killed is busy, so the other one runs this
        assert wait_for(made.size)
        made.clear()
        at = kill(worker)
        if not wait_for(made.line, patience):
            times.append(patience * 1e3)
            break
        times.append(((made.line() or 0) - at) / 1e6)
        worker = other
    return times


def run(kind: type[Contestant], args: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    for measure in ("work", "kills"):
        with tempfile.TemporaryDirectory() as directory:
            made = kind(Path(directory), args.simple)
            try:
                if measure == "work":
                    figures |= throughput(made, args.tasks)
                    figures |= latency(made, args.latencies)
                else:
                    p50, p99, most = quantiles(kills(made, args.kills, args.patience))
                    figures |= {"kill p50, ms": p50, "kill p99, ms": p99, "kill most, ms": most}
            finally:
                made.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latencies", type=int, default=100)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--patience", type=float, default=20)
    parser.add_argument("--simple", action="store_true")
    args = parser.parse_args()
    server = subprocess.run(["redis-server", "--version"], capture_output=True, text=True)
    for name in ("django", "django-tasks", "django-tasks-rq", "rq"):
        print(name, metadata.version(name), end=", ")
    print(server.stdout.strip(), flush=True)
    found: dict[str, list[dict[str, float]]] = {kind.name: [] for kind in CONTESTANTS}
    for _ in range(args.rounds):
        for kind in CONTESTANTS:
            found[kind.name].append(run(kind, args))
            print(kind.name, json.dumps(found[kind.name][-1]), flush=True)
    print(f"{'':28}{'shmq':>12}{'rq':>12}{'ratio':>10}")
    for title in found["shmq"][0]:
        ours, theirs = (
            statistics.median(each[title] for each in found[kind.name]) for kind in CONTESTANTS
        )
        print(f"{title:28}{ours:12.2f}{theirs:12.2f}{ours / theirs:10.3f}")


if __name__ == "__main__":
    main()
