"""Tests start no program that a fresh machine lacks; tests/support/programs.py looks at each."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support import programs


@pytest.mark.parametrize("wrapper", [(), ("nice", "-n", "5"), ("env", "LANG=C", "setsid", "-w")])
def test_a_program_that_nobody_installs_is_refused(
    wrapper: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "MINIMUM", programs.MINIMUM - {"uname"})
    if shutil.which("uname") is None or not programs._is_of_the_system("uname"):
        pytest.skip("there is no uname")
    with pytest.raises(AssertionError, match=r"^uname is not on every machine"):
        subprocess.run([*wrapper, "uname", "-r"], check=False)


def test_programs_of_the_minimum_of_the_suite_and_of_a_test_run(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("#!/bin/sh\nexit 7\n")
    mine.chmod(0o755)
    assert subprocess.run([str(mine)], check=False).returncode == 7
    assert subprocess.run(["nice", "uname"], stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert programs.installed()["pgrep"] == "procps"
