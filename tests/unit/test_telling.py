"""Clients are told of an error what is not of the host."""

from __future__ import annotations

import errno
import logging

import pytest

from shmq.door import telling
from shmq.door.telling import told
from shmq.errors import ShmqError

REST = "the broker's log has the rest"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("finish 3 of t/c: it timed out", "finish 3 of t/c: it timed out"),
        ("see docs/containers.md, or https://a/b", "see docs/containers.md, or https://a/b"),
        ("create topic 't': no room: /dev/shm has 3 bytes", f"create topic 't': no room; {REST}"),
        ("create topic 't': no room; enlarge /dev/shm", f"create topic 't': no room; {REST}"),
        ("/dev/shm/x belongs to uid 3 with mode 0700", REST),
        ("there is none (there is no /dev/shm/shmq.x): start it", f"there is none; {REST}"),
        ("cannot read '/data/t.dat'", REST),
        ("stop it: kill it, it is pid 12", f"stop it: kill it; {REST}"),
        ("it is alice's (uid 1000)", f"it is alice's; {REST}"),
    ],
)
def test_nothing_of_the_host_is_told(
    text: str, shown: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling._whole, "_began", float("-inf"))
    with caplog.at_level(logging.WARNING):
        assert told(ShmqError(text)) == shown
    assert (text in caplog.text) == (text != shown)


def test_a_system_error_has_no_file() -> None:
    assert told(OSError(errno.EACCES, "Permission denied", "/dev/shm/x")) == "permission denied"
    assert told(OSError(errno.EIO, "t: rm /data/x", "/data/x")) == f"t; {REST}"
