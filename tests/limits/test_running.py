"""Every table filled, every size exceeded, by each way in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import HELPERS, TESTS
from support.small_memory import mounted

from limits import machine, running_room  # noqa: F401
from limits.bounds import AS_NUMBERS, ELSEWHERE, INNER, defined
from limits.machine import Sheet
from limits.planted import PLANTS
from limits.running import ROWS
from limits.site import TOPICS, Site
from shmq.options import OPTIONS

#: No run-time limits, or none that a client can exceed: option -> why.
OTHER = {
    "max_bytes_per_file": "files are as many as are needed",
    "history_bytes": "the oldest of the history gives way",
    "max_connections_per_address": "nsqd/gateway has its tests, with addresses",
    "max_buffered_bytes": "nsqd/gateway has its tests",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("site")
    made = Site(path, f"limits-{path.parent.name[-20:]}-running", max_topics=TOPICS)
    yield made
    made.close()


def test_every_bound_of_the_headers_has_a_row_or_a_reason() -> None:
    shown = {name for row in ROWS.values() for name in row.covers}
    found = set(defined())
    assert len(found) > 50
    others = set(INNER) | set(AS_NUMBERS) | set(ELSEWHERE)
    assert not found - shown - others, "add a row to limits/running.py"
    assert not others - found, "a bound that is no more"
    assert all((TESTS / path).exists() for path in ELSEWHERE.values())


def test_every_limiting_option_has_a_row_or_a_reason() -> None:
    limiting = {
        name
        for name, option in OPTIONS.items()
        if option.low is not None
        and (option.group == "memory" or name.startswith(("max_", "min_")))
    }
    assert len(limiting) > 15
    assert limiting <= {name for row in ROWS.values() for name in row.covers} | set(OTHER)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.deep) if row.deep else name
        for name, row in ROWS.items()
    ],
)
def test_a_limit_is_named_and_nothing_is_lost(site: Site, name: str) -> None:
    sheet = Sheet()
    ROWS[name].fill(site, sheet)
    site.check()
    assert sheet.tried
    sheet.verdict()


@pytest.mark.deep
def test_all_that_with_64_mib_of_shared_memory(tmp_path: Path) -> None:
    words = [*mounted("64m"), sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    words += [f"--basetemp={tmp_path / 'b'}", __file__, "-k", "is_named_and_nothing"]
    words += ["-m", "not deep"]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, **HELPERS}, check=False
    )
    assert done.returncode == 0, done.stdout


# ---- planted faults ----


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, sheet = PLANTS[name], Sheet()
    plant.put(monkeypatch)
    ROWS[plant.row].fill(site, sheet)
    assert any(re.search(plant.found, fault) for fault in sheet.faults), sheet.faults


def test_a_call_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "WATCHDOG", 0.01)
    end = threading.Event()
    sheet = Sheet()
    sheet.cell("a wait", end.wait, "", lambda: None)
    end.set()
    assert sheet.faults[0].startswith("a wait: it hangs")
