"""The gateway's Unix sockets: who may connect, from the first moment on."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.other_users import GROUP, STRANGER, become, needed

from shmq.gateway import listeners
from shmq.gateway.listeners import open_listeners
from shmq.option_types import OptionError
from shmq.options import Options


@pytest.fixture(params=[0, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def path(path_of_a_user: Callable[[int], Path]) -> Path:
    """Of a socket, in a directory that everybody may enter."""
    directory = path_of_a_user(os.geteuid())
    directory.chmod(0o755)
    return directory / "tcp.sock"


def options(path: Path, **more: object) -> Options:
    return Options(tcp_address=str(path), http_address="", **more)  # type: ignore[arg-type]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def connects(path: Path, uid: int, gid: int) -> bool:
    code = f"{become(uid, gid)}import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0 or "PermissionError" in done.stderr, done.stderr
    return done.returncode == 0


@pytest.mark.parametrize(
    ("more", "mode"),
    [({}, 0o600), ({"socket_mode": 0o666}, 0o666), ({"socket_mode": 0o660}, 0o660)],
)
def test_a_socket_has_the_mode_of_the_options_whatever_the_umask(
    umask: int, path: Path, more: dict[str, int], mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    give = listeners._give

    def noted(where: str, *rights: int) -> None:
        seen.append(mode_of(path))
        give(where, *rights)

    monkeypatch.setattr(listeners, "_give", noted)
    opened = open_listeners(options(path, **more), [])
    try:
        assert seen == [0o600]  # nobody else could connect before it had its mode
        assert mode_of(path) == mode
        assert os.umask(umask) == umask
    finally:
        opened.close()
    assert not path.exists()


@needed
def test_a_group_may_connect_and_others_may_not(path: Path) -> None:
    opened = open_listeners(options(path, socket_group=str(GROUP)), [])
    try:
        assert (mode_of(path), path.stat().st_gid) == (0o660, GROUP)
        assert connects(path, STRANGER, GROUP)
        assert not connects(path, STRANGER, STRANGER)
    finally:
        opened.close()


@needed
def test_a_user_can_only_name_a_group_of_his_own(path_of_a_user: Callable[[int], Path]) -> None:
    path = path_of_a_user(STRANGER) / "sock"
    code = (
        f"{become(STRANGER)}from shmq.gateway.listeners import open_listeners\n"
        "from shmq.options import Options\n"
        f"open_listeners(Options(tcp_address={str(path)!r}, http_address='', "
        f"socket_group='{GROUP}'), [])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert f"cannot give the socket to group gid {GROUP}" in done.stderr
    assert "(--socket-group)" in done.stderr
    assert not path.exists()


def test_a_group_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(OptionError, match="no-such-group"):
        open_listeners(options(path, socket_group="no-such-group"), [])


def left_behind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def test_a_socket_that_a_dead_process_left_is_made_anew(path: Path) -> None:
    left_behind(path)
    open_listeners(options(path), []).close()


@needed
def test_a_socket_of_another_user_stays(path: Path) -> None:
    left_behind(path)
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(OSError, match=f"there is a socket of uid {STRANGER}"):
        open_listeners(options(path), [])
    assert path.stat().st_uid == STRANGER


@pytest.mark.parametrize("kind", ["file", "link", "live"])
def test_what_else_is_there_stays(path: Path, kind: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        if kind == "file":
            path.write_text("precious")
        else:
            at = path if kind == "live" else path.with_name("other")
            sock.bind(str(at))
            if kind == "live":
                sock.listen()
            else:
                path.symlink_to(at)
        with pytest.raises(OSError, match="address already in use"):
            open_listeners(options(path), [])
    assert path.exists()
