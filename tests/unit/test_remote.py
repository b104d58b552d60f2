"""The client of a broker on another host, without one."""

from __future__ import annotations

import json
import random
import socket
import threading
from typing import Any, cast

import pytest
from support.processes import WATCHDOG

import shmq
from shmq import errors, leased
from shmq.client.properties import pack, unpack
from shmq.gateway.lease_desk import Cursor
from shmq.remote import connections, writer
from shmq.remote.address import Address
from shmq.remote.codes import KEPT, code_of
from shmq.remote.connection import Login
from shmq.remote.reading import Reader
from shmq.remote.rows import decoded, framed, unpacked


def test_each_error_has_the_code_of_its_class() -> None:
    for code, kind in KEPT.items():
        assert code_of(kind("x")) == code
    assert code_of(errors.BadObject("x")) == "E_BAD_ARGUMENT"
    assert code_of(errors.TooManyClients("x")) == "E_FAILED"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("host", "host:4150"),
        ("host:1", "host:1"),
        ("[::1]:4152", "[::1]:4152"),
        ("::1", "[::1]:4150"),
        ("/run/x.sock", "/run/x.sock"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert str(Address.parse(text)) == shown


def test_a_server_that_hangs_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_ATTEMPTS", 10**6)
    monkeypatch.setattr(connections, "_SHORTEST", 0.05)
    accepted: list[socket.socket] = []

    def serve() -> None:
        for _ in range(3):
            accepted.append(listener.accept()[0])
        last = accepted[-1].makefile("rwb")
        assert last.read(4) == b"  V2"
        for answer in (b'{"leases":true}', b'{"memory":"1@2","instance":"i","limits":{}}'):
            last.readline()
            last.read(int.from_bytes(last.read(4), "big"))
            last.write(len(answer + b"kind").to_bytes(4, "big") + bytes(4) + answer)
            last.flush()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with shmq.connect(f"127.0.0.1:{listener.getsockname()[1]}", timeout=WATCHDOG) as remote:
            assert (remote.identity, remote.instance) == ("1@2", "i")
        thread.join()
    for each in accepted:
        each.close()


@pytest.mark.parametrize("text", ["", ":1", "host:", "host:0", "host:65536", "host:-1", "host:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Address.parse(text)


def batch(count: int) -> leased.LeasedBatch:
    import array

    bodies = [b"%d" % k * (k % 5 + 1) for k in range(count)]
    blocks = [pack({"n": str(k)}) if k % 2 else b"" for k in range(count)]

    def joined(texts: list[bytes]) -> tuple[bytes, bytes]:
        ends = [sum(map(len, texts[:k])) for k in range(count + 1)]
        return array.array("i", ends).tobytes(), b"".join(texts)

    numbers = [array.array(letter, range(count)).tobytes() for letter in "Qqi"]
    return leased.LeasedBatch(count, *numbers, *joined(bodies), joined(blocks))


def test_a_frame_is_read_as_it_was_written() -> None:
    sent = batch(100)
    index, got = decoded(memoryview(b"".join(framed(5, sent)))[8:])
    assert index == 5
    assert got.columns() == sent.columns()
    assert got.bodies() == sent.bodies()
    assert [dict(each) for each in got.properties] == [unpack(one) for one in sent.blocks()]


def test_a_frame_that_changed_on_its_way_is_found() -> None:
    data = b"".join(framed(5, batch(20)))[8:]
    random_ = random.Random(1)
    for _ in range(300):
        wrong = bytearray(data)
        wrong[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        with pytest.raises(ValueError, match="frame"):
            decoded(memoryview(wrong))
    for end in range(0, len(data), 7):
        with pytest.raises(ValueError, match="frame"):
            decoded(memoryview(data)[:end])


@pytest.mark.parametrize("at", [0, 1, 7, 19, 20, 21, 59, 60, 61])
def test_a_cursor_begins_anywhere(at: int) -> None:
    cursor = Cursor("1-2", iter([batch(20), batch(20), batch(20)]), at)
    wanted = (batch(20).bodies() * 3)[at:]
    found: list[bytes] = []
    while (frame := cursor.frame()) is not None:
        index, got = decoded(memoryview(b"".join(frame[0]))[8:])
        assert index == at + len(found)
        assert len(got) == frame[1]
        found += got.bodies()
        assert [dict(each) for each in got.properties] == [dict(unpacked(b)) for b in got.blocks()]
    assert found == wanted


# ---- commits ----


class Slow:
    """The connections to a broker that publishes a row a request, and takes long for each."""

    address = "there"

    def __init__(self, rows: int) -> None:
        self.left, self.now = rows, 0.0
        self.patience: list[float] = []

    def deadline(self, more: float = 0.0) -> float:
        return self.now + more

    def ask(self, command: str, words: object, document: object, more: float) -> dict[str, object]:
        self.patience.append(more)
        self.now += 200.0
        published, self.left = int(self.left > 0), max(self.left - 1, 0)
        return {"published": published, "done": not self.left and published}


def test_a_commit_asks_again_as_long_as_rows_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(10)
    monkeypatch.setattr(writer.time, "monotonic", lambda: slow.now)
    made = writer.Writer(cast(connections.Connections, slow), "t", "w", "")
    assert made.commit(1, []) == 10
    with pytest.raises(errors.Full, match="no room"):
        made.commit(1, [])
    assert max(slow.patience) < 60  # a host that is away is known to be soon


def test_a_frame_is_yielded_before_the_next_arrives() -> None:
    """And when the connection breaks then, the rest is asked for."""
    wishes: list[dict[str, Any]] = []
    yielded, waited = threading.Event(), list[bool]()

    def asked(file: Any) -> bytes:
        file.readline()
        return bytes(file.read(int.from_bytes(file.read(4), "big")))

    def said(file: Any, *pieces: bytes) -> None:
        file.write(b"".join(pieces))
        file.flush()

    def response(answer: bytes) -> bytes:
        return len(answer + b"kind").to_bytes(4, "big") + bytes(4) + answer

    def serve() -> None:
        for turn in range(2):
            sock, _ = listener.accept()
            with sock, sock.makefile("rwb") as file:
                file.read(4)
                asked(file)
                said(file, response(b'{"leases":true}'))
                wishes.append(json.loads(asked(file)))
                if turn == 0:
                    said(file, *framed(0, batch(20)))
                    yielded.wait(WATCHDOG)
                    with pytest.raises(BlockingIOError):  # the client waits for more
                        sock.recv(1, socket.MSG_DONTWAIT)
                    waited.append(True)
                else:
                    end = response(b'{"identity":"1-2","next":25,"end":true}')
                    said(file, *framed(20, batch(5)), end)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        address = Address("127.0.0.1", listener.getsockname()[1])
        pool = connections.Connections(address, Login(), WATCHDOG)
        batches = Reader(pool, ("t", "c"), (1, 0), "1-2", {"secret": "s"}).batches()
        assert len(next(batches)) == 20
        yielded.set()
        assert [len(each) for each in batches] == [5]
        thread.join()
        pool.close()
    assert waited
    assert [wish["from"] for wish in wishes] == [0, 20]
