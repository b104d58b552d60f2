"""Where the secrets of a query could be seen: plans, logs, errors, events, files that stay."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import processes
from support.access import File
from support.nsq_client import Server
from support.processes import ROOT
from support.spark_home import spark_home

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("installed"), pytest.mark.deep]

JOB = Path(__file__).with_name("secrets_job.py")
TOKEN, SECRET = "b1RtHkEnOfTheQuery", "rUnSoFtHiSqUeRyOnly"
RULES = f"""
[users.spark]
token = "{TOKEN}"
allow = [{{ do = ["all"] }}]
"""


def test_the_token_and_the_secret_of_a_query_are_in_nothing_that_it_leaves_or_says(
    tmp_path: Path,
) -> None:
    """Part of a secret counts too. Executors are processes of their own. All log at INFO: at DEBUG
    Spark itself shows the text of SQL, which may have them."""
    file = File(tmp_path / "access.toml")
    file.write(RULES)
    instance = f"secrets-{os.getpid()}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    home = spark_home(tmp_path / "spark")
    with contextlib.ExitStack() as stack:
        stack.callback(processes.remove_instance, instance)
        server = Server("shmq", tmp_path, instance, file.flag, "--gateway-workers=1")
        stack.callback(server.close)
        errors = stack.enter_context((tmp_path / "driver.err").open("wb"))
        words = [f"127.0.0.1:{server.port()}", str(scratch), TOKEN, SECRET]
        done = subprocess.run(
            [sys.executable, str(JOB), *words],
            env={**os.environ, "SPARK_HOME": str(home), "PYTHONPATH": str(ROOT)},
            cwd=scratch,
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=850,
            check=False,
        )
        server.stop()
        (tmp_path / "driver.out").write_bytes(done.stdout)
        (tmp_path / "server.log").write_text(server.log)
    assert done.stdout.endswith(b"the end\n"), done.stdout[-4000:].decode(errors="replace")

    looked = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    looked = [path for path in looked if path not in (file.path, *home.rglob("jars/*"))]
    names = {str(path.relative_to(tmp_path)) for path in looked}
    for part in (
        "work/app-",
        "events/",
        "checkpoint-right/offsets/0",
        "checkpoint-right/commits/0",
    ):
        assert any(part in name for name in names), (part, sorted(names))
    parts = [word[start : start + 12].encode() for word in (TOKEN, SECRET) for start in (0, 3)]
    shown = {
        (str(path.relative_to(tmp_path)), line[-300:].decode(errors="replace"))
        for path in looked
        for line in path.read_bytes().splitlines()
        if any(part in line for part in parts)
    }
    assert not shown
    said = done.stdout.decode()
    assert "---- count\n10\n" in said, said[-4000:]
    assert "as it should" in said
    assert "E_AUTH_FAILED" in said or "AUTH failed" in said, said[-4000:]
