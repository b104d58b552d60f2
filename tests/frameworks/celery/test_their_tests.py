"""kombu's and Celery's own tests pass with shmq as their broker and result backend.

docs/celery.md lists the tests that do not, each with the reason. They run as subprocesses, with the
folder of their source package on the path. Their waits have limits of a second, so a test that
fails is run again, as their own marks `flaky` do.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.external_programs import missing
from support.processes import ROOT, TESTS, WATCHDOG, Child, eventually

import shmq

SOURCES = ROOT / "build" / "peers" / "celery"
PAGE = ROOT / "docs" / "celery.md"
ROW = re.compile(r"^\| `([\w.:]+)` \| (.+) \|$", re.MULTILINE)
OUTCOME = re.compile(r"^(\S+::\S+?)(?:\[.*\])? (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)
RUNS = 4
SETTINGS = """[pytest]
python_classes = test_* Test*
markers =
    flaky: runs again
    timeout: seconds
    amqp: needs RabbitMQ
"""

#: Those of `t/integration`, without `test_canvas.py`, which takes longer than all others together.
MODULES = ["test_tasks.py", "test_inspect.py", "test_worker.py", "test_beat.py"]


def deviations() -> dict[str, str]:
    """The listed tests, with their reasons."""
    _, heading, rest = PAGE.read_text().partition("\n## Their tests\n")
    assert heading
    return dict(ROW.findall(rest.partition("\n## ")[0]))


def sources(name: str) -> Path:
    path = SOURCES / name
    return path if (path / "t").is_dir() else missing(f"{name}'s tests", "tools/dev test has them")


def run(name: str, instance: str, settings: Path, *words: str) -> dict[str, str]:
    """Run tests of a package. Returns their outcomes by module::class::name."""
    where = sources(name)
    empty(instance)
    env = {
        "PYTHONPATH": os.pathsep.join([str(where), str(TESTS)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SHMQ_INSTANCE": instance,
        "TEST_BROKER": f"shmq://{instance}",
        "TEST_BACKEND": f"shmq://{instance}",
        "C_FORCE_ROOT": "1",
    }
    options = ["-v", "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:django"]
    options += ["-p", "celery.contrib.pytest", f"-c{settings}", f"--rootdir={where}"]
    child = Child([sys.executable, "-m", "pytest", *options, *words], env)
    try:
        eventually(lambda: child.process.poll() is not None, 15 * WATCHDOG, "their tests end")
        text = "\n".join(child.lines)
        assert child.wait() in (0, 1), f"{text}\n{child.errors}"
    finally:
        child.close()
    return {
        "::".join([Path(test.split("::")[0]).name, *test.split("::")[1:]]): outcome
        for test, outcome in sorted(OUTCOME.findall(text), key=lambda found: found[1] != "PASSED")
    }


def empty(instance: str) -> None:
    """Delete the queues of an earlier run: some tests want none."""
    with shmq.attach(instance) as broker:
        for topic in broker.stats().topics:
            with contextlib.suppress(shmq.Gone):
                broker.delete_topic(topic.name)


def failing(outcomes: dict[str, str]) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")}


def check(run_tests: Callable[..., dict[str, str]], *words: str) -> None:
    listed = deviations()
    outcomes = run_tests(*words)
    assert "PASSED" in outcomes.values(), outcomes
    left = failing(outcomes) - listed.keys()
    for _ in range(RUNS - 1):
        if not left:
            break
        names = " or ".join(sorted({test.rpartition("::")[2] for test in left}))
        left = (failing(run_tests(*words, "-k", names)) & left) - listed.keys()
    assert not left


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "pytest.ini"
    path.write_text(SETTINGS)
    return path


@pytest.mark.deep
@pytest.mark.usefixtures("server")
def test_the_test_classes_of_kombu(settings: Path, instance: str) -> None:
    module = str(Path(__file__).with_name("kombu_classes.py"))
    check(lambda *words: run("kombu", instance, settings, *words), module)


@pytest.mark.deep
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("module", MODULES)
def test_the_integration_tests_of_celery(module: str, settings: Path, instance: str) -> None:
    path = str(sources("celery") / "t" / "integration" / module)
    # the listed ones would wait for their time-outs
    listed = [f"--deselect=t/integration/{name}" for name in deviations()]
    check(lambda *words: run("celery", instance, settings, *words), path, *listed)


def test_each_row_of_the_list_is_read() -> None:
    rows = deviations()
    assert rows
    for name in rows:
        assert re.fullmatch(r"test_\w+\.py::test_\w+(::test_\w+)?", name), name
