"""docs/access.md says what is so: its file is read, and its commands print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shmq.users import ACTS, Quota, Users

PAGE = (Path(__file__).parents[3] / "docs" / "access.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "access.toml"
    path.write_text(block("toml"))
    path.chmod(0o600)
    return tmp_path


def test_the_file_of_the_page_is_right(directory: Path) -> None:
    users = Users.read(str(directory / "access.toml"))
    assert set(users.users) == {"scanner", "worker", "operator", "anonymous"}
    for secret, name in (
        (b"a-token-that-nobody-can-guess-1", "scanner"),
        (b"a-token-that-nobody-can-guess-2", "worker"),
        (b"operator:abc", "operator"),
    ):
        known = users.by_secret(secret)
        assert known is not None
        assert known.user.name == name
    assert users.by_uid(0) is not None
    assert users.users["scanner"].quota == Quota(10, 5000, 64 << 20, 8, 20)


def test_the_commands_of_the_page_print_what_it_shows(directory: Path) -> None:
    lines = block("console").splitlines()
    assert len(lines) == 8
    for asked, shown in zip(lines[::2], lines[1::2], strict=True):
        words = shlex.split(asked.removeprefix("$ "))
        argv = [sys.executable, "-m", *words]
        done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=False)
        assert done.stdout == f"{shown}\n", done.stderr
        assert done.returncode == (0 if shown.startswith("yes") else 1)


def test_the_line_with_openssl_works(directory: Path) -> None:
    line = block("sh").replace("| shmq ", f"| {sys.executable} -m shmq ")
    done = subprocess.run(
        ["bash", "-c", line], cwd=directory, capture_output=True, text=True, check=True
    )
    key = done.stdout.strip()
    users = Users.parse(f"[users.a]\n{key}\n")
    token = (directory / "scanner.token").read_bytes().strip()
    assert users.by_token(token) is not None


def test_the_page_has_each_act_and_each_quota() -> None:
    table = PAGE.partition("## Acts")[2].partition("## Proofs")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {*ACTS, "all"}
    table = PAGE.partition("## Quotas")[2].partition("## A change")[0]
    quotas = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert quotas == set(Quota.__dataclass_fields__)
