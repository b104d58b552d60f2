"""Every program of the README, of docs/ and of the docstrings runs as it is pasted.

Each block is run in an empty directory, by the commands that are installed; only names that tests
must not share with others are put in their place: the directories and the instance."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.documented_programs import Program, in_docstrings, in_markdown
from support.processes import ROOT, WATCHDOG, Child, answers, eventually, supervisor_pid, wait_ended

from shmq.errors import ShmqError

SPARK = "needs PySpark and Java: tests/spark"
REMOTE = "needs a broker on another host: tests/nsqd/gateway/test_leases.py"
FLEET = "tests/spark/test_instances.py runs it, on ports of its own"
DJANGO = "tests/frameworks/django/test_page.py runs it in a project"
CELERY = "needs Celery: tests/frameworks/celery/test_page.py runs it"
ACCESS = "tests/nsqd/gateway/test_access_page.py runs it with the file of the page"
#: How the first lines of blocks begin that are not run here -> why.
ELSEWHERE = {
    "from celery import ": CELERY,
    "mkdir -p /var/tmp/shop": CELERY,
    "export SHMQ_INSTANCE=shop": CELERY,
    "[users.scanner]": ACCESS,
    "$ shmq access check": ACCESS,
    "openssl rand -hex 32 | tee": ACCESS,
    "call_command(": "a line of a test; tests/frameworks/django/test_tasks.py has such tests",
    "services:": "a file for Compose; tests/integration/test_containers.py runs its commands",
    "apiVersion: v1": "a file for Kubernetes; tests/integration/test_containers.py reads it",
    "[core]": "a part of Airflow's file",
    "pip install 'apache-airflow": "needs a network and minutes; docs/verification.md has a run",
    "tools/dev demo ": "takes minutes; tests/spark/test_demo.py runs it",
    "import shmq.spark": SPARK,
    "for n in 1 2 3; do": FLEET,
    "from shmq import connect": REMOTE,
    "staged = broker.stage(": REMOTE,
    "import torch": "needs PyTorch; the loop before it is the same without",
    'tasks, results = Exchange("jobs", "tasks"), Exchange("jobs", "results")': SPARK,
    "query.writeStream.foreachBatch(": SPARK,
    '(spark.readStream.format("shmq")': SPARK,
    'df = (spark.read.format("shmq").option("instance", "jobs").option("topic", "clicks")': SPARK,
    'rows = spark.read.format("shmq").option("instance", "jobs").option("topic", "clicks")': SPARK,
    "shmq.spark.finish_lease(df)": SPARK,
    "cp systemd/shmq@.service /etc/systemd/system/": (
        "would change the host's services; tests/unit/test_systemd.py reads the files"
    ),
    "shmq stat --lookupd ": "needs other hosts; tests/nsqd/gateway/test_fleet.py has some",
    "nsqadmin --lookupd-http-address=": "needs NSQ; tests/nsqd/gateway/test_fleet.py runs it",
    "14:02:11  hosts ": "the output of a command",
    "shmq channel create orders nats": "needs a nats-server; tests/forward has one",
    "shmq forward orders --from=": "needs a nats-server and Kafka; tests/forward has both",
    "producers, consumers (any Python process, Spark's workers too) ": "a picture",
    "pip install .": "needs a network; `tools/dev setup` installs it the same way",
    "tools/dev setup ": "the test is run by it",
    "tools/dev test tests/limits": "the suite runs it",
    "native/include/ ": "a map",
    "errors <- _native": "a map",
    "directory  /shmq.<instance> ": "a picture",
    "waiter: set the bit, fence": "a picture",
    "consumer: take the hints, look there": "a picture",
    "max_attempts=3, a batch of 200, number 7": "a picture",
    "nsqd.dat ": "a list of files",
    '[channels."jobs.*"]': "a part of a file; tests/unit/test_settings.py reads such tables",
    "exec shmq serve --nsqd": "needs the gateway's ports; tests/nsqd/gateway/test_defaults.py",
    "audit: action=delete_topic": "a line of the log",
    "pip install 'shmq[django]'": "needs a network",
    'INSTALLED_APPS += ["shmq': DJANGO,
    "python manage.py shmq_worker": DJANGO,
    "TASKS = {": DJANGO,
    "shmq ls  ": DJANGO,
    "shmq stat --instance jobs": "needs a framework's queue; tests/frameworks/test_documented.py",
    "scrape_configs:": "promtool reads it; tests/monitoring",
    "[Unit]": "a unit; tests/frameworks reads it",
    "$ shmq page ": "it serves until it is ended; tests/page",
}

#: How the block begins that runs for ever.
SERVER = "mkdir -p /var/tmp/jobs\nshmq serve "


def programs() -> list[Program]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    pages.append(ROOT / "docs" / "monitoring" / "README.md")
    found = [program for page in pages for program in in_markdown(page)]
    found += in_docstrings(ROOT / "shmq")
    return [*found, *in_docstrings(ROOT / "pyspark_shmq")]


def of(language: str) -> list[Program]:
    return [one for one in programs() if one.language == language and not reason(one)]


def reason(program: Program) -> str | None:
    """Why it is not run here; None: it is."""
    starts = [start for start in ELSEWHERE if program.first.startswith(start)]
    return ELSEWHERE[starts[0]] if starts else None


def ids(found: list[Program]) -> list[str]:
    return [one.where for one in found]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """An empty directory, with those beside it that the documentation takes for granted."""
    for name in ("here", "var/tmp", "var/lib/node_exporter"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "here"


@pytest.fixture
def pasted(here: Path, instance: str) -> Callable[[str], str]:
    """A program's text with names of this test's own."""

    def replace(text: str) -> str:
        for name in ("/var/tmp/", "/var/lib/"):
            text = text.replace(name, f"{here.parent}{name}")
        return text.replace("--instance jobs", f"--instance {instance}").replace(
            "SHMQ_INSTANCE=jobs", f"SHMQ_INSTANCE={instance}"
        )

    return replace


@pytest.fixture
def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONWARNINGS": "error"}


def test_every_block_is_run_or_has_a_reason() -> None:
    firsts = [one.first for one in programs()]
    for start in ELSEWHERE:
        assert any(first.startswith(start) for first in firsts), f"no block begins so: {start}"
    assert all(reason(one) for one in programs() if one.language not in ("python", "text"))
    assert len(of("python")) >= 2
    assert len([one for one in of("text") if one.text.startswith(SERVER)]) == 1


@pytest.mark.parametrize("program", of("python"), ids=ids(of("python")))
def test_python(
    program: Program, here: Path, pasted: Callable[[str], str], environment: dict[str, str]
) -> None:
    environment["XDG_STATE_HOME"] = str(here.parent / "state")
    done = subprocess.run(
        [sys.executable, "-"],
        input=pasted(program.text),
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=10 * WATCHDOG,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(here.iterdir()) == []


def serves(instance: str) -> bool:
    with contextlib.suppress(ShmqError):
        return answers(instance, supervisor_pid(instance))
    return False


@pytest.fixture
def shells(
    here: Path, pasted: Callable[[str], str], instance: str, environment: dict[str, str]
) -> Iterator[Callable[[str], Child]]:
    """`shells(text)`: a shell into which this is pasted. Ended, with all it started, at the end."""
    opened: list[Child] = []

    def shell(text: str) -> Child:
        script = f"cd {here}; set -e\n{pasted(text)}"
        opened.append(Child(["bash", "-c", script], environment))
        return opened[-1]

    yield shell
    if serves(instance):
        pid = supervisor_pid(instance)
        os.kill(pid, signal.SIGTERM)
        wait_ended(pid)
    for one in reversed(opened):
        one.close()


def test_shell(shells: Callable[[str], Child], here: Path, instance: str) -> None:
    blocks = [one.text for one in of("text")]
    [server] = [text for text in blocks if text.startswith(SERVER)]
    serving = shells(server)
    eventually(lambda: serves(instance), what="it serves")
    for text in blocks:
        if text != server:
            *lines, last = text.splitlines()
            forever = last.startswith("shmq stat -i")
            shell = shells("\n".join([*lines, f"exec {last}"]) if forever else text)
            if forever:  # until Ctrl-C
                eventually(
                    lambda shell=shell: sum("workers" in line for line in shell.lines) >= 2,
                    what="stat has looked twice",
                )
                shell.process.send_signal(signal.SIGINT)
                assert shell.wait() == 130, shell.errors
            else:
                assert shell.wait() == 0, shell.errors
            assert shell.errors.strip() == ""
            if lines:
                assert {"cat.png", "dog.png"} <= set(shell.lines)
    assert (here.parent / "var/lib/node_exporter/shmq.prom").stat().st_size > 0
    assert list(here.iterdir()) == []
    assert not serving.process.poll()
