"""Checks of the host: shared memory, kernel, limits, logind, data paths."""

from __future__ import annotations

import contextlib
import mmap
import os
import pwd
import re
import resource
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from shmq import ownership, shm
from shmq.diagnostics.findings import Finding, ok, problem
from shmq.diagnostics.readable import size
from shmq.options import OPTIONS
from shmq.storage import own_files
from shmq.supervisor import rlimits

_MIB = 1 << 20
_LITTLE_ROOM = 64 * _MIB  # bytes that a single channel may take
_FEW_INODES = 1000
_LITTLE_DISK = 1024 * _MIB
_FEW_MAPS = 32768  # 16384 queues with one mapping each, and the mappings of Python
_SPARSE_SINCE = (5, 14)  # the Linux that has MADV_POPULATE_WRITE
_POPULATE_WRITE = 23


def check_shared_memory(directory: str = shm.SHM_DIRECTORY) -> Iterator[Finding]:
    """Check that /dev/shm exists, is a tmpfs, can be written by this user, and has room."""
    try:
        room, status = os.statvfs(directory), os.stat(directory)
    except OSError as exc:
        yield problem(
            "shm",
            f"{directory}: {exc.strerror}",
            "mount it: mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        )
        return
    kind, options = _mount_of(directory)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = []
    if kind not in ("tmpfs", "ramfs", ""):
        found.append(
            problem(
                "shm",
                f"{directory} is a {kind} and not a tmpfs: messages are written to a disk",
                "mount a tmpfs there",
            )
        )
    if room.f_flag & os.ST_RDONLY:
        found.append(
            problem(
                "shm",
                f"{directory} is mounted read-only",
                "remount it: mount -o remount,rw /dev/shm",
            )
        )
    elif not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        found.append(
            problem(
                "shm",
                f"{directory} cannot be written by this user (mode "
                f"{stat.S_IMODE(status.st_mode):04o})",
                "chmod 1777 /dev/shm",
            )
        )
    elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        found.append(
            problem(
                "shm",
                f"{directory} is not sticky: any user may remove the segments of another",
                "chmod 1777 /dev/shm",
            )
        )
    if total and (free < _LITTLE_ROOM or total <= _LITTLE_ROOM):
        found.append(
            problem(
                "shm",
                f"{directory} has {size(free)} of {size(total)} free; one "
                f"channel may take {size(_LITTLE_ROOM)} and more",
                "make it larger: mount -o remount,size=2G /dev/shm (docker: "
                "--shm-size=2g; Kubernetes: an emptyDir with medium: Memory)",
            )
        )
    if room.f_files and room.f_favail < _FEW_INODES:
        found.append(
            problem(
                "shm",
                f"{directory} has only {room.f_favail} inodes left; every queue takes one",
                "mount -o remount,nr_inodes=100000 /dev/shm",
            )
        )
    if "huge" in options and options["huge"] not in ("never", "advise"):
        found.append(
            problem(
                "shm",
                f"{directory} is mounted with huge={options['huge']}: a small "
                "channel takes 2 MiB pages",
                "mount -o remount,huge=advise /dev/shm",
            )
        )
    yield from found
    if not found:
        yield ok("shm", f"{directory}: {kind or 'file system'}, {size(free)} of {size(total)} free")


def _mount_of(directory: str) -> tuple[str, dict[str, str]]:
    """Type and options of the file system mounted at a directory; ("", {}) if not known."""
    found: tuple[str, dict[str, str]] = ("", {})
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            fields, _, behind = line.partition(" - ")
            if fields.split()[4] == directory:
                kind, _, options = behind.split()[:3]
                pairs = (option.partition("=") for option in options.split(","))
                found = kind, {name: value for name, _, value in pairs}
    return found


def check_kernel(release: str | None = None) -> Iterator[Finding]:
    """Check that the kernel lets segments grow as they fill."""
    release = release or os.uname().release
    numbers = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    if _populates() if release == os.uname().release else numbers >= _SPARSE_SINCE:
        yield ok("kernel", f"Linux {release}: segments grow as they fill")
    else:
        yield problem(
            "kernel",
            f"Linux {release} has no MADV_POPULATE_WRITE: every queue takes "
            "its whole size at once (75 MiB by default)",
            "use Linux 5.14 or newer, or lower --arena-size",
        )


def _populates() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_POPULATE_WRITE)
        except OSError:
            return False
    return True


def check_limits() -> Iterator[Finding]:
    """Check the resource limits of this process, which a broker started here would inherit."""
    found = []
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < 1 << 40:
        found.append(
            problem(
                "limits",
                f"RLIMIT_AS is {size(space)}; every queue that is used "
                "maps its whole size (75 MiB by default)",
                "ulimit -v unlimited (systemd: LimitAS=infinity)",
            )
        )
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < rlimits.NEEDED:
        found.append(
            problem(
                "limits",
                f"RLIMIT_NOFILE cannot be raised above {files} by this "
                "user; a supervisor, which does, takes a file for each attached "
                f"process and for queues on disk, up to {rlimits.NEEDED}",
                "ulimit -Hn 65536 (systemd: LimitNOFILE=65536)",
            )
        )
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY and largest < 1 << 40:
        found.append(
            problem(
                "limits",
                f"RLIMIT_FSIZE is {size(largest)}: it holds for shared memory too",
                "ulimit -f unlimited (systemd: LimitFSIZE=infinity)",
            )
        )
    yield from found
    if not found:
        unlimited = files == resource.RLIM_INFINITY
        yield ok("limits", f"address space unlimited, {'unlimited' if unlimited else files} files")


def check_memory(
    root: Path = Path("/proc/sys/vm"), meminfo: Path = Path("/proc/meminfo")
) -> Iterator[Finding]:
    """Check the kernel's settings for mappings and for overcommit."""
    found = []
    maps = number(root / "max_map_count")
    if maps is not None and maps < _FEW_MAPS:
        found.append(
            problem(
                "memory",
                f"vm.max_map_count is {maps}; a supervisor maps every queue",
                "sysctl -w vm.max_map_count=65530 (and in /etc/sysctl.d)",
            )
        )
    if number(root / "overcommit_memory") == 2:
        amounts = _meminfo(meminfo)
        left = amounts.get("CommitLimit", 0) - amounts.get("Committed_AS", 0)
        if left < 1024 * _MIB:
            found.append(
                problem(
                    "memory",
                    "vm.overcommit_memory is 2 and only "
                    f"{size(max(left, 0))} may still be promised; shared memory "
                    "counts",
                    "raise vm.overcommit_ratio, or add swap",
                )
            )
    yield from found
    if not found:
        yield ok("memory", f"vm.max_map_count {maps}, overcommit not strict or with room")


def number(path: Path) -> int | None:
    """The number in a file of /proc; None if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _meminfo(path: Path) -> dict[str, int]:
    with contextlib.suppress(OSError):
        return {
            name: int(words.split()[0]) * 1024
            for name, _, words in (line.partition(":") for line in path.read_text().splitlines())
            if words.split()
        }
    return {}


# ---- RemoveIPC ----

_CONFIG = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd")


def check_remove_ipc(uids: Iterable[int], root: Path = Path("/")) -> Iterator[Finding]:
    """Check whether logind removes a user's shared memory when the user's last session ends."""
    if not (root / "run/systemd/system").is_dir():
        yield ok("removeipc", "systemd does not run here")
        return
    on, where = remove_ipc(root)
    concerned = [
        uid for uid in dict.fromkeys(uids) if not _is_system(uid, root) and not _lingers(uid, root)
    ]
    if not on:
        yield ok("removeipc", f"off ({where})")
    elif not concerned:
        yield ok("removeipc", f"on ({where}), but not for system users and those that linger")
    else:
        users = ", ".join(map(str, concerned))
        yield problem(
            "removeipc",
            f"on ({where}): when the last session of uid {users} ends, "
            "systemd removes all its shared memory, also of running brokers",
            "set RemoveIPC=no in /etc/systemd/logind.conf.d/shmq.conf and restart "
            "systemd-logind, run the broker as a system user, or `loginctl "
            "enable-linger`",
        )


def remove_ipc(root: Path = Path("/")) -> tuple[bool, str]:
    """logind's setting and the file that sets it. logind reads the first main file that exists,
    then all drop-ins in the order of their names; of equal names /etc wins over /run, /run over
    /usr."""
    on, where = True, "systemd's default"
    for folder in _CONFIG:
        main = root / folder / "logind.conf"
        if main.is_file():
            on, where = _apply(main, root, on, where, compiled=True)
            break
    drop_ins: dict[str, Path] = {}
    for folder in reversed(_CONFIG):
        with contextlib.suppress(OSError):
            for file in (root / folder / "logind.conf.d").iterdir():
                if file.name.endswith(".conf"):
                    drop_ins[file.name] = file
    for name in sorted(drop_ins):
        on, where = _apply(drop_ins[name], root, on, where)
    return on, where


def _apply(
    file: Path, root: Path, on: bool, where: str, compiled: bool = False
) -> tuple[bool, str]:
    """The setting and its origin after reading `file`. compiled: the file is a main file, where
    distributions show the default that systemd was compiled with in a comment."""
    section = ""
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            text = line.strip()
            if text.startswith("["):
                section = text
            match = re.fullmatch(r"(#?)\s*RemoveIPC\s*=\s*(\S*)", text, re.IGNORECASE)
            if match is None or section != "[Login]" or (match[1] and not compiled):
                continue
            value = match[2].lower()
            shown = f"/{file.relative_to(root)}"
            if not value:
                on, where = True, "systemd's default"
            elif value in ("1", "yes", "y", "true", "t", "on"):
                on, where = True, "systemd's default" if match[1] else shown
            elif value in ("0", "no", "n", "false", "f", "off"):
                on, where = False, "systemd's default" if match[1] else shown
    return on, where


def _is_system(uid: int, root: Path) -> bool:
    """Returns true if systemd counts this as a system user. Distributions build systemd with the
    limit that /etc/login.defs has."""
    most = 999
    with contextlib.suppress(OSError):
        text = (root / "etc/login.defs").read_text(errors="replace")
        match = re.search(r"^\s*SYS_UID_MAX\s+(\d+)", text, re.MULTILINE)
        most = int(match[1]) if match else most
    return uid <= most or uid == 65534


def _lingers(uid: int, root: Path) -> bool:
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return False
    return (root / "var/lib/systemd/linger" / name).exists()


# ---- data paths ----


def data_path_of(pid: int) -> Path | None:
    """The data path of a supervisor: the one directory that it has open and locked. None if it
    cannot be found."""
    locked = ownership.flocks()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                status = os.stat(link)
                if stat.S_ISDIR(status.st_mode) and locked.get(_place(status)) == pid:
                    path = os.readlink(link)
                    return Path(path.removesuffix(" (deleted)") if not status.st_nlink else path)
    return None


def _place(status: os.stat_result) -> tuple[int, int, int]:
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino


def check_data_path(path: Path, pid: int | None) -> Iterator[Finding]:
    """Check that a data path exists, can be written, has room, holds no damaged files, and is
    locked by the right process. pid: the supervisor that should have locked it, None if there is
    none."""
    try:
        status, room = os.stat(path), os.statvfs(path)
    except OSError as exc:
        yield problem("data path", f"{path}: {exc.strerror}", f"mkdir -p {shlex.quote(str(path))}")
        return
    if not stat.S_ISDIR(status.st_mode):
        yield problem("data path", f"{path} is not a directory", "use a directory as --data-path")
        return
    found = []
    free = room.f_bavail * room.f_frsize
    if room.f_files and room.f_favail < _FEW_INODES:
        found.append(
            problem(
                "data path",
                f"{path} has only {room.f_favail} inodes left; every queue on disk takes some",
                "remove files that nobody needs, or move it to a file system with more inodes",
            )
        )
    if room.f_flag & os.ST_RDONLY:
        found.append(
            problem(
                "data path",
                f"{path} is on a file system that is mounted read-only",
                "remount it, or use another --data-path",
            )
        )
    elif pid is None and not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        found.append(
            problem(
                "data path",
                f"{path} cannot be written by this user (uid "
                f"{os.geteuid()}; it belongs to uid {status.st_uid}, mode "
                f"{stat.S_IMODE(status.st_mode):04o})",
                "run the broker as its owner, or chown it",
            )
        )
    if free < max(_LITTLE_DISK, OPTIONS["max_bytes_per_file"].default):
        found.append(
            problem(
                "data path",
                f"{path} has only {size(free)} of disk left",
                "make room there: when it is full, publishers wait or get Full",
            )
        )
    refused, warned = ownership.who_else_may_write(status, str(path))
    if refused or warned:
        found.append(
            problem(
                "data path",
                f"{path}: {refused or warned}",
                "let only the broker's user write there: chmod go-w, chown",
            )
        )
    found += _bad_files(path)
    found += _foreign_files(path, _user_of(pid, status))
    holder = ownership.flocks().get(_place(status))
    if pid is not None and holder is not None and holder not in (pid, 0, -1):
        found.append(
            problem(
                "data path",
                f"{path} is locked by pid {holder} and not by its supervisor, pid {pid}",
                "end one of the two",
            )
        )
    yield from found
    if not found:
        who = f"locked by pid {holder}" if holder else "not in use"
        yield ok("data path", f"{path}: {size(free)} free, {who}")


def _user_of(pid: int | None, status: os.stat_result) -> int:
    """The user of a data path's broker: its supervisor's, or the one whose directory it is."""
    if pid is not None:
        with contextlib.suppress(OSError):
            return os.stat(f"/proc/{pid}").st_uid
    return status.st_uid or os.geteuid()


def _foreign_files(path: Path, owner: int) -> list[Finding]:
    """A finding if a start of the broker would be refused for a file's owner or writers."""
    try:
        own_files.check_all(path, owner)
    except own_files.ForeignFile as exc:
        text = f"{exc.filename}: {exc.strerror}"
        return [problem("data path", text, "the next start without --data-path-shared is refused")]
    except OSError:
        return []
    return []


def _bad_files(path: Path) -> list[Finding]:
    try:
        bad = sorted(name for name in os.listdir(path) if re.search(r"\.dat\.bad(\.\d+)?\Z", name))
    except OSError:
        return []
    if not bad:
        return []
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return [
        problem(
            "data path",
            f"{path} has files set aside as damaged: {bad[0]}{more}",
            f"see what is in them: shmq inspect {shlex.quote(str(path / bad[0]))}; then move them "
            "away, or stop the broker, give a file that is whole its name without .bad, and start "
            "it: then what is in it is delivered",
        )
    ]
