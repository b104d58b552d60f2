"""The real command is told what is beyond a limit: on its command line, in its file, in its
environment. It ends with the status of a wrong use, or of an error, and says one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.processes import ROOT

from limits.machine import Sheet
from limits.site import CHANNEL, GONE, Site
from limits.test_options import BOUNDED, COMMANDS, LASTING, beyond, numbers_of_commands, text
from shmq.option_types import Kind
from shmq.supervisor.systemd import Notifier

#: How many run at a time.
AT_ONCE = 2
USAGE, ERROR, NOT_RUNNING = 2, 1, 3


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("site")
    made = Site(path, f"limits-{path.parent.name[-20:]}-process")
    made.broker.create_channel(GONE, CHANNEL)
    yield made
    made.close()


class Said(ValueError):
    """A command has failed, and printed this."""


def run(*words: str) -> str:
    """Return the output of the command. Raises Said if it fails, with one sentence."""
    done = subprocess.run(
        [sys.executable, "-m", "shmq", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return _said(done)


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    said = done.stderr.decode(errors="backslashreplace")
    assert "Traceback" not in said, said
    if done.returncode in (USAGE, ERROR, NOT_RUNNING):
        lines = [line for line in said.splitlines() if not re.match(r"Usage: |Try '|$", line)]
        assert len(lines) == 1, said
        raise Said(said)
    assert done.returncode == 0, (done.returncode, said)
    return done.stdout.decode()


def each_of(cells: list[tuple[Any, ...]]) -> None:
    """Try cells, some at a time. Each: its name, what to call, what the error says."""
    sheets = [Sheet() for _ in cells]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for sheet, (name, call, says) in zip(sheets, cells, strict=True):
            threads.submit(sheet.cell, name, call, says, lambda: None)
    whole = Sheet()
    for sheet in sheets:
        whole.tried += sheet.tried
        whole.faults += sheet.faults
    assert whole.tried == len(cells)
    whole.verdict()


def test_shmq_serve_refuses_a_number_of_each_kind(tmp_path: Path) -> None:
    """All options are tried in `test_options.py`, in one process."""
    kinds: dict[Kind, str] = {}
    for name, option in BOUNDED.items():
        kinds.setdefault(option.kind, name)
    assert len(kinds) >= 4
    data = f"--data-path={tmp_path}"
    cells: list[tuple[Any, ...]] = []
    for number, name in enumerate(kinds.values()):
        option = BOUNDED[name]
        value = text(option, beyond(option)[number % 2])
        flag = f"{option.flag}={value}"
        file = tmp_path / f"{number}.toml"
        file.write_text(f'{option.key} = "{value}"\n')
        cells += [
            (flag, lambda flag=flag: run("serve", data, flag), rf"\b{name}\b"),
            (
                f"{option.key} in a file",
                lambda file=file: run("serve", data, f"--config={file}"),
                rf"\b({name}|{option.key})\b",
            ),
        ]
    each_of(cells)
    assert not (tmp_path / "nsqd.dat").exists()


@pytest.mark.deep
def test_each_command_refuses_its_number(site: Site) -> None:
    firsts = dict(reversed(list(numbers_of_commands())))
    cells: list[tuple[Any, ...]] = []
    for command, one in firsts.items():
        words = [word.format(data=site.directory / "data") for word in COMMANDS[command]]
        name = next((word for word in one.opts if word.startswith("--")), one.opts[-1])
        line = [*command.split(), *words]
        line += [f"{name}=x"] if name.startswith("--") else ["--", "x"]
        cells.append(
            (" ".join(line), lambda line=line: run(*line), rf"(?i){name.strip('-')}|{one.metavar}")
        )
    assert len(cells) == len(COMMANDS) > len(LASTING)
    each_of(cells)
    site.check()


# ---- the environment ----

SERVE = ("serve", "--http-address=127.0.0.1:0", "--data-path={data}")
DIGITS = (str(1 << 32), str(1 << 64), "9" * 400, "9" * 5000)
#: Each variable that a user sets: the words of a command that reads it, values that it cannot be,
#: and what the error names.
VARIABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "SHMQ_INSTANCE": (("stat",), ("x" * 65, "a/b", "../x", "é", " ", "x" * 20_000), "SHMQ_INST"),
    "SHMQ_OWNER": (("stat",), ("no-such-user", "-1", *DIGITS), "SHMQ_OWNER"),
    "SHMQ_HTTP_TOKEN": (SERVE, ("", "short", "x" * 20 + " y", "é" * 20), "SHMQ_HTTP_TOKEN"),
    "SHMQ_FORWARD_LOGIN": (
        ("forward", "a", "b", "nats://127.0.0.1:1"),
        ("/nonexistent", "/dev/null", "x" * 5000),
        "(?i)login",
    ),
    "SHMQ_TOKEN_FILE": (
        ("stat", "--nsqd=127.0.0.1:1"),
        ("/nonexistent", "/dev/null", "x" * 5000),
        "(?i)token",
    ),
    "LISTEN_FDS": (SERVE, ("x", "-1", "1.5", "1000", *DIGITS), "LISTEN_FDS"),
}
#: No values of a user: variable -> why.
FOR_THE_PACKAGE = {
    "SHMQ_NATIVE": "the path of another build of the extension, for tests",
    "SHMQ_WORKER_RELOADS": "from shmq_worker to the process that it starts again",
    "SHMQ_COMPLETE": "of click",
}


def test_each_variable_has_a_row() -> None:
    found = {
        name
        for path in (ROOT / "shmq").rglob("*.py")
        for name in re.findall(r"SHMQ_[A-Z_]+[A-Z]", path.read_text())
    }
    shown = {name for name in VARIABLES if name.startswith("SHMQ_")}
    assert found == shown | set(FOR_THE_PACKAGE)


def test_a_watchdog_of_any_length_is_taken() -> None:
    """One that is no number is none, as sd_watchdog_enabled(3) has it."""
    for value in (*DIGITS, "-1", "x", "1.5", ""):
        found = Notifier.from_environment({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": value})
        assert found.watchdog == (min(float(value) / 1e6, 1e9) if value in DIGITS else 0)


@pytest.mark.parametrize(
    "most", [pytest.param(1, marks=pytest.mark.shallow), pytest.param(99, marks=pytest.mark.deep)]
)
def test_a_variable_is_refused_by_name(tmp_path: Path, most: int) -> None:
    cells = []
    for name, (words, values, says) in VARIABLES.items():
        line = [word.format(data=tmp_path) for word in words]
        for value in values[-most:]:

            def call(name: str = name, value: str = value, line: list[str] = line) -> str:
                return in_this_environment(line, name, value)

            cells.append((f"{name}={value!r:.30}", call, says))
    each_of(cells)


def in_this_environment(line: list[str], name: str, value: str) -> str:
    """`shmq LINE` with the variable. LISTEN_FDS counts only with the pid of the process."""
    start = f"import os; os.environ['LISTEN_PID'] = str(os.getpid()); os.environ[{name!r}] = "
    start += f"{value!r}; from shmq.cli import main; raise SystemExit(main({line!r}))"
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    return _said(done)
