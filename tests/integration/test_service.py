"""`shmq serve` as a service: what it tells its manager, how it stops, who may use it."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.processes import Child, eventually, say
from support.service_manager import Manager

import shmq
from shmq import sources
from shmq.supervisor import watchdog as watchdog_module

# ---- notify, watchdog, socket passing ----


@pytest.mark.parametrize("manager", ["path", "abstract"], indirect=True)
def test_a_service_says_when_it_is_ready_how_it_is_and_when_it_stops(
    manager: Manager,
    service: Callable[..., Child],
    instance: str,
    attach: Callable[[], shmq.Broker],
) -> None:
    server = service(env={"NOTIFY_SOCKET": manager.address})
    ready = manager.wait("READY", "^1$")
    assert ready["MAINPID"] == str(server.pid)
    assert processes.answers(instance, server.pid), "open to clients before it says so"
    assert ready["STATUS"] == "0 queues, depth 0, 0 clients"

    broker = attach()
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"x"] * 7)
    manager.wait("STATUS", "^1 queues, depth 7, 1 clients$")
    count = len(manager.messages)
    manager.read(4.0)
    assert manager.messages[count:] == [], "nothing new, nothing said; and nobody asks for a beat"

    server.process.terminate()
    manager.wait("STOPPING", "^1$")
    assert manager.wait("EXTEND_TIMEOUT_USEC")["EXTEND_TIMEOUT_USEC"] == "30000000"
    assert server.wait() == 0
    assert {pid for _, pid, _ in manager.messages} == {server.pid}, "NotifyAccess=main is enough"


def test_a_watchdog_gets_a_sign_of_life_twice_in_its_time(
    manager: Manager, service: Callable[..., Child]
) -> None:
    env = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "600000"}
    server = service(env=env)
    manager.wait("READY")
    began = len(manager.messages)

    def beats() -> list[float]:
        return [when for when, _, message in manager.messages[began:] if "WATCHDOG" in message]

    eventually(lambda: manager.read(0.05) or len(beats()) >= 8)
    pauses = [after - before for before, after in zip(beats(), beats()[1:], strict=False)]
    assert sorted(pauses)[len(pauses) // 2] < 0.6, "within WatchdogSec, on a busy machine mostly"

    server.stop()
    manager.read(0.7)
    count = len(manager.messages)
    manager.read(1.0)
    assert len(manager.messages) == count, "who is stopped gives none"
    server.go_on()
    manager.wait("WATCHDOG", after=count)


def test_a_watchdog_of_another_process_is_not_answered(
    manager: Manager, service: Callable[..., Child]
) -> None:
    service(env={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": "1"})
    manager.wait("READY")
    manager.read(1.0)
    assert not [message for _, _, message in manager.messages if "WATCHDOG" in message]


STUCK_AFTER = "import shmq.supervisor.watchdog as w; w._STUCK = 1.0\n"


def test_no_sign_of_life_when_a_loop_hangs(manager: Manager, service: Callable[..., Child]) -> None:
    hang = (
        "from shmq.supervisor.metadata_writer import MetadataWriter\n"
        "MetadataWriter.run = lambda *_: time.sleep(3600)"
    )
    server = service(
        before=f"{STUCK_AFTER}{hang}",
        env={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "400000"},
    )
    manager.wait("STATUS", "the metadata writer has not moved")
    count = len(manager.messages)
    manager.read(1.5)
    assert not [message for _, _, message in manager.messages[count:] if "WATCHDOG" in message]
    assert "the service manager gets no sign of life" in server.errors
    # what systemd does then: where every loop was is in the log
    assert server.kill(signal.SIGABRT) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in server.errors


def hold_publish_lock(instance: str, topic: str) -> None:
    """Lock a topic's P as the core would, and never let go."""
    import ctypes
    import mmap

    from shmq import _native
    from shmq.sources import open_readonly

    directory = open_readonly(instance).directory
    entry = directory.find_topic(topic)
    at = directory.read("topics_at") + entry.index * _native.SIZES["topic"]
    at += _native.LAYOUT["topic"]["publish"][1]
    with open(f"/dev/shm/shmq.{instance}", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped, at))
    assert ctypes.CDLL(None).pthread_mutex_lock(ctypes.c_void_p(address)) == 0
    say("held")
    sys.stdin.readline()
    vanish()  # noqa: F821 - of PRELUDE; the kernel marks the lock


def test_a_loop_behind_a_stopped_client_is_no_reason_to_be_killed(
    manager: Manager,
    service: Callable[..., Child],
    instance: str,
    attach: Callable[[], shmq.Broker],
    child: Callable[..., Child],
) -> None:
    server = service(
        before=STUCK_AFTER, env={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "400000"}
    )
    manager.wait("READY")
    attach().create_topic("t")
    holder = child(hold_publish_lock, instance, "t")
    holder.said("held")
    asking = child(create_channel, instance)  # the request server waits for P now
    manager.wait("STATUS", "thread [0-9]+ of a client holds the publish lock of t")
    count = len(manager.messages)
    manager.wait("WATCHDOG", after=count)
    assert server.process.poll() is None
    holder.tell("")
    asking.said("made")
    manager.wait("STATUS", "^1 queues, depth 0, [12] clients$", after=count)


def create_channel(instance: str) -> None:
    shmq.attach(instance).create_channel("t", "c")
    say("made")


@pytest.mark.parametrize(
    ("number", "health", "well"),
    [
        (errno.EROFS, "NOK - Read-only file system", False),
        (errno.EROFS, "OK", True),  # no work for it that it refused
        (errno.ENOSPC, "NOK - No space left on device", True),  # another start makes no room
        (0, "NOK - Input/output error", True),  # it works again, the spiller will see
    ],
)
def test_a_disk_that_refuses_its_work_is_ill_and_a_full_one_is_not(
    number: int, health: str, well: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(path: Path) -> None:
        if number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(watchdog_module, "probe", probe)
    service = object.__new__(watchdog_module.Watchdog)
    service._data_path, service._health = tmp_path, lambda: health
    trouble = service._disk_trouble()
    assert trouble == "" if well else "Read-only file system" in trouble


def test_the_probe_of_the_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog_module.probe(tmp_path)
    opened = os.open

    def without_tmpfile(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", without_tmpfile)
    watchdog_module.probe(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        watchdog_module.probe(tmp_path / "gone")


def test_passed_sockets_are_kept_for_the_gateway(
    service: Callable[..., Child], instance: str, tmp_path: Path
) -> None:
    path = tmp_path / "tcp.sock"
    before = f"""
import socket
made = socket.socket(socket.AF_UNIX)
made.bind({str(path)!r})
made.listen()
if made.fileno() != 3:
    os.dup2(made.fileno(), 3)
    made.close()
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="tcp")
"""
    server = service(before=before)
    eventually(lambda: processes.answers(instance, server.pid))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    flags = Path(f"/proc/{server.pid}/fdinfo/3").read_text()
    assert int(re.findall(r"flags:\s+([0-7]+)", flags)[0], 8) & os.O_CLOEXEC


def test_an_embedded_supervisor_says_nothing_to_its_starters_manager(
    tmp_path: Path, keep: Callable[[Any], Any], child: Callable[..., Child]
) -> None:
    manager: Manager = keep(Manager(str(tmp_path / "notify")))
    embedding = child(
        embed, str(tmp_path), env={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000"}
    )
    embedding.succeed()
    manager.read(0.1)
    assert manager.messages == []


def embed(data_path: str) -> None:
    with shmq.Broker(data_path):
        time.sleep(1)


def test_a_failed_start_says_why(
    tmp_path: Path, keep: Callable[[Any], Any], service: Callable[..., Child]
) -> None:
    manager: Manager = keep(Manager(str(tmp_path / "notify")))
    server = service(f"--data-path={tmp_path}/none", env={"NOTIFY_SOCKET": manager.address})
    assert server.wait() == 1
    manager.wait("STATUS", "data path does not exist")
    assert not [message for _, _, message in manager.messages if "READY" in message]


# ---- open files ----


@pytest.mark.parametrize("hard", [4096, 600])
def test_a_service_may_open_as_many_files_as_its_user(
    hard: int, service: Callable[..., Child], instance: str
) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))"
    server = service(before=limit)
    eventually(lambda: processes.answers(instance, server.pid))
    assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    assert (f"RLIMIT_NOFILE is {hard}" in server.errors) == (hard == 600)


def attach_often(instance: str, count: int) -> None:
    joined = [shmq.attach(instance) for _ in range(count)]
    taken = [broker.consumer("t", "c").take(timeout=60) for broker in joined]
    say("holds", len(taken))
    sys.stdin.readline()


def test_more_clients_than_files_are_reaped_all_the_same(
    service: Callable[..., Child], child: Callable[..., Child], instance: str
) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    server = service(before=limit)
    with shmq.attach(instance, timeout=processes.WATCHDOG) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish_many([b"x"] * 80)
        many = child(attach_often, instance, 80)
        many.said("holds 80")
        used = len(os.listdir(f"/proc/{server.pid}/fd"))
        assert used < 64, "some are left for what must be opened"
        broker.create_channel("t", "d")  # takes some
        many.kill()
        consumer = broker.consumer("t", "c", max_in_flight=100)
        for _ in range(80):
            assert consumer.take(timeout=processes.WATCHDOG) is not None
    assert "crashed" not in server.errors


# ---- options and logs ----


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(
    service: Callable[..., Child], instance: str, tmp_path: Path
) -> None:
    file = tmp_path / "shmq.toml"
    file.write_text(
        'mem_queue_size = "77"\nmsg_timeout = 1500\nmax_req_timeout = "2h"\nid = 9\n'
        "max_msg_timeout = 5000\nbroadcast_address = 'there'\n"
    )
    server = service(f"--config={file}", "--max-msg-timeout=30s")
    eventually(lambda: processes.answers(instance, server.pid))
    limits = sources.open_readonly(instance).directory.limits
    assert int(limits["mem_queue_size"]) == 77  # text is converted
    assert int(limits["msg_timeout"]) == 1_500_000_000  # a bare number is milliseconds
    assert int(limits["max_req_timeout"]) == 7200 * 10**9
    assert int(limits["max_msg_timeout"]) == 30 * 10**9
    assert int(limits["node_id"]) == 9
    assert int(limits["max_msg_size"]) == 1 << 20


@pytest.mark.parametrize(
    ("text", "words"),
    [("mem_queue_size = 'many'", "whole number"), ("= what", "cannot read"), (None, "cannot read")],
)
def test_a_file_that_is_wrong_is_a_usage_error(
    text: str | None, words: str, service: Callable[..., Child], tmp_path: Path
) -> None:
    file = tmp_path / "shmq.toml"
    if text is not None:
        file.write_text(text)
    server = service(f"--config={file}")
    assert server.wait() == 2
    assert words in server.errors


def test_the_log_can_be_json(service: Callable[..., Child], instance: str) -> None:
    crash = """
import shmq.supervisor.metadata_writer as m
def run(self, bell):
    raise RuntimeError("two\\nlines")
m.MetadataWriter.run = run
"""
    server = service("--log-format=json", before=crash)
    eventually(lambda: processes.answers(instance, server.pid))
    eventually(lambda: "metadata writer crashed" in server.errors)
    server.process.terminate()
    assert server.wait() == 0
    lines = [json.loads(line) for line in server.errors.splitlines()]
    assert {"info", "error"} <= {line["level"] for line in lines}
    for line in lines:
        assert set(line) - {"exception"} == {
            "time",
            "level",
            "logger",
            "message",
            "instance",
            "pid",
        }
        assert (line["instance"], line["pid"]) == (instance, server.pid)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"])
        assert line["logger"].startswith("shmq.")
    crashes = [line for line in lines if "crashed" in line["message"]]
    assert "two\nlines" in crashes[0]["exception"]


# ---- an instance that a group shares ----
