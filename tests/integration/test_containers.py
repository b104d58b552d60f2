"""docs/containers.md: its files, and what they arrange, made of the same namespaces without a
container engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import ROOT, WATCHDOG, eventually

PAGE = (ROOT / "docs" / "containers.md").read_text()
COMPOSE, POD = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
SHMQ = (sys.executable, "-m", "shmq")

ATTACH = """
import shmq, sys
try:
    shmq.attach(sys.argv[1])
except shmq.OtherNamespace as error:
    print(error)
"""


def commands(instance: str, data: Path) -> dict[str, list[str]]:
    """The commands of the Compose file by service, for an instance and a directory of a test."""
    ours = {"jobs": instance, "/var/lib/shmq": str(data), "shmq": ""}
    found = {}
    for name, service in COMPOSE["services"].items():
        program, *words = service["command"]
        found[name] = [
            *(SHMQ if program == "shmq" else (program,)),
            *(ours.get(w, w) for w in words),
        ]
    return found


class Container:
    """Namespaces of their own for users, processes and mounts, with a small /dev/shm. They end with
    their first process."""

    def __init__(self, megabytes: int) -> None:
        mount = f"mount -t tmpfs -o size={megabytes}m,mode=1777 tmpfs /dev/shm"
        first = [*("unshare", "-rmpf", "--mount-proc", "--kill-child"), "sh", "-c"]
        argv = [*first, f"{mount} && echo made && exec sleep 100000"]
        self._unshare = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == b"made\n"
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self._first = int(children.read_text())

    def argv(self, *words: str) -> list[str]:
        """The command that runs `words` in these namespaces."""
        enter = ("nsenter", f"--target={self._first}", "-U", "-m", "-p", "--preserve-credentials")
        return [*enter, f"--wd={os.getcwd()}", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words), capture_output=True, text=True, timeout=WATCHDOG, check=False
        )

    def end(self) -> None:
        """Kill all of its processes. Idempotent."""
        self._unshare.kill()
        self._unshare.wait(WATCHDOG)
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()


@pytest.fixture
def container() -> Iterator[Container]:
    made = Container(64)
    yield made
    made.end()


@pytest.fixture
def broker(container: Container, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the broker of the Compose file in the container, as instance `jobs`."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        argv = container.argv(*commands("jobs", tmp_path)["broker"])
        started.append(subprocess.Popen(argv, stderr=subprocess.DEVNULL))
        eventually(lambda: container.run(*SHMQ, "stat", "--instance=jobs").returncode == 0)
        return started[-1]

    yield start
    container.end()
    for process in started:
        process.wait(WATCHDOG)


# ---- the files ----


def test_both_files_run_the_same_commands_with_the_same_things_shared() -> None:
    services = COMPOSE["services"]
    pod = {each["name"]: each for each in POD["spec"]["containers"]}
    assert POD["spec"]["shareProcessNamespace"] is True
    for name, each in pod.items():
        assert each["command"] == services[name]["command"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in each["volumeMounts"]
        for namespace in ("pid", "ipc"):
            assert services[name][namespace] == "service:namespaces"
    assert {**POD["spec"]["volumes"][0]} == {
        "name": "shm",
        "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"},
    }


def test_a_memory_limit_is_above_the_size_of_the_shared_memory() -> None:
    size = int(COMPOSE["services"]["namespaces"]["shm_size"].removesuffix("g"))
    limits = [one["mem_limit"] for one in COMPOSE["services"].values() if "mem_limit" in one]
    assert limits
    assert all(int(limit.removesuffix("g")) > size for limit in limits)


# ---- what they arrange ----


def test_a_broker_that_is_killed_is_started_again_with_its_messages(
    container: Container, broker: Callable[[], Any], tmp_path: Path
) -> None:
    first = broker()
    for words in (("channel", "create", "resize", "workers"), ("pub", "resize", "cat.png")):
        done = container.run(*SHMQ, *words, "--instance=jobs")
        assert done.returncode == 0, done.stderr
    inner = container.run("pgrep", "-f", "shmq serve").stdout.split()
    assert container.run("kill", "-9", *inner).returncode == 0
    first.wait(WATCHDOG)
    broker()
    tail = container.run(*commands("jobs", tmp_path)["worker"], "-n", "1")
    assert "cat.png" in tail.stdout, tail.stderr


def test_a_process_of_another_pid_namespace_is_refused_and_told_why(
    container: Container, broker: Callable[[], Any]
) -> None:
    broker()
    other = ("unshare", "-pf", "--mount-proc")
    done = container.run(*other, sys.executable, "-c", ATTACH, "jobs")
    assert "the PID namespace is not the broker's" in done.stdout, done.stderr
    assert "shareProcessNamespace" in done.stdout
    assert container.run(*other, *SHMQ, "stat", "--instance=jobs").returncode == 0
    done = container.run(*other, *SHMQ, "doctor", "--instance=jobs")
    assert "runs in another PID namespace" in done.stdout


def test_a_process_without_proc_is_refused_and_told_why(
    container: Container, broker: Callable[[], Any]
) -> None:
    broker()
    script = 'mount -t tmpfs tmpfs /proc && exec "$@"'
    done = container.run(
        *("unshare", "-m", "sh", "-c", script, "sh"), sys.executable, "-c", ATTACH, "jobs"
    )
    assert "/proc cannot be read (mount it)" in done.stdout, done.stderr


def test_the_doctor_names_a_small_shared_memory(container: Container) -> None:
    done = container.run(*SHMQ, "doctor")
    assert "of 64.0 MiB free" in done.stdout, done.stderr
    assert "--shm-size=2g" in done.stdout


def test_a_broker_whose_namespace_ended_is_not_taken_over(tmp_path: Path) -> None:
    """Its memory may still be used by processes that nobody here can see."""
    outside = Container(64)
    inner = ("unshare", "-pf", "--mount-proc", "--kill-child")
    serve = commands("jobs", tmp_path)["broker"]
    first = subprocess.Popen(outside.argv(*inner, *serve), stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: outside.run(*SHMQ, "stat", "--instance=jobs").returncode == 0)
        assert outside.run("pkill", "-KILL", "-f", "^unshare -pf").returncode == 0
        first.wait(WATCHDOG)
        again = outside.run(*inner, *serve)
        assert again.returncode != 0
        assert "docs/containers.md" in again.stderr
    finally:
        outside.end()
        first.wait(WATCHDOG)
