"""The programs of docs/celery.md run as they are pasted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from support.documented_programs import Program, in_markdown
from support.processes import ROOT, WATCHDOG, Child

import shmq

PAGE = ROOT / "docs" / "celery.md"


def block(language: str, word: str) -> str:
    """The block in this language that has this word."""
    found: list[Program] = [
        one for one in in_markdown(PAGE) if one.language == language and word in one.text
    ]
    assert len(found) == 1, word
    return found[0].text


def test_the_programs_run_as_they_are_pasted(
    instance: str, tmp_path: Path, keep: Callable[[Any], Any]
) -> None:
    def mine(text: str) -> str:
        text = text.replace("shmq://shop", f"shmq://{instance}")
        text = text.replace("--instance shop", f"--instance={instance}")
        return text.replace("/var/tmp/shop", str(tmp_path / "var"))

    (tmp_path / "shop.py").write_text(mine(block("python", "@app.task")))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"PATH": path, "PYTHONPATH": str(tmp_path), "C_FORCE_ROOT": "1"}
    shell = keep(Child(["sh", "-c", mine(block("sh", "shmq serve --instance shop"))], env))
    try:
        shmq.attach(instance, timeout=2 * WATCHDOG).close()
        program = mine(block("python", "from shop import add"))
        said = keep(Child([sys.executable, "-c", program], env)).succeed(2 * WATCHDOG)
        assert said == ["3", "[0, 2, 4]", "3"]
        for line in mine(block("sh", "shmq stat")).splitlines():
            if "flower" not in line:
                line = line.replace("stat -i 1", "stat -n 1")
                shown = subprocess.run(
                    line,
                    shell=True,
                    env={**os.environ, **env, "SHMQ_INSTANCE": instance},
                    capture_output=True,
                    timeout=2 * WATCHDOG,
                )
                assert shown.returncode == 0, (line, shown.stderr)
    finally:
        end(shell)


def end(shell: Child) -> None:
    """Kill the worker and the broker, which hold the shell's pipe."""
    started = psutil.Process(shell.pid).children(recursive=True)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, WATCHDOG)
