"""How much of a gateway process clients may have: connections, memory, its place before the OOM
killer."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.nsq_client import ERROR, OK, Client, Server, mpub, sized
from support.processes import WATCHDOG, eventually

import shmq
from shmq.gateway.worker import give_up_protection

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


def worker(server: Server) -> psutil.Process:
    """The gateway process."""
    found = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "shmq.gateway.worker" in child.cmdline()
    ]
    assert len(found) == 1
    return found[0]


def connected(server: Server, source: str = "127.0.0.1") -> Client:
    """A client from an address of its own that has published."""
    sock = socket.create_connection(("127.0.0.1", server.port()), WATCHDOG, (source, 0))
    client = Client(sock)
    try:
        client.send(b"  V2")
        assert client.ask(b"PUB t\n" + sized(b"x")) == OK
    except BaseException:
        client.close()
        raise
    return client


def refusal(server: Server, source: str = "127.0.0.1") -> bytes:
    """The answer to a connection before it has sent anything."""
    with socket.create_connection(("127.0.0.1", server.port()), WATCHDOG, (source, 0)) as sock:
        client = Client(sock)
        answer = client.frame()
        assert answer is not None
        assert answer[0] == ERROR
        assert client.ended()
        return answer[1]


def test_connections_have_a_limit(start: Start) -> None:
    server = start("--max-connections=5")
    clients = [connected(server) for _ in range(5)]
    for _ in range(3):
        assert refusal(server) == b"E_CONNECT_FAILED connections exceed limit of 5"
    assert server.http("GET", "/ping").status == 200
    assert server.post("/topic/create", topic="new").status == 200
    assert clients[0].ask(b"PUB another\n" + sized(b"x")) == OK
    clients.pop().close()
    clients.append(eventually(lambda: again(server)))
    assert "refused (1 so far): connections exceed limit of 5" in server.log
    for client in clients:
        client.close()


def again(server: Server) -> Client | None:
    """A client, if there is room for it."""
    with contextlib.suppress(OSError, AssertionError):
        return connected(server)
    return None


def test_an_address_has_a_limit(start: Start) -> None:
    server = start("--max-connections-per-address=2")
    clients = [connected(server), connected(server)]
    said = b"E_CONNECT_FAILED connections of 127.0.0.1 exceed limit of 2"
    assert refusal(server) == said
    clients.append(connected(server, "127.0.0.2"))
    clients.pop(0).close()
    clients.append(eventually(lambda: again(server)))
    assert refusal(server) == said
    for client in clients:
        client.close()


def test_a_unix_socket_has_no_address(start: Start, tmp_path: Path) -> None:
    server = start(f"--tcp-address={tmp_path}/tcp", "--max-connections-per-address=1")
    clients = [server.connect() for _ in range(3)]
    for client in clients:
        client.pub("t", b"x")


@pytest.fixture
def few_files(start: Start) -> Iterator[Server]:
    """A gateway that may open 100 descriptors more than it has, and whose clients take all that
    they can get."""
    server = start()
    process = worker(server)
    hard = process.rlimit(psutil.RLIMIT_NOFILE)[1]
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 100, hard))
    socks = []
    for _ in range(300):
        socks.append(socket.create_connection(("127.0.0.1", server.port()), WATCHDOG))
    yield server
    for sock in socks:
        sock.close()


def test_descriptors_are_left_for_administration(few_files: Server) -> None:
    """HTTP has its answers while TCP clients hold all connections that there are."""
    for number in range(20):
        assert few_files.http("GET", "/ping").status == 200
        assert few_files.post("/topic/create", topic=f"t{number}").status == 200
    assert few_files.post("/pub", b"x", topic="t0").status == 200
    assert b"connections exceed limit of " in refusal(few_files)


def test_topics_are_mapped_while_connections_are_many(start: Start) -> None:
    server = start()
    process = worker(server)
    client = connected(server)
    hard = process.rlimit(psutil.RLIMIT_NOFILE)[1]
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 100, hard))
    socks = [socket.create_connection(("127.0.0.1", server.port()), WATCHDOG) for _ in range(300)]
    for number in range(10):
        assert client.ask(b"PUB new-%d\n" % number + sized(b"x")) == OK
    client.sub("new-0", "c", 1)
    client.finish(client.delivery())
    for one in (client, *socks):
        one.close()


def test_without_descriptors_clients_are_answered(start: Start) -> None:
    """A topic that cannot be mapped is an error for the client that asks for it, with every
    command."""
    server = start("--max-connections=3")
    process = worker(server)
    assert server.post("/topic/create", topic="there").status == 200
    clients = [connected(server) for _ in range(3)]
    files = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (3, files[1]))  # what is open stays open
    commands = (b"PUB there\n" + sized(b"x"), mpub(b"there", [b"x"]), b"SUB there c\n")
    for client, command in zip(clients, commands, strict=True):
        answer = client.ask(command)
        name = command[: command.index(b" ")]
        assert answer is not None
        assert answer[0] == ERROR
        assert answer[1].startswith(b"E_%b_FAILED %b failed " % (name, name))
        assert client.ended()
        client.close()
    process.rlimit(psutil.RLIMIT_NOFILE, files)
    client = eventually(lambda: again(server))
    assert client.ask(b"PUB there\n" + sized(b"x")) == OK
    assert "Traceback" not in server.log
    client.close()


def half(size: int) -> bytes:
    """So much of an MPUB that is larger."""
    return b"MPUB t\n" + struct.pack(">iii", 5 << 20, 2, 5 << 20) + b"x" * size


def test_unfinished_commands_have_a_budget(start: Start) -> None:
    """The one that holds the most is ended with a word, the others go on."""
    server = start("--max-buffered-bytes=8388608", "--max-msg-size=5242880")
    process = worker(server)
    honest = connected(server)
    before = process.memory_info().rss
    clients = [server.connect() for _ in range(30)]
    for client in clients:
        client.identify(heartbeat_interval=-1)
    for client in clients:
        with contextlib.suppress(OSError):
            client.send(half(3 << 20))
    said = b"E_MPUB_FAILED MPUB failed buffered bytes exceed limit of 8388608"
    eventually(lambda: server.log.count("buffered bytes exceed limit") >= 20)
    answers = []
    for client in clients:
        client.sock.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            answers.append(client.frame())
    assert len(answers) >= 20
    assert set(answers) <= {(ERROR, said), None}  # a reset may have come before it was read
    assert (ERROR, said) in answers
    assert honest.ask(b"PUB t\n" + sized(b"x")) == OK
    assert honest.ask(mpub(b"t", [b"x" * 1000] * 1000)) == OK
    assert process.memory_info().rss - before < 40 << 20
    honest.close()


def test_unread_messages_have_a_budget(start: Start, tmp_path: Path) -> None:
    """On a Unix socket, of which the kernel holds little."""
    server = start("--max-buffered-bytes=2097152", f"--tcp-address={tmp_path}/tcp")
    honest = server.connect()
    for _ in range(300):
        honest.pub("unread", b"x" * 100_000)
    clients = []
    for _ in range(40):
        with contextlib.suppress(OSError, AssertionError):  # it may have been ended already
            clients.append(server.connect())
            clients[-1].sub("unread", "c", 2500)
    eventually(lambda: "buffered bytes exceed limit" in server.log)
    assert honest.ask(b"PUB t\n" + sized(b"x")) == OK
    for client in (honest, *clients):
        client.close()


def test_a_large_command_is_no_reason_to_end(start: Start) -> None:
    """The most that one client may send fits the default, and large buffers are given back."""
    server = start("--max-buffered-bytes=16777216")
    clients = [server.connect() for _ in range(10)]
    for _ in range(2):
        for client in clients:
            assert client.ask(mpub(b"t", [b"x" * 500_000] * 10)) == OK


def test_a_batch_larger_than_the_memory_is_published_in_parts(start: Start) -> None:
    server = start("--arena-size=4194304")
    body = struct.pack(">i", 5) + sized(b"x" * 900_000) * 5
    assert server.post("/mpub", body, topic="t", binary="true").status == 200
    assert server.topic("t")["depth"] == 5


@pytest.mark.parametrize(("had", "has"), [("-900\n", "0"), ("0\n", "0\n"), ("300\n", "300\n")])
def test_a_protection_is_given_up(tmp_path: Path, had: str, has: str) -> None:
    file = tmp_path / "oom_score_adj"
    file.write_text(had)
    give_up_protection(str(file))
    assert file.read_text() == has
    give_up_protection(str(tmp_path / "missing"))


def test_a_gateway_is_killed_before_its_supervisor(start: Start) -> None:
    """A protection from the OOM killer that the supervisor has does not reach who holds what
    clients send."""
    mine = Path("/proc/self/oom_score_adj")
    was = mine.read_text()
    try:
        mine.write_text("-500")
    except OSError:
        pytest.skip("only a privileged process may protect itself from the OOM killer")
    try:
        server = start()
    finally:
        mine.write_text(was)
    assert Path(f"/proc/{server.process.pid}/oom_score_adj").read_text() == "-500\n"
    assert Path(f"/proc/{worker(server).pid}/oom_score_adj").read_text() == "0\n"


def test_silent_clients_are_asked_by_the_kernel(start: Start) -> None:
    """Without heartbeats only keep-alive tells a client that is gone from one that is silent."""
    server = start()
    client = server.connect()
    client.identify(heartbeat_interval=-1)
    port = client.sock.getsockname()[1]
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    wanted = f":{server.port():04X} 0100007F:{port:04X} "
    (line,) = [line for line in lines if wanted in line]
    assert line.split()[5].startswith("02:")  # its timer is the one of keep-alive
    client.close()


# ---- limits of a channel ----


@pytest.fixture
def limited(start: Start) -> Server:
    """A server whose channels c hold two messages: that of the topic block waits, others reject."""
    return start(
        "--channels=*/c: max_messages=2 overflow=reject", "--channels=block*/c: overflow=block"
    )


def test_a_channel_that_rejects_answers_as_a_failed_publish(limited: Server) -> None:
    limited.connect().sub("t", "c", 0)
    client = limited.connect()
    assert client.ask(mpub(b"t", [b"0", b"1"])) == OK
    for command, error in (
        (b"PUB t\n" + sized(b"2"), b"E_PUB_FAILED PUB failed "),
        (mpub(b"t", [b"2", b"3"]), b"E_MPUB_FAILED MPUB failed "),
    ):
        client = limited.connect()
        answer = client.ask(command)
        assert answer is not None
        assert answer[0] == ERROR
        assert answer[1].startswith(error)
        assert b"t/c has 2 waiting; its max_messages is 2" in answer[1]
    reply = limited.post("/pub", b"2", topic="t")
    assert (reply.status, reply.message) == (503, "CHANNEL_FULL")
    assert limited.channel("t", "c")["depth"] == 2


@pytest.mark.parametrize("topic", ["t", "block-t"])
def test_a_list_of_connect_that_can_never_enter_whole_is_refused_whole(
    limited: Server, topic: str
) -> None:
    """It is all or none; what an NSQ client sends is published in pieces."""
    limited.connect().sub(topic, "c", 0)
    with shmq.connect(f"127.0.0.1:{limited.port()}") as there:
        producer = there.producer(topic)
        with pytest.raises(shmq.MessageTooBig, match=f"3 at once; max_messages of {topic}/c is 2"):
            producer.publish_many([b"0", b"1", b"2"])
        assert limited.channel(topic, "c")["depth"] == 0
        producer.publish_many([b"0", b"1"])
        if topic == "t":
            with pytest.raises(shmq.Rejected, match="t/c has 2 waiting"):
                producer.publish(b"2")
        assert limited.channel(topic, "c")["depth"] == 2


def test_a_channel_that_blocks_answers_when_there_is_room(limited: Server) -> None:
    consumer = limited.connect()
    consumer.sub("block", "c", 0)
    client = limited.connect()
    assert client.ask(mpub(b"block", [b"0", b"1"])) == OK
    client.send(b"PUB block\n" + sized(b"2"))
    assert client.quiet()
    consumer.send(b"RDY 1\n")
    consumer.finish(consumer.delivery())
    assert client.frame() == OK
    assert [consumer.delivery().body] == [b"1"]
