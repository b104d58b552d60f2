"""Network namespaces for tests, each at the end of a cable that a test can break.

A namespace is joined to the host by a pair of TUN devices. A thread carries the packets from one to
the other, so it can lose them in either direction, or be late with them. The devices and the
namespace belong to open files: they are gone when the process that made them has ended, however it
ended. It needs CAP_NET_ADMIN, CAP_SYS_ADMIN and /dev/net/tun, and no program but `nsenter`.

    host  198.18.N.1 === TUN | thread | TUN === 198.18.N.2  namespace
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

_TUN: Final = "/dev/net/tun"
_NEW_NETWORK: Final = 0x40000000  # CLONE_NEWNET
_SET_TUN: Final = 0x400454CA  # TUNSETIFF
_IS_TUN, _PLAIN = 0x1, 0x1000  # IFF_TUN, IFF_NO_PI
_SET_FLAGS, _SET_ADDRESS, _SET_PEER, _SET_MTU = 0x8914, 0x8916, 0x8918, 0x8922
_UP: Final = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
_MTU: Final = 16_000  # bytes: a packet costs the thread more than its bytes do
_LINKS: Final = 250  # of 198.18.0.0/16, which is for tests of networks
_QUEUE: Final = 10_000  # packets that are late at most; more are lost, as in a router

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Way:
    """One direction of a cable. passes: else packets are lost and nobody is told. delay: seconds
    until a packet arrives."""

    passes: bool = True
    delay: float = 0.0
    held: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, packet: bytes, to: int) -> None:
        """A packet that was sent."""
        if not self.passes:
            return
        if self.delay or self.held:  # no packet overtakes another
            if len(self.held) < _QUEUE:
                self.held.append((time.monotonic() + self.delay, packet))
        else:
            _deliver(packet, to)

    def release(self, to: int) -> float | None:
        """Deliver what is due; seconds until the next packet is."""
        while self.held:
            left = self.held[0][0] - time.monotonic()
            if left > 0:
                return left
            packet = self.held.popleft()[1]
            if self.passes:
                _deliver(packet, to)
        return None


class Cable:
    """A namespace and its cable. Programs run in it when `nsenter` stands before their words."""

    def __init__(self) -> None:
        """Raises OSError where it is not permitted."""
        self._lock, number = _free_link()
        self._open = [self._lock.fileno()]
        self.host, self.address = f"198.18.{number}.1", f"198.18.{number}.2"
        self.there, self.back = Way(), Way()
        """The way to the namespace, and the one from it."""
        self._word, self._loses_word = b"", False
        self._caught = threading.Event()
        try:
            self._namespace = _in_thread(_made)
            self._open.append(self._namespace)
            near = _tun(f"shmqtest{number}", self.host, self.address)
            self._open.append(near)
            far = _in_thread(lambda: _joined(self._namespace, self.address, self.host))
            self._open.append(far)
            self._waker, waker = os.pipe()
            self._open += [self._waker, waker]
        except BaseException:
            self._close_files()
            raise
        self._wake = waker
        self._thread = threading.Thread(target=self._carry, args=(near, far), daemon=True)
        self._thread.start()

    @property
    def nsenter(self) -> tuple[str, ...]:
        """The words of a command that start another in the namespace, with the same process id."""
        return ("nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespace}")

    def _carry(self, near: int, far: int) -> None:
        ways = {near: (self.there, far), far: (self.back, near)}
        while True:
            waits = [way.release(to) for way, to in ways.values()]
            left = min((wait for wait in waits if wait is not None), default=None)
            ready, _, _ = select.select([near, far, self._waker], [], [], left)
            if self._waker in ready:
                return
            for each in ready:
                way, to = ways[each]
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(each, 1 << 16)
                    if self._word and self._word in packet:
                        self._catch()
                    way.take(packet, to)

    def _catch(self) -> None:
        self._word, self.back.passes = b"", False
        if self._loses_word:
            self.there.passes = False
        self._caught.set()

    def lose_answer(self, word: bytes) -> None:
        """Let the way back lose all packets once these bytes were sent."""
        self._caught.clear()
        self._word, self._loses_word = word, False

    def lose_from(self, word: bytes) -> None:
        """Let both ways lose all packets, from the one on that has these bytes."""
        self._caught.clear()
        self._word, self._loses_word = word, True

    def caught(self, patience: float, last: bool = True) -> bool:
        """Wait until these bytes were sent. Returns False if they are not; `last`: it does not wait
        for them any more then."""
        found = self._caught.wait(patience)
        if last:
            self._word = b""
        return found

    def heal(self) -> None:
        """Both directions pass, at once."""
        for way in (self.there, self.back):
            way.passes, way.delay = True, 0.0

    def close(self) -> None:
        """Remove both. Programs in the namespace have no network then."""
        os.write(self._wake, b"x")
        self._thread.join()
        self._close_files()

    def _close_files(self) -> None:
        for each in self._open[1:]:
            os.close(each)
        self._lock.close()


def why_not() -> str | None:
    """Why no cable can be made here; None if one can."""
    if shutil.which("nsenter") is None:
        return "nsenter is missing: install Debian's util-linux"
    try:
        Cable().close()
    except OSError as exc:
        return f"network namespaces and {_TUN} are for root: {exc}"
    return None


def _free_link() -> tuple[socket.socket, int]:
    """A number that no other process of this machine uses while the socket is open."""
    for offset in range(_LINKS):
        number = 1 + (os.getpid() + offset) % _LINKS
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0shmq-test-cable-{number}")
        except OSError:
            lock.close()
            continue
        return lock, number
    raise OSError("all cables are in use")


def _in_thread(function: Callable[[], int]) -> int:
    """The function's result, from a thread that may change its namespace and ends."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except OSError as exc:
            found.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return int(found[0])


def _checked(result: int, tried: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{tried}: {os.strerror(ctypes.get_errno())}")


def _made() -> int:
    """A new namespace that has itself as 127.0.0.1."""
    _checked(_libc.unshare(_NEW_NETWORK), "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_FLAGS, _request("lo", struct.pack("H", _UP)))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _joined(namespace: int, mine: str, peer: str) -> int:
    _checked(_libc.setns(namespace, _NEW_NETWORK), "setns")
    return _tun("shmqtest", mine, peer)


def _tun(name: str, mine: str, peer: str) -> int:
    """The open file of a device with an address, whose other end has the address `peer`."""
    fd = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, _SET_TUN, _request(name, struct.pack("H", _IS_TUN | _PLAIN)))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for call, value in (
                (_SET_ADDRESS, _address(mine)),
                (_SET_PEER, _address(peer)),
                (_SET_MTU, struct.pack("i", _MTU)),
                (_SET_FLAGS, struct.pack("H", _UP)),
            ):
                fcntl.ioctl(control, call, _request(name, value))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _request(name: str, value: bytes) -> bytes:
    """A struct ifreq."""
    return struct.pack("16s24s", name.encode(), value)


def _address(text: str) -> bytes:
    """A struct sockaddr_in."""
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))


def _deliver(packet: bytes, to: int) -> None:
    with contextlib.suppress(OSError):  # the device's queue is full
        os.write(to, packet)
