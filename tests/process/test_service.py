"""`shmq serve` as a service: what it tells its manager, how it stops, who may use it."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
from processes import Child, eventually, python_child, say

import shmq
from shmq import layout, segments
from shmq.supervisor import service as service_module

RUN = "from shmq.cli import main; sys.exit(main(sys.argv[1:]))"


class Manager:
    """What systemd is to a service: a datagram socket, read as it would."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.messages: list[tuple[float, int, dict[str, str]]] = []

    def read(self, seconds: float = 0.0) -> None:
        """Take what has come, or comes within so many seconds."""
        while select.select([self._socket], [], [], seconds)[0]:
            data, ancillary, _, _ = self._socket.recvmsg(4096, 128)
            pid = int.from_bytes(ancillary[0][2][:4], sys.byteorder)
            pairs = (line.split("=", 1) for line in data.decode().splitlines())
            self.messages.append((time.monotonic(), pid, dict(pairs)))
            seconds = 0.0

    def wait(self, key: str, pattern: str = "", after: int = 0) -> dict[str, str]:
        """The first message with this, from message `after` on."""

        def found() -> dict[str, str] | None:
            self.read(0.02)
            matching = (
                message for _, _, message in self.messages[after:]
                if key in message and re.search(pattern, message[key])
            )  # fmt: skip
            return next(matching, None)

        message: dict[str, str] = eventually(found, what=f"the service says {key}={pattern}")
        return message

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, keep: Callable[[Any], Any], instance: str
) -> Manager:
    """Behind a path, or with `indirect` as you like."""
    abstract = getattr(request, "param", "path") == "abstract"
    made: Manager = keep(Manager(f"@{instance}" if abstract else str(tmp_path / "notify")))
    return made


@pytest.fixture
def service(
    instance: str, data_path: Path, keep: Callable[[Any], Any], tmp_path: Path
) -> Callable[..., Child]:
    """`service(*words, before=code, env=...)`: `shmq serve` on `instance`, not waited for. before:
    Python to run first in its process."""

    def start(*words: str, before: str = "", env: dict[str, str] | None = None) -> Child:
        code = f"import os, signal, sys, time\n{before}\n{RUN}"
        argv = [sys.executable, "-c", code, "serve", f"--instance={instance}"]
        argv += [f"--data-path={data_path}", *processes.NO_GATEWAY]
        return keep(Child([*argv, *words], env))  # type: ignore[no-any-return]

    return start


def bodies(consumer: shmq.Consumer, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        message = consumer.take(timeout=processes.WATCHDOG)
        assert message is not None
        found.append(message.body)
        message.finish()
    return found


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


STUCK_AFTER = "import shmq.supervisor.service as s; s._STUCK = 1.0\n"


def test_no_sign_of_life_when_a_loop_hangs(manager: Manager, service: Callable[..., Child]) -> None:
    hang = "import shmq.supervisor.ledger as l; l.Ledger.run = lambda *_: time.sleep(3600)"
    server = service(
        before=f"{STUCK_AFTER}{hang}",
        env={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "400000"},
    )
    manager.wait("STATUS", "the ledger has not moved")
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
    from shmq.layout import open_readonly

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
    asking = child(create_channel, instance)  # the creator waits for P now
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

    monkeypatch.setattr(service_module, "_probe", probe)
    service = object.__new__(service_module.Service)
    service._data_path, service._health = tmp_path, lambda: health
    trouble = service._disk_trouble()
    assert trouble == "" if well else "Read-only file system" in trouble


def test_the_probe_of_the_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service_module._probe(tmp_path)
    opened = os.open

    def without_tmpfile(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", without_tmpfile)
    service_module._probe(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        service_module._probe(tmp_path / "gone")


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


# ---- a long start and stop ----

CHATTY = "from shmq.supervisor import progress; progress._EVERY = 0.0"
LISTED = """
look = os.listdir
def listdir(path="."):
    if str(path) == {path!r}:
        os.write(1, b"listed\\n")
    return look(path)
os.listdir = listdir
"""


def test_a_long_start_or_stop_says_how_far_it_has_come(
    manager: Manager, service: Callable[..., Child], attach: Callable[[], shmq.Broker]
) -> None:
    def serve_on(*words: str) -> Child:
        server = service(*words, before=CHATTY, env={"NOTIFY_SOCKET": manager.address})
        manager.wait("READY", after=len(manager.messages))
        return server

    def steps(server: Child, what: str) -> list[str]:
        return re.findall(rf" {what}: (.*)", server.errors)

    first = serve_on("--on-stop=keep")
    broker = attach()
    for channel in "abc":
        broker.create_channel("t", channel)
    broker.producer("t").publish(b"x")
    assert first.kill(signal.SIGTERM) == 0
    each = [f"{done} of 3 queues" for done in (1, 2, 3)]
    assert steps(first, "keeping") == each

    count = len(manager.messages)
    second = serve_on()
    assert steps(second, "adopting") == each
    told = manager.wait("STATUS", "^adopting: 3 of 3 queues$", after=count)
    assert told["EXTEND_TIMEOUT_USEC"] == "30000000"
    assert second.kill(signal.SIGTERM) == 0
    flushed = steps(second, "flushing to disk")
    assert [line for line in flushed if ";" not in line] == each
    assert "0 of 3 queues; t:a: 1 messages" in flushed

    count = len(manager.messages)
    third = serve_on()
    assert steps(third, "making what was there") == each
    manager.wait("STATUS", "^making what was there: 3 of 3 queues$", after=count)


def test_a_start_does_not_read_the_data_path_for_each_queue(
    service: Callable[..., Child], instance: str, data_path: Path
) -> None:
    before, channels = LISTED.format(path=str(data_path)), 40

    def starts() -> Child:
        server = service(before=before)
        eventually(lambda: processes.answers(instance, server.pid))
        return server

    server = starts()
    with shmq.attach(instance) as broker:
        for number in range(channels):
            broker.create_channel("t", f"c{number}")
        broker.producer("t").publish(b"x")
        assert server.kill(signal.SIGTERM) == 0
    server = starts()  # all from files
    with shmq.attach(instance) as broker:
        broker.producer("t").publish(b"y")
        server.kill()
    adopts = starts()
    with shmq.attach(instance) as broker:
        assert sum(len(bodies(broker.consumer("t", f"c{n}"), 2)) for n in range(channels)) == 80
    for each in (server, adopts):
        assert 0 < each.lines.count("listed") < channels / 2


# ---- a name that was removed ----


def test_an_instance_whose_name_was_removed_is_flushed_and_begun_anew(
    service: Callable[..., Child], serve: Callable[..., Child], instance: str
) -> None:
    server = service("--on-stop=keep")
    with shmq.attach(instance, timeout=processes.WATCHDOG) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish_many([b"%d" % number for number in range(50)])
        for item in segments.list_objects(instance):  # logind at a logout
            item.unlink()
        assert server.wait() == 1, "systemd starts it again"
    assert "RemoveIPC" in server.errors
    assert segments.list_objects(instance) == []
    serve()
    with shmq.attach(instance) as broker:
        consumer = broker.consumer("t", "c")
        assert bodies(consumer, 50) == [b"%d" % number for number in range(50)]


def test_a_name_that_has_become_anothers_is_left_to_it(
    service: Callable[..., Child], instance: str, tmp_path: Path, keep: Callable[[Any], Any]
) -> None:
    first = service()
    eventually(lambda: processes.answers(instance, first.pid))
    first.stop()
    for item in segments.list_objects(instance):
        item.unlink()
    (tmp_path / "other").mkdir()
    second = keep(processes.serve(instance, tmp_path / "other"))
    first.go_on()
    assert first.wait() == 1
    assert processes.answers(instance, second.pid)


# ---- keep, drain, refuse ----


def take_two(instance: str) -> None:
    consumer = shmq.attach(instance).consumer("t", "c")
    for _ in range(2):
        say("waiting")
        message = consumer.take(timeout=60)
        say("took", message.body.decode())
        message.finish()


def test_keep_leaves_the_segments_and_clients_that_wait_go_on(
    serve: Callable[..., Child], instance: str, attach: Callable[[], shmq.Broker],
    child: Callable[..., Child],
) -> None:  # fmt: skip
    first = serve(on_stop="keep")
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    waiting = child(take_two, instance)
    waiting.said("waiting")
    before = segments.list_objects(instance)
    assert first.kill(signal.SIGTERM) == 0
    assert "kept for the next supervisor" in first.errors
    assert segments.list_objects(instance) == before
    producer.publish(b"between")
    waiting.said("took between")
    waiting.said("waiting", times=2)
    serve(on_stop="keep")
    producer.publish(b"after")
    waiting.said("took after")
    assert waiting.wait() == 0
    broker.create_channel("t", "new")  # the new one serves requests
    assert broker.supervisor_alive()


def serve_drain(instance: str, data_path: Path) -> Child:
    words = [f"--instance={instance}", f"--data-path={data_path}", "--drain"]
    return Child([sys.executable, "-c", f"import sys; {RUN}", "serve", *words])


def test_drain_writes_what_was_left_to_disk_and_ends(
    serve: Callable[..., Child], instance: str, data_path: Path, keep: Callable[[Any], Any]
) -> None:
    server = serve()
    with shmq.attach(instance) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish_many([b"%d" % number for number in range(100)])
        held = broker.consumer("t", "c")
        assert held.take(timeout=5) is not None  # in flight with a client that goes on living
        refused = keep(serve_drain(instance, data_path))
        assert refused.wait() == 1
        assert "in use by another instance" in refused.errors
        server.kill()
        drained = keep(serve_drain(instance, data_path))
        assert drained.wait() == 0, drained.errors
        assert segments.list_objects(instance) == []
    again = keep(serve_drain(instance, data_path))
    assert again.wait() == 0
    assert "nothing is left in shared memory" in again.errors
    serve()
    with shmq.attach(instance) as broker:
        found = bodies(broker.consumer("t", "c"), 100)
    assert found == [b"%d" % number for number in range(100)]


@pytest.mark.parametrize("drain", [False, True])
def test_another_layout_version_is_refused_and_nothing_is_touched(
    drain: bool,
    serve: Callable[..., Child],
    service: Callable[..., Child],
    instance: str,
) -> None:
    server = serve()
    with shmq.attach(instance) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish(b"precious")
    server.kill()
    at = layout.dtype("segment").fields["layout_version"][1]  # type: ignore[index]
    path = Path(segments.directory_path(instance))

    def set_version(version: int) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(version.to_bytes(4, "little"))

    set_version(layout.LAYOUT_VERSION + 1)
    before = segments.list_objects(instance)
    refused = service("--drain") if drain else service()
    assert refused.wait() == 1
    assert f"layout version {layout.LAYOUT_VERSION + 1}" in refused.errors
    assert f"{layout.LAYOUT_VERSION}: " in refused.errors
    assert "--drain" in refused.errors
    assert segments.list_objects(instance) == before
    set_version(layout.LAYOUT_VERSION)
    serve()
    with shmq.attach(instance) as broker:
        assert bodies(broker.consumer("t", "c"), 1) == [b"precious"]


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
    limits = layout.open_readonly(instance).directory.limits
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
import shmq.supervisor.ledger as l
def run(self, bell):
    raise RuntimeError("two\\nlines")
l.Ledger.run = run
"""
    server = service("--log-format=json", before=crash)
    eventually(lambda: processes.answers(instance, server.pid))
    eventually(lambda: "ledger crashed" in server.errors)
    server.process.terminate()
    assert server.wait() == 0
    lines = [json.loads(line) for line in server.errors.splitlines()]
    assert {"info", "error"} <= {line["level"] for line in lines}
    for line in lines:
        assert set(line) - {"exception"} == {
            "time", "level", "logger", "message", "instance", "pid"
        }  # fmt: skip
        assert (line["instance"], line["pid"]) == (instance, server.pid)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"])
        assert line["logger"].startswith("shmq.")
    crashes = [line for line in lines if "crashed" in line["message"]]
    assert "two\nlines" in crashes[0]["exception"]


# ---- an instance that a group shares ----

SUPERVISOR, CLIENT, STRANGER = 64001, 64002, 64003  # made up: ids need no accounts
GROUP, OWN = 64100, 64200

need_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@pytest.fixture
def foreign_path() -> Iterator[Path]:
    """A data path of the supervisor's user, in directories that everybody may enter."""
    path = Path(tempfile.mkdtemp(prefix="shmq-test-", dir="/tmp"))
    os.chown(path, SUPERVISOR, OWN)
    yield path
    shutil.rmtree(path)


def become(uid: int, *groups: int) -> str:
    """Python that makes its process another user's. The code it will need may lie where that user
    cannot read, so it is imported before."""
    return (
        "import importlib, pkgutil, psutil, shmq.cli, shmq.supervisor.supervisor\n"
        "for found in pkgutil.iter_modules(shmq.cli.__path__, 'shmq.cli.'):\n"
        "    importlib.import_module(found.name)\n"
        "import numpy.linalg, concurrent.futures.thread, encodings.idna\n"
        f"os.setgroups({list(groups)}); os.setgid({OWN}); os.setuid({uid})\n"
    )


@pytest.fixture
def group_service(
    instance: str,
    foreign_path: Path,
    keep: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Child]:
    """`shmq serve` as the supervisor's user, whom this process and its children trust; returns when
    it answers or has ended."""
    monkeypatch.setenv("SHMQ_OWNER", str(SUPERVISOR))

    def start(
        *words: str, groups: tuple[int, ...] = (GROUP,), command: tuple[str, ...] = ()
    ) -> Child:
        code = f"import os, sys\nos.umask(0o077)\n{become(SUPERVISOR, *groups)}{RUN}"
        argv = [*command, sys.executable, "-c", code, "serve", f"--instance={instance}"]
        argv += [f"--data-path={foreign_path}", *processes.NO_GATEWAY]
        server: Child = keep(Child([*argv, *words]))
        eventually(
            lambda: processes.answers(instance, server.pid) or server.process.poll() is not None
        )
        return server

    return start


@pytest.fixture
def person(child: object, keep: Callable[[Any], Any]) -> Callable[..., Child]:
    """`person(uid, groups, function, *args)`: as `child`, but another user."""

    def start(uid: int, groups: tuple[int, ...], function: Callable[..., Any], *args: Any) -> Child:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "PRELUDE", f"{processes.PRELUDE}\n{become(uid, *groups)}")
            made: Child = keep(python_child(function, *args))
            return made

    return start


def use_everything(instance: str, data_path: str) -> None:
    broker = shmq.attach(instance)
    broker.create_channel("mine", "c")
    producer = broker.producer("mine")
    producer.publish_many([b"%d" % number for number in range(10)])
    consumer = broker.consumer("mine", "c")
    batch = consumer.take_many(10, timeout=10)
    assert batch.bodies() == [b"%d" % number for number in range(10)]
    batch.finish()
    broker.pause_channel("mine", "c")
    broker.unpause_channel("mine", "c")
    assert broker.stats().topics[0].name == "mine"
    try:
        os.listdir(data_path)
    except PermissionError:
        say("data path closed")
    broker.delete_channel("mine", "c")
    broker.close()
    say("done")


@need_root
def test_two_users_of_a_group_work_together(
    group_service: Callable[..., Child], person: Callable[..., Child], instance: str,
    foreign_path: Path,
) -> None:  # fmt: skip
    server = group_service(f"--group={GROUP}")
    assert server.process.poll() is None, server.errors
    other = person(CLIENT, (GROUP,), use_everything, instance, str(foreign_path))
    other.said("data path closed")
    other.said("done")
    assert other.wait() == 0
    made = person(CLIENT, (GROUP,), publish_to_a_new_topic, instance)
    assert made.wait() == 0, made.errors

    objects = segments.list_objects(instance, everybodys=True)
    assert {item.kind for item in objects} == {"directory", "queue", "semaphore"}
    for item in objects:
        path = segments.path_of(item.name)
        if item.kind == "semaphore":
            path = segments.semaphore_path_of(item.name)
        status = os.stat(path)
        owner = (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode))
        assert owner == (SUPERVISOR, GROUP, 0o660), path

    server.process.terminate()
    assert server.wait() == 0
    for path in [foreign_path, *foreign_path.iterdir()]:
        assert os.stat(path).st_uid == SUPERVISOR
        assert os.stat(path).st_mode & 0o077 == 0, f"{path} is the supervisor's alone"


def publish_to_a_new_topic(instance: str) -> None:
    with shmq.attach(instance) as broker:
        broker.create_channel("later", "c")
        broker.producer("later").publish(b"x")


def take_and_hold(instance: str, end: str) -> None:
    consumer = shmq.attach(instance).consumer("t", "c", msg_timeout=None)
    message = consumer.take(timeout=30)
    say("holds", message.attempts)
    sys.stdin.readline()
    if end == "exec":
        os.execv("/bin/sleep", ["sleep", "3600"])
    vanish()  # noqa: F821 - of PRELUDE


@need_root
@pytest.mark.parametrize("end", ["killed", "exec"])
def test_what_another_users_client_held_comes_back_at_once(
    end: str, group_service: Callable[..., Child], person: Callable[..., Child], instance: str
) -> None:
    server = group_service(f"--group={GROUP}")
    broker = person(CLIENT, (GROUP,), publish_one, instance)
    assert broker.wait() == 0, broker.errors
    holder = person(CLIENT, (GROUP,), take_and_hold, instance, end)
    holder.said("holds 1")
    eventually(lambda: clients(instance) == 2, what="supervisor and holder are attached")
    time.sleep(0.3)  # the reaper looks for new clients every 100 ms
    next_one = person(STRANGER, (GROUP,), take_and_hold, instance, "killed")
    holder.tell("")
    next_one.said("holds 2")
    eventually(lambda: "1 messages returned" in server.errors)
    what = "became another program (exec)" if end == "exec" else "died"
    assert re.search(
        rf"client \d+ \(pid {holder.pid}.*\) ({re.escape(what)}|exited)", server.errors
    )


def publish_one(instance: str) -> None:
    with shmq.attach(instance) as broker:
        broker.create_channel("t", "c")
        broker.producer("t").publish(b"x")


def clients(instance: str) -> int:
    return int((layout.open_readonly(instance).directory.clients["state"] != 0).sum())


def refused(instance: str, timeout: float) -> None:
    try:
        shmq.attach(instance, timeout=timeout)
    except shmq.ShmqError as exc:
        say(type(exc).__name__, exc)


@need_root
def test_a_third_user_is_refused_with_the_remedy(
    group_service: Callable[..., Child], person: Callable[..., Child], instance: str
) -> None:
    group_service(f"--group={GROUP}")
    line = person(STRANGER, (), refused, instance, 10.0).said("ShmqError")
    assert f"run as a member of group {GROUP}" in line
    assert f"uid {STRANGER}" in line


@need_root
def test_a_private_instance_says_how_to_share_it(
    group_service: Callable[..., Child], person: Callable[..., Child], instance: str
) -> None:
    group_service()
    line = person(CLIENT, (GROUP,), refused, instance, 0).said("ShmqError")
    assert "start the supervisor with --group" in line


@need_root
def test_a_supervisor_outside_of_the_group_says_so(
    group_service: Callable[..., Child], instance: str
) -> None:
    server = group_service(f"--group={GROUP}", groups=())
    assert server.wait() == 1
    assert f"cannot give it to group {GROUP}: this user (uid {SUPERVISOR}) is no member" in (
        server.errors
    )
    assert segments.list_objects(instance, everybodys=True) == []


def attach_early(instance: str) -> None:
    say("ready")
    shmq.attach(instance, timeout=30).close()
    say("attached")


@need_root
def test_a_client_that_waits_for_the_instance_is_not_refused_while_it_is_made(
    group_service: Callable[..., Child], person: Callable[..., Child], instance: str
) -> None:
    early = [person(CLIENT, (GROUP,), attach_early, instance) for _ in range(2)]
    for one in early:
        one.said("ready")
    group_service(f"--group={GROUP}")
    for one in early:
        one.said("attached")


HIDE = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t proc -o hidepid=2 proc /proc && exec "$@"',
    "sh",
)


@need_root
def test_a_proc_that_hides_other_users_makes_nobody_look_dead(
    group_service: Callable[..., Child], person: Callable[..., Child], instance: str
) -> None:
    if subprocess.run([*HIDE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no proc file system can be mounted here")
    server = group_service(f"--group={GROUP}", command=HIDE)
    made = person(CLIENT, (GROUP,), publish_one, instance)
    assert made.wait() == 0, made.errors
    holder = person(CLIENT, (GROUP,), take_and_hold, instance, "killed")
    holder.said("holds 1")
    time.sleep(0.5)  # the reaper looks at it some times
    assert clients(instance) == 2
    assert "returned" not in server.errors.replace("0 messages returned", "")
    holder.tell("")
    eventually(lambda: "1 messages returned" in server.errors)
