"""Half a minute of `tools/dev watch`, which keeps the page open for an hour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import HELPERS, ROOT

WATCH = str(ROOT / "tools" / "chaos" / "watch.py")


@pytest.mark.deep
def test_the_page_under_load_fails_nowhere_and_every_measure_is_taken(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["--hours=0.008", "--channels=100", f"--json={result}"]
    done = subprocess.run(
        [sys.executable, WATCH, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **HELPERS},
    )
    found = json.loads(result.read_text())
    assert found["errors"] == [], done.stdout
    measured = {finding["name"]: finding["samples"] for finding in found["findings"]}
    assert set(measured) >= {"server: private memory", "tab: memory of scripts", "tab: nodes"}
    assert all(measured.values()), done.stdout + done.stderr
    assert "the server used" in done.stdout
