"""The protocols of systemd without systemd, the loops's back-off, the units in systemd/."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.external_programs import peer
from support.processes import ROOT, WATCHDOG, eventually

from shmq.options import OPTIONS
from shmq.supervisor import loops as loops_module
from shmq.supervisor import progress as progress_module
from shmq.supervisor.loops import Bell, Loops
from shmq.supervisor.systemd import Notifier, PassedSocket, listen_fds

UNITS = ROOT / "systemd"


# ---- sd_notify ----


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """NOTIFY_SOCKET's value, and the socket behind it."""
    if request.param == "path":
        text = address = str(tmp_path / "notify")
    else:
        text = f"@shmq-test-{os.getpid()}-{time.monotonic_ns()}"
        address = "\0" + text[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind(address)
        received.settimeout(5)
        yield text, received


def test_messages_reach_the_socket(manager: tuple[str, socket.socket]) -> None:
    address, received = manager
    notifier = Notifier(address, watchdog=4.0)
    assert notifier
    assert notifier.watchdog == 4.0
    notifier.ready("1 queue\nand a line")
    assert (
        received.recv(999).decode() == f"READY=1\nMAINPID={os.getpid()}\nSTATUS=1 queue and a line"
    )
    notifier.status("well")
    assert received.recv(999) == b"STATUS=well"
    notifier.alive()
    assert received.recv(999) == b"WATCHDOG=1"
    notifier.stopping("flushing")
    assert received.recv(999) == b"STOPPING=1\nSTATUS=flushing"
    notifier.extend(1.5, "more")
    assert received.recv(999) == b"EXTEND_TIMEOUT_USEC=1500000\nSTATUS=more"
    notifier.close()


def test_a_manager_that_is_not_there_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = Notifier()
    silent.ready()
    silent.alive()
    assert not silent
    gone = Notifier(str(tmp_path / "nobody"), watchdog=1)
    gone.ready()
    gone.alive()
    assert len(caplog.records) == 1, "said once"
    gone.close()
    odd = Notifier("vsock:2:9", watchdog=1)
    assert not odd
    assert odd.watchdog == 0


def test_a_manager_that_was_executed_again_is_found_again(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    notifier = Notifier(path)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
            received.bind(path)
            notifier.status("hello")
            assert received.recv(99) == b"STATUS=hello"
        os.unlink(path)
    notifier.close()


def test_the_environment_is_read_once_and_not_handed_on() -> None:
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "", "HOME": "/"}
    assert Notifier.from_environment(environ).watchdog == 3.0
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("2000000", str(os.getpid()), 2.0),
        ("2000000", "1", 0.0),
        ("soon", "", 0.0),
        ("", "", 0.0),
    ],
    ids=["its own", "another's", "no number", "none"],
)
def test_the_watchdog_is_for_the_process_it_names(usec: str, pid: str, seconds: float) -> None:
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}
    assert Notifier.from_environment(environ).watchdog == seconds


def test_without_a_socket_there_is_no_watchdog() -> None:
    assert Notifier.from_environment({"WATCHDOG_USEC": "2000000"}).watchdog == 0


# ---- progress ----


def test_progress_is_said_every_two_seconds_and_not_before(
    manager: tuple[str, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    address, received = manager
    now = 100.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    caplog.set_level("INFO")
    notifier = Notifier(address)
    progress = progress_module.Progress("adopting", 5, notifier)
    for now in (100.5, 101.9, 102.0, 103.9):  # noqa: B007 - the clock
        progress.step()
    now = 104.1
    progress.within("t:c: 7 messages")
    lines = ["adopting: 3 of 5 queues", "adopting: 4 of 5 queues; t:c: 7 messages"]
    assert caplog.messages == lines
    for line in lines:
        assert received.recv(999).decode() == f"EXTEND_TIMEOUT_USEC=30000000\nSTATUS={line}"
    notifier.close()


# ---- sd_listen_fds ----

LISTENER = """
import json, os, socket, sys
from shmq.supervisor.systemd import listen_fds
sockets = []
for fd in range(3, 3 + int(sys.argv[1])):
    made = socket.socket()
    os.dup2(made.fileno(), 100 + fd)
    sockets.append(100 + fd)
    made.close()
for fd in sockets:
    os.dup2(fd, fd - 100)
    os.close(fd)
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": sys.argv[2], "LISTEN_FDNAMES": sys.argv[3]}
try:
    passed = listen_fds(environ)
except ValueError as exc:
    print(exc)
    sys.exit(1)
flags = [os.get_inheritable(item.fd) for item in passed]
print(json.dumps([[[item.fd, item.name] for item in passed], flags, environ]))
"""


def listen(opened: int, count: str, names: str) -> subprocess.CompletedProcess[str]:
    """listen_fds in a process of its own, where 3 and the following can be what they must be."""
    words = [sys.executable, "-c", LISTENER, str(opened), count, names]
    return subprocess.run(words, capture_output=True, text=True, timeout=2 * WATCHDOG, check=False)


def test_passed_sockets_have_names_and_close_on_exec() -> None:
    ended = listen(3, "3", "tcp:http")
    assert (
        ended.stdout.strip()
        == '[[[3, "tcp"], [4, "http"], [5, "unknown"]], [false, false, false], {}]'
    )


def test_a_passed_socket_that_is_not_open_is_an_error() -> None:
    ended = listen(1, "2", "")
    assert ended.returncode == 1
    assert "LISTEN_FDS=2, but descriptor 4 is not open" in ended.stdout


def test_sockets_for_another_process_are_not_ours() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "tcp", "PATH": ""}
    assert listen_fds(environ) == ()
    assert environ == {"PATH": ""}
    assert listen_fds({}) == ()
    assert listen_fds({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"}) == ()
    with pytest.raises(ValueError, match="LISTEN_FDS must be a number"):
        listen_fds({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "-1"})
    assert PassedSocket(3, "tcp") == PassedSocket(3, "tcp")


# ---- the loops: what the watchdog asks, back-off ----


@pytest.fixture
def loops() -> Iterator[Loops]:
    made = Loops()
    yield made
    made.stop()


def test_a_crashing_loop_is_started_again_after_growing_pauses(
    loops: Loops, caplog: pytest.LogCaptureFixture
) -> None:
    starts: list[float] = []
    works = threading.Event()

    def loop(bell: Bell) -> None:
        starts.append(time.monotonic())
        if len(starts) <= 3:
            raise RuntimeError(f"crash {len(starts)}")
        works.set()
        while not bell.check():
            bell.wait(0.01)

    other = loops.add(
        "other", lambda bell: [bell.wait(0.01) for _ in iter(lambda: bell.check(), True)]
    )
    bell = loops.add("loop", loop)
    loops.start()
    while not works.is_set():
        bell.ring()  # a busy broker rings all the time; that is no reason to hurry
        time.sleep(0.001)
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=True):
        assert pause >= least
    assert loops.crashes == 3
    assert loops.ill(5.0) == "", "a loop that works again is well"
    assert not other.check()
    crashes = [record for record in caplog.records if "crashed" in record.message]
    assert [record.message.rpartition(" in ")[2] for record in crashes] == [
        "0.1 s",
        "0.2 s",
        "0.4 s",
    ]
    assert all(record.exc_info for record in crashes)


def test_a_pause_ends_with_the_broker(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops_module, "_FIRST_PAUSE", 3600.0)

    def crash(bell: Bell) -> None:
        raise RuntimeError("at once")

    loops.add("loop", crash)
    loops.start()
    eventually(lambda: loops.crashes == 1)
    loops.stop()
    assert loops.living == 0


def test_a_loop_that_keeps_crashing_is_ill_until_it_is_calm(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(loops_module, "_LAST_PAUSE", 0.004)
    monkeypatch.setattr(loops_module, "_CALM", 1.0)
    well = threading.Event()

    def loop(bell: Bell) -> None:
        if not well.is_set():
            raise RuntimeError("again")
        while not bell.check():
            bell.wait(0.01)

    loops.add("loop", loop)
    loops.start()
    eventually(lambda: loops.ill(60.0) == "the loop keeps crashing")
    well.set()
    eventually(lambda: loops.ill(60.0) == "")


def test_a_loop_that_does_not_move_or_has_ended_is_ill(loops: Loops) -> None:
    go_on = threading.Event()

    def hang(bell: Bell) -> None:
        go_on.wait()
        while not bell.check():
            bell.wait(0.01)

    loops.add("loop", hang)
    loops.start()
    eventually(lambda: re.fullmatch("the loop has not moved for [0-9]+ s", loops.ill(0.1)))
    assert loops.living == 1
    go_on.set()
    eventually(lambda: loops.ill(0.1) == "")

    ended = Loops()
    ended.add("short", lambda bell: None)
    ended.start()
    eventually(lambda: ended.ill(60.0) == "the short has ended")


# ---- the units ----


@pytest.fixture
def analyze(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`systemd-analyze WORDS` where the units are, as instance `x`."""
    program = peer("systemd-analyze")
    for unit in UNITS.glob("*@.*"):
        # its ExecStart has to exist
        text = unit.read_text().replace("/usr/bin/shmq ", f"{os.path.realpath('/bin/true')} ")
        (tmp_path / unit.name).write_text(text)
        (tmp_path / unit.name.replace("@", "@x")).write_text(text)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": "", "LC_ALL": "C"},
        )

    return run


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*@.*")))
def test_units_are_understood(
    unit: str, analyze: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    ended = analyze("verify", f"./{unit.replace('@', '@x')}")
    # other units of the machine may be read too; ours must not be spoken of
    said = [line for line in ended.stderr.splitlines() if "shmq" in line]
    assert (ended.returncode, said) == (0, [])


def test_the_service_is_hardened(
    analyze: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    ended = analyze("security", "--offline=true", "--no-pager", "./shmq@x.service")
    level = re.search(r"Overall exposure level for shmq@x.service: ([0-9.]+)", ended.stdout)
    assert level is not None, ended.stderr
    assert float(level[1]) <= 1.4, ended.stdout


def settings(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().splitlines():
        if line and line[0] not in "#;[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_service_leaves_shared_memory_alone() -> None:
    service = settings("shmq@.service")
    assert service["RemoveIPC"] == ["no"]
    assert "DynamicUser" not in service  # it implies RemoveIPC
    assert service["PrivateUsers"] == ["no"]
    assert service["ProtectProc"] == ["default"]
    assert service["ProcSubset"] == ["all"]
    assert "PrivateIPC" not in service


def test_the_service_is_contained() -> None:
    """Resource limits end a runaway service, and it talks to this host only unless told
    otherwise."""
    service = settings("shmq@.service")
    assert service["MemoryMax"] == ["75%"]
    assert int(service["TasksMax"][0]) >= 256
    assert service["LimitCORE"] == ["0"]
    for unit in ("shmq@.service", "shmq@.socket", "shmq-http@.socket"):
        found = settings(unit)
        assert (found["IPAddressDeny"], found["IPAddressAllow"]) == (["any"], ["localhost"]), unit
    assert "run code as user shmq" in (UNITS / "shmq@.service").read_text()


def test_the_service_is_reloaded_by_a_hangup() -> None:
    assert settings("shmq@.service")["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_the_service_says_flags_that_there_are() -> None:
    words = settings("shmq@.service")["ExecStart"][0].split()
    assert words[:2] == ["/usr/bin/shmq", "serve"]
    known = {option.flag for option in OPTIONS.values()}
    assert {word.partition("=")[0] for word in words[2:] if word.startswith("--")} <= known


def test_the_sockets_have_the_names_the_gateway_looks_for() -> None:
    tcp, http = settings("shmq@.socket"), settings("shmq-http@.socket")
    assert (tcp["FileDescriptorName"], tcp["ListenStream"][0]) == (["tcp"], "127.0.0.1:4150")
    assert (http["FileDescriptorName"], http["ListenStream"][0]) == (["http"], "127.0.0.1:4151")
    assert http["Service"] == ["shmq@%i.service"]


def test_user_and_directories_can_be_made(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make users, also in a directory")
    (tmp_path / "etc").mkdir()
    for program, name in (("sysusers", "shmq.sysusers"), ("tmpfiles", "shmq.tmpfiles")):
        conf = tmp_path / f"{name}.conf"
        shutil.copy(UNITS / name, conf)
        words = ["--create"] if program == "tmpfiles" else []
        argv = [peer(f"systemd-{program}"), f"--root={tmp_path}", *words, str(conf)]
        subprocess.run(argv, check=True)
    fields = (tmp_path / "etc" / "passwd").read_text().strip().split(":")
    assert fields[0] == "shmq"
    assert 0 < int(fields[2]) < 1000, "a system user: logind's RemoveIPC spares it"
    assert (tmp_path / "var" / "lib" / "shmq").stat().st_uid == int(fields[2])
