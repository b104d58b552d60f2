"""The listening sockets of the gateway. The supervisor's process opens them and passes them to the
gateway processes, so none is lost when a gateway process dies.

If several processes serve one port, each has its own socket (SO_REUSEPORT), so that the kernel
spreads connections evenly. A socket without SO_REUSEPORT is bound first, to find out whether
another program has the port.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shmq import ownership
from shmq.options import Options
from shmq.shm import NO_GROUP

_BACKLOG = 1024
_LONGEST_ADDRESS = 300
_HOST = re.compile(r"[0-9A-Za-z._-]{1,253}|[0-9A-Fa-f:.]{2,45}(%[0-9A-Za-z._-]{1,15})?")


@dataclass
class Listeners:
    """Descriptors by kind (tcp, http, https), one list for each gateway process."""

    workers: list[dict[str, list[int]]]
    addresses: dict[str, list[str]] = field(default_factory=dict)
    """Kind -> the addresses it listens on: `host:port`, or the path of a Unix socket."""
    ports: dict[str, int] = field(default_factory=dict)
    """Kind -> port; -1: a Unix socket, 0: no listener."""
    paths: list[str] = field(default_factory=list)

    @property
    def fds(self) -> list[int]:
        """All descriptors, each once."""
        return sorted({fd for kinds in self.workers for fds in kinds.values() for fd in fds})

    def __bool__(self) -> bool:
        return any(self.workers)

    def close(self) -> None:
        """Close all descriptors, and remove the Unix sockets that were created."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        for path in self.paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.workers, self.paths = [], []


def open_to_others(listeners: Listeners, options: Options) -> list[str]:
    """Return the addresses that other hosts can reach and nothing protects: `TCP 0.0.0.0:4150`.

    Authorisation servers protect TCP only, a token or disabled writes protect HTTP only; an access
    file and required TLS protect both."""
    demand = options.tls_required != "false" or options.tls_client_auth_policy != ""
    guarded = {
        "tcp": demand or bool(options.auth_http_address or options.access_file),
        "http": (demand and options.tls_required != "tcp-https") or _asks_on_http(options),
        "https": True,
    }
    return [
        f"{kind.upper()} {address}"
        for kind, addresses in listeners.addresses.items()
        for address in addresses
        if not guarded[kind] and not _is_local(address)
    ]


def beside_auth(listeners: Listeners, options: Options) -> list[str]:
    """Return the addresses of HTTP where nobody is asked who he is, although TCP asks for AUTH."""
    if not options.auth_http_address or _asks_on_http(options):
        return []
    return [
        f"{kind.upper()} {address}"
        for kind in ("http", "https")
        for address in listeners.addresses.get(kind, [])
        if split_address(address) is not None
    ]


def _asks_on_http(options: Options) -> bool:
    """Whether clients of HTTP must show who they are before they write, or cannot write."""
    token = options.http_token_file or os.environ.get("SHMQ_HTTP_TOKEN")
    return bool(token or options.access_file) or not options.http_writes


def _is_local(address: str) -> bool:
    """Returns true if only this host reaches the address: a Unix socket, or loopback."""
    where = split_address(address)
    if where is None:
        return True
    return where[0].removeprefix("::ffff:").startswith("127.") or where[0] == "::1"


def split_address(address: str) -> tuple[str, int] | None:
    """Return (host, port) of `host:port`, `[v6]:port` or `:port`; None if it is a path."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not _is_port(port):
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    return host, int(port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= 65535


def is_host_and_port(address: str) -> bool:
    """Returns true if one can connect to the address: a name or an IP address of printable
    characters, and a port that is not 0."""
    if len(address) > _LONGEST_ADDRESS or not address.isascii():
        return False
    where = split_address(address)
    return where is not None and where[1] > 0 and _HOST.fullmatch(where[0]) is not None


def _not_a_port(address: str) -> str:
    """Return the port of a `host:port` that is invalid for its port alone; empty: it is a path."""
    port = address.rpartition(":")[2]
    return port if port.isdecimal() and "/" not in address and port != address else ""


def open_listeners(options: Options, passed: Sequence[tuple[int, str]]) -> Listeners:
    """Open the sockets that the options ask for.

    passed: (descriptor, name) of sockets that a service manager has opened; they replace the
    addresses of the kind that their name says. Raises OSError with nsqd's message."""
    count = options.gateway_workers
    listeners = Listeners([{} for _ in range(count)])
    wanted = {"tcp": options.tcp_address, "http": options.http_address}
    if options.tls_cert:
        wanted["https"] = options.https_address
    try:
        for kind, address in wanted.items():
            fds = [fd for fd, name in passed if name == kind]
            for fd in fds:
                _enter(listeners, kind, [fd] * count)
            if not fds and address:
                rights = options.socket_permissions()
                _enter(listeners, kind, _open(address, count, listeners, rights))
            listeners.ports.setdefault(kind, 0)
    except BaseException:
        listeners.close()
        raise
    return listeners


def _enter(listeners: Listeners, kind: str, fds: list[int]) -> None:
    for worker, fd in zip(listeners.workers, fds, strict=True):
        worker.setdefault(kind, []).append(fd)
    with socket.socket(fileno=os.dup(fds[0])) as sock:
        name = sock.getsockname()
    if isinstance(name, tuple):
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        listeners.addresses.setdefault(kind, []).append(f"{host}:{name[1]}")
        if listeners.ports.get(kind, -1) <= 0:
            listeners.ports[kind] = name[1]
    else:
        listeners.addresses.setdefault(kind, []).append(os.fsdecode(name))
        listeners.ports.setdefault(kind, -1)


def _open(address: str, count: int, listeners: Listeners, rights: tuple[int, int]) -> list[int]:
    where = split_address(address)
    if where is None and (port := _not_a_port(address)):
        said = f"listen ({address}) failed - listen tcp: address {port}: invalid port"
        raise OSError(errno.EINVAL, said)
    if where is None and _is_host(address):
        said = (
            f"listen ({address}) failed - it has no port: give {address}:PORT, or ./{address} for "
            "a Unix socket of that name"
        )
        raise OSError(errno.EINVAL, said)
    try:
        if where is None:
            fd = _open_unix(address, *rights)
            listeners.paths.append(address)
            return [fd] * count
        return _open_tcp(where, count)
    except OSError as exc:
        kind = "tcp" if where is not None else "unix"
        what = (exc.strerror or str(exc)).lower()
        said = f"listen ({address}) failed - listen {kind} {address}: bind: {what}"
        raise OSError(exc.errno, said) from exc


def _is_host(address: str) -> bool:
    """Returns True if an address without a port names a host: nobody means a socket's file."""
    try:
        ipaddress.ip_address(address.removeprefix("[").removesuffix("]"))
    except ValueError:
        return address == "localhost"
    return True


def _open_unix(path: str, mode: int, group: int) -> int:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            _bind_unix(sock, path)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or not _is_stale(path):
                raise
            os.unlink(path)
            _bind_unix(sock, path)
        try:
            _give(path, mode, group)
            sock.listen(_BACKLOG)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return sock.detach()
    except BaseException:
        sock.close()
        raise


def _bind_unix(sock: socket.socket, path: str) -> None:
    """Bind a socket to a path to which nobody else may connect yet."""
    before = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(before)


def _give(path: str, mode: int, group: int) -> None:
    """Give a new socket its group and its mode. The path may lead elsewhere by now, so both go by a
    descriptor of what was checked. Raises PermissionError."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status, at = os.fstat(fd), f"/proc/self/fd/{fd}"
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "somebody has replaced the socket")
        if group not in (NO_GROUP, status.st_gid):
            try:
                os.chown(at, -1, group)
            except PermissionError as exc:
                sentence = (
                    f"cannot give the socket to group {ownership.group(group)}: this user, "
                    f"{ownership.user(os.geteuid())}, is no member (--socket-group)"
                )
                raise PermissionError(exc.errno, sentence) from exc
        os.chmod(at, mode)
    finally:
        os.close(fd)


def _is_stale(path: str) -> bool:
    """Returns true if the path is a socket of this user without a listener: its process was killed.
    Raises OSError if it is another user's."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode):
        return False
    if status.st_uid != os.geteuid():
        raise OSError(
            errno.EADDRINUSE,
            f"there is a socket of {ownership.user(status.st_uid)}: have that user or root remove "
            "it, or use another path",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _open_tcp(where: tuple[str, int], count: int) -> list[int]:
    host, port = where
    family, address = _resolve(host, port)
    first = _bind(family, address, False)
    if count == 1:
        first.listen(_BACKLOG)
        return [first.detach()]
    address = (address[0], first.getsockname()[1], *address[2:])
    first.close()
    socks: list[socket.socket] = []
    try:
        for _ in range(count):
            socks.append(_bind(family, address, True))
        for sock in socks:
            sock.listen(_BACKLOG)
    except BaseException:
        for sock in socks:
            sock.close()
        raise
    return [sock.detach() for sock in socks]


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str | int, ...]]:
    if not host:
        if socket.has_dualstack_ipv6():
            return socket.AF_INET6, ("::", port)
        return socket.AF_INET, ("0.0.0.0", port)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return found[0][0], (str(found[0][4][0]), port)


def _bind(
    family: socket.AddressFamily, address: tuple[str | int, ...], shared: bool
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6 and address[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        return sock
    except BaseException:
        sock.close()
        raise


# ---- where the processes of a gateway meet ----

_CONTROL = "shmq-gateway-"


@contextlib.contextmanager
def control_directory() -> Iterator[str]:
    """A directory for the sockets between the processes of one gateway, which goes after the block.
    The directories of supervisors that were killed go at once: a supervisor holds a lock on its
    own, which ends with it."""
    import shutil
    import tempfile  # both are slow to import

    _sweep_control(tempfile.gettempdir(), shutil.rmtree)
    while True:
        path = tempfile.mkdtemp(prefix=_CONTROL)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.path.isdir(path):
            break
        os.close(fd)  # another start took it for a dead one's before it was locked
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def _sweep_control(place: str, remove: Callable[[str], object]) -> None:
    """Remove this user's directories that nobody has locked."""
    with contextlib.suppress(OSError), os.scandir(place) as found:
        for entry in found:
            if not entry.name.startswith(_CONTROL):
                continue
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(entry.path, flags)
                try:
                    if os.fstat(fd).st_uid == os.geteuid():
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove(entry.path)
                finally:
                    os.close(fd)
