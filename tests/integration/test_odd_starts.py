"""Starts with odd names and addresses, and what a killed one has left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.processes import Child


def test_the_next_start_removes_what_a_killed_gateway_left(
    serve: Callable[..., Child],
    new_instance: Callable[[], str],
    keep: Callable[[Any], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "shmq-gateway-file").touch()
    first = serve(tcp_address=tmp_path / "tcp")
    [left] = [path for path in tmp_path.glob("shmq-gateway-*") if path.is_dir()]
    first.kill()
    assert left.exists()
    second = serve(tcp_address=tmp_path / "tcp")
    [own] = [path for path in tmp_path.glob("shmq-gateway-*") if path.is_dir()]
    assert own != left
    data = tmp_path / "other-data"
    data.mkdir()
    keep(processes.serve(new_instance(), data, tcp_address=tmp_path / "other"))
    assert own.exists()
    assert second.kill(signal.SIGTERM) == 0
    assert not own.exists()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "[::1]"])
def test_a_host_without_a_port_is_no_socket(serve: Callable[..., Child], address: str) -> None:
    server = serve(tcp_address=address, wait=False)
    assert server.wait() == 1
    assert f"it has no port: give {address}:PORT, or ./{address} for a Unix socket" in server.errors


def test_a_data_path_that_is_no_utf8_is_refused(
    keep: Callable[[Any], Any], instance: str, tmp_path: Path
) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xe4")
    os.mkdir(path)
    server = keep(processes.serve(instance, Path(path), wait=False))
    assert server.wait() == 1
    assert "its name is not UTF-8; rename it, or give a link to it" in server.errors
    os.symlink(path, tmp_path / "link")
    keep(processes.serve(instance, tmp_path / "link"))


def test_a_data_path_may_have_letters_that_the_locale_has_not(
    keep: Callable[[Any], Any], instance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fünf").mkdir()
    for name, value in {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}.items():
        monkeypatch.setenv(name, value)
    keep(processes.serve(instance, tmp_path / "fünf"))
