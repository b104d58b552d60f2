"""Fixtures of several files of this folder."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.other_users import RUN, become
from support.processes import HELPERS, Child, eventually
from support.service_manager import Manager


@pytest.fixture
def queue_program(keep: Callable[[Any], Any]) -> Callable[[str, str], Child]:
    """`queue_program(name, method)`: one of support.queue_programs, whose children are started by
    this method."""

    def run(name: str, method: str) -> Child:
        words = [sys.executable, "-m", "support.queue_programs", name, method]
        return keep(Child(words, HELPERS))

    return run


@pytest.fixture
def path_of_a_user(keep: Callable[[Any], Any]) -> Iterator[Callable[[int], Path]]:
    """`path_of_a_user(uid)`: a data path of that user's, in directories everybody may enter."""
    made: list[Path] = []

    def make(uid: int) -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="shmq-test-", dir="/tmp")))
        os.chown(made[-1], uid, uid)
        return made[-1]

    yield make
    for path in made:
        shutil.rmtree(path)


@pytest.fixture
def serve_as(
    instance: str, path_of_a_user: Callable[[int], Path], keep: Callable[[Any], Any]
) -> Callable[..., Child]:
    """`serve_as(uid, *words)`: `shmq serve` of `instance` as that user; returns when it runs."""

    def start(uid: int, *words: str, gid: int | None = None) -> Child:
        path = path_of_a_user(uid)
        argv = [sys.executable, "-c", f"{become(uid, gid)}{RUN}", "serve", *words]
        argv += [f"--instance={instance}", f"--data-path={path}", *processes.NO_GATEWAY]
        server: Child = keep(Child(argv))
        eventually(lambda: "running, pid" in server.errors or server.process.poll() is not None)
        assert server.process.poll() is None, server.errors
        return server

    return start


@pytest.fixture
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, keep: Callable[[Any], Any], instance: str
) -> Manager:
    """At a path, or, with the indirect parameter `abstract`, at an abstract address."""
    abstract = getattr(request, "param", "path") == "abstract"
    made: Manager = keep(Manager(f"@{instance}" if abstract else str(tmp_path / "notify")))
    return made


@pytest.fixture
def service(
    instance: str, data_path: Path, keep: Callable[[Any], Any], tmp_path: Path
) -> Callable[..., Child]:
    """`service(*words, before=code, env=...)`: `shmq serve` on `instance`, not waited for. before:
    Python to run first in its process."""

    def start(*words: str, before: str = "", env: dict[str, str] | None = None) -> Child:
        code = f"import os, signal, sys, time\n{before}\n{RUN}"
        argv = [sys.executable, "-c", code, "serve", f"--instance={instance}"]
        argv += [f"--data-path={data_path}", *processes.NO_GATEWAY]
        return keep(Child([*argv, *words], env))  # type: ignore[no-any-return]

    return start
