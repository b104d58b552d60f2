"""The commands and the units of docs/dramatiq.md and docs/taskiq.md."""

from __future__ import annotations

import asyncio
import configparser
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dramatiq
import pytest
from dramatiq.cli import make_argument_parser
from support.documented_programs import in_markdown
from support.processes import ROOT, Child
from taskiq import AsyncBroker
from taskiq.cli.worker.args import WorkerArgs

from shmq.integrations.dramatiq import Broker as DramatiqBroker
from shmq.integrations.dramatiq import ResultBackend
from shmq.integrations.taskiq import Broker as TaskiqBroker
from shmq.integrations.taskiq import ResultBackend as TaskiqResults


def block(page: str, start: str) -> str:
    (found,) = [
        one.text for one in in_markdown(ROOT / "docs" / f"{page}.md") if one.text.startswith(start)
    ]
    return found


def with_dramatiq(instance: str) -> None:
    """A queue with a dead letter, and a store."""
    app = DramatiqBroker(instance, middleware=[])
    app.declare_queue("default")
    app.enqueue(dramatiq.Message("default", "nobody", (), {}, {}))
    consumer = app.consume("default")
    message = next(consumer)
    assert message is not None
    consumer.nack(message)
    consumer.close()
    assert not list(ResultBackend(instance).store)
    app.close()


def with_taskiq(instance: str) -> None:
    """The same."""

    async def main() -> None:
        app: AsyncBroker = TaskiqBroker(instance).with_result_backend(TaskiqResults(instance))
        await app.startup()
        await app.task(task_name="nobody")(lambda: None).kiq()
        await app.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("page", ["dramatiq", "taskiq"])
def test_the_commands_to_see_inside_run(
    page: str, serve: Callable[..., Child], instance: str
) -> None:
    serve()
    {"dramatiq": with_dramatiq, "taskiq": with_taskiq}[page](instance)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for line in block(page, "shmq stat --instance jobs").splitlines():
        words = shlex.split(line.replace("--instance jobs", f"--instance {instance}"))
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.mark.parametrize("page", ["dramatiq", "taskiq"])
def test_the_unit_starts_workers(page: str) -> None:
    unit = configparser.ConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block(page, "[Unit]"))
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == page
    if page == "dramatiq":
        assert make_argument_parser().parse_args(words).processes == 4
    else:
        assert words[0] == "worker"
        assert WorkerArgs.from_cli(words[1:]).workers == 4
    assert unit["Service"]["Environment"] == "SHMQ_INSTANCE=jobs"
