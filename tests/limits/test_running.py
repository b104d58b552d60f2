"""Every table filled, every size exceeded, by each way in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import HELPERS, TESTS
from support.small_memory import mounted

import shmq
from limits import machine
from limits.bounds import AS_NUMBERS, ELSEWHERE, INNER, defined
from limits.machine import Sheet
from limits.running import ROWS
from limits.site import MESSAGE, TOPICS, Site
from shmq.options import OPTIONS
from shmq.remote.producer import RemoteProducer

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


def test_a_limit_that_is_believed_from_a_stale_value_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shmq.Broker.limit
    monkeypatch.setattr(
        shmq.Broker, "limit", lambda self, name: real(self, name) * (1 + (name[:5] == "max_m"))
    )
    sheet = Sheet()
    ROWS["times"].fill(site, sheet)
    assert any(fault.startswith("msg_timeout by consumer:") for fault in sheet.faults)


def test_a_body_that_is_cut_in_silence_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RemoteProducer.publish

    def cut(self: RemoteProducer, body: Any, *words: Any) -> None:
        whole(self, body[:MESSAGE], *words)

    monkeypatch.setattr(RemoteProducer, "publish", cut)
    sheet = Sheet()
    ROWS["a_body"].fill(site, sheet)
    assert any(f"{MESSAGE + 1} by remote: it is not refused" in fault for fault in sheet.faults)


def test_a_call_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "WATCHDOG", 0.01)
    end = threading.Event()
    sheet = Sheet()
    sheet.cell("a wait", end.wait, "", lambda: None)
    end.set()
    assert sheet.faults[0].startswith("a wait: it hangs")
