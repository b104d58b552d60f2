"""Requests to other programs over slow lines."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from shmq.peers.sockets import seconds_for, sent


def test_a_large_request_has_more_time() -> None:
    """As much as a line of 64 KiB a second needs, beside the time of a small one."""
    assert seconds_for(0, 10) == 10
    assert seconds_for(8 << 20, 10) == 10 + 128


def test_what_goes_slowly_is_sent_whole() -> None:
    """Each piece may take as long as is waited for, so all of it takes longer."""
    mine, other = socket.socketpair()
    with mine, other:
        for sock, which in ((mine, socket.SO_SNDBUF), (other, socket.SO_RCVBUF)):
            sock.setsockopt(socket.SOL_SOCKET, which, 4096)
        data, found = bytes(range(256)) * 4000, bytearray()

        def read() -> None:
            while len(found) < len(data):
                found.extend(other.recv(65536))

        thread = threading.Thread(target=read)
        thread.start()
        sent(mine, data, time.monotonic() + 600, 60)
        thread.join()
        assert found == data


def test_what_stops_to_go_is_an_error() -> None:
    mine, other = socket.socketpair()
    with mine, other:
        with pytest.raises(TimeoutError, match="of 10000000 bytes, and no more in time"):
            sent(mine, bytes(10**7), time.monotonic() + 600, 0.01)
        with pytest.raises(TimeoutError, match="no whole answer"):
            sent(mine, bytes(10**7), time.monotonic() - 1, 60)
