"""`shmq doctor` on instances: is the supervisor well, is everything in its place, and what nobody
can use any more, which can be removed.

Nobody can use an instance whose making or removal was cut short, whose directory is gone, or that
is from before the last boot, if the kernel also grants a read lease on it: it does only while no
process, of whatever user or container, has it open for writing. What a supervisor could take up is
never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import resource
import shlex
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from shmq import layout, ownership, segments, stats
from shmq.cli.host import check_data_path, data_path_of, number
from shmq.cli.output import age, printable, size
from shmq.cli.report import Finding, ok, problem
from shmq.cli.segment import boot_id
from shmq.errors import Gone, LayoutMismatch, ShmqError
from shmq.layout import Ready
from shmq.names import valid_instance
from shmq.ownership import NotTrusted
from shmq.segments import SharedObject

_LONG_AGO = 60.0  # seconds: longer than any creation takes
_NO_HEARTBEAT = 5.0


def instances() -> list[str]:
    """Every instance of which there is any shared object, running or not."""
    found = set()
    for file in os.listdir(segments.SHM_DIRECTORY):
        match = re.fullmatch(r"(?:sem\.)?shmq\.(.+)", file)
        if match is not None:
            name = match[1]
            if file.startswith("sem."):
                name = name.removesuffix(".attach") if name.endswith(".attach") else ""
            else:
                name = re.sub(r"\.[0-9]+(\.bad)?\Z", "", name)
            if name and valid_instance(name):
                found.add(name)
    return sorted(found)


def owners(names: Iterable[str]) -> Iterator[int]:
    """Users to whom these instances belong."""
    for name in names:
        for item in segments.list_objects(name, everybodys=True)[:1]:
            yield item.uid


def check_instance(name: str) -> Iterator[Finding]:
    """All that can be said of one instance."""
    objects = segments.list_objects(name, everybodys=True)
    bad = segments.list_set_aside(name)
    if bad:
        yield _set_aside(bad)
    if not objects:
        left = "nothing else" if bad else "nothing"
        yield Finding("segments", "note", f"not running, and {left} of it is left")
        return
    if objects[0].kind != "directory":
        yield from _orphans(name, objects)
        return
    try:
        fd = segments.open_segment(objects[0].name, read_only=True)
    except FileNotFoundError:
        yield Finding("segments", "note", "it was stopped just now")
        return
    except NotTrusted as exc:
        yield _not_checked(exc, objects[0])
        return
    except PermissionError:
        yield Finding("segments", "note", f"belongs to uid {objects[0].uid}; run doctor as that "
                      "user or as root to have it looked at")  # fmt: skip
        return
    try:
        uid = os.fstat(fd).st_uid
        yield from _strangers(uid, objects)
        yield from _group(os.fstat(fd))
        yield from _directory(name, fd, [item for item in objects if item.uid == uid])
    finally:
        os.close(fd)


def _not_checked(exc: NotTrusted, item: SharedObject) -> Finding:
    """Of a directory that is another user's, or none: nothing of it is believed."""
    if item.uid in ownership.trusted():
        return problem("segments", str(exc), f"remove it: rm {item.path}")
    return Finding("segments", "note", f"{item.path} is owned by {ownership.user(item.uid)}, not "
                   "checked: name its owner to have it looked at (--owner)")  # fmt: skip


def _strangers(uid: int, objects: list[SharedObject]) -> Iterator[Finding]:
    """What others have put under names of this instance."""
    others = [item for item in objects if item.uid != uid]
    if others:
        yield problem("segments", f"{others[0].path} is owned by {ownership.user(others[0].uid)} "
                       f"and not by the broker's user ({len(others)} such); nothing uses it",
                       f"as root: rm {' '.join(item.path for item in others[:3])}"
                       f"{' ...' if len(others) > 3 else ''}")  # fmt: skip


def _group(status: os.stat_result) -> Iterator[Finding]:
    """How far the trust goes that whoever started it has granted."""
    if status.st_mode & 0o022:
        members = "every user of this host"
        if not status.st_mode & 0o002:
            members = f"members of group {ownership.group(status.st_gid)}"
        yield Finding("trust", "note", f"{members} may write its memory, and so run code as "
                      f"{ownership.user(status.st_uid)} and as everybody who attaches: let only "
                      "those in who may do all that")  # fmt: skip


def _set_aside(paths: list[str]) -> Finding:
    used = 0
    for path in paths:
        with contextlib.suppress(OSError):
            used += os.stat(path).st_blocks * 512
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return problem("segments", f"set aside because something had overwritten it: {paths[0]}{more} "
                   f"({size(used)} of shared memory); what was intact went to the queue's files",
                   f"see what it was: shmq inspect {paths[0]}; then rm {' '.join(paths[:3])}"
                   f"{' ...' if len(paths) > 3 else ''}")  # fmt: skip


def _head(fd: int) -> Any:
    kind = layout.dtype("segment")
    return np.frombuffer(os.pread(fd, kind.itemsize, 0).ljust(kind.itemsize, b"\0"), kind)[0]


@dataclass(frozen=True)
class Held:
    """What an instance holds."""

    queues: int
    messages: int
    in_memory: int


def held(source: layout.ReadOnlySource) -> Held:
    """Counted from the headers of its queues: waiting, in flight, deferred and leased."""
    queues = messages = on_disk = 0
    for _, view in layout.live_queues(source):
        found = stats.read_queue(None, view)
        queues += 1
        messages += found.depth + found.in_flight + found.deferred + found.leased
        on_disk += found.backend_depth + view.read("deferred_depth")
        on_disk += layout.run_length(view.header)
    return Held(queues, messages, max(messages - on_disk, 0))


def is_of_another_boot(directory: layout.DirectoryView) -> bool:
    """Whether it is from before the last boot, or from another machine."""
    boot = boot_id()
    made = tuple(int(word) for word in directory.header["segment"]["boot_id"])
    return any(boot) and made != boot


def _dead_directory(fd: int) -> str:
    """Why no process can be using an instance, by its directory alone; "" if one could."""
    head = _head(fd)
    magic, state = int(head["magic"]), int(head["ready"])
    if magic == 0 and state == Ready.RAW:
        return "half-made: whoever made it died"
    if magic != layout.MAGIC or int(head["layout_version"]) != layout.LAYOUT_VERSION:
        return ""
    if state == Ready.RAW:
        return "half-made: whoever made it died"
    if state == Ready.CLOSED:
        return "its removal was cut short"
    if _dead_words(tuple(int(word) for word in head["boot_id"])):
        return "from before the last boot, or from another machine"
    return ""


def _dead_words(words: tuple[int, ...]) -> bool:
    """Whether a segment with this boot id is of another boot."""
    boot = boot_id()
    return any(boot) and words != boot


def _directory(name: str, fd: int, objects: list[SharedObject]) -> Iterator[Finding]:
    dead = _dead_directory(fd)
    if dead:
        yield from _leftover(name, fd, dead, objects)
        return
    head = _head(fd)
    if int(head["magic"]) != layout.MAGIC:
        yield problem("segments", f"{objects[0].path} was not made by shmq (magic "
                       f"{int(head['magic']):#x}), so no instance can have this name",
                       "remove it by hand, or use another --instance")  # fmt: skip
        return
    version = int(head["layout_version"])
    if version != layout.LAYOUT_VERSION or int(head["fingerprint"]) != layout.FINGERPRINT:
        other = (
            f"layout version {version}, this shmq {layout.VERSION} has {layout.LAYOUT_VERSION}"
            if version != layout.LAYOUT_VERSION
            else "another build of shmq (compiler, C library or page size differ)"
        )
        yield problem("layout", f"was made by {other}; it may hold messages",
                       "use the installation that made it; to change over, write it to disk with "
                       f"that one: shmq serve --drain --instance {name} --data-path DIRECTORY",
                       )  # fmt: skip
        return
    yield from _ready(name, objects)


def _leftover(name: str, fd: int, why: str, objects: list[SharedObject]) -> Iterator[Finding]:
    """A directory that nobody can use; unless its maker is at it."""
    if time.time() - os.fstat(fd).st_ctime < _LONG_AGO and _in_use(objects):
        yield Finding("segments", "note", "it is being made or removed just now")
        return
    whole = 0 if int(_head(fd)["ready"]) == Ready.CLOSED else sum(map(_is_whole, objects))
    if whole:  # a start saves what they hold
        yield problem("segments", f"somebody has cut its directory short; {whole} of its queues "
                       "are whole", "start it again: shmq serve writes what they hold to disk",
                       )  # fmt: skip
        return
    finding = problem(
        "segments", f"{why} ({_objects(objects)})", "shmq doctor --fix, or `shmq serve`"
    )
    yield replace(finding, fix=lambda: remove_leftover(name))


def _is_whole(item: SharedObject) -> bool:
    """Whether it is a queue of this boot that was made to the end and not removed."""
    if item.kind != "queue":
        return False
    try:
        fd = segments.open_segment(item.name, read_only=True)
    except (ShmqError, OSError):
        return False
    try:
        head = _head(fd)
    finally:
        os.close(fd)
    words = tuple(int(word) for word in head["boot_id"])
    is_ready = int(head["magic"]) == layout.MAGIC and int(head["ready"]) == Ready.READY
    return is_ready and not _dead_words(words)


def _objects(objects: list[SharedObject]) -> str:
    return f"{len(objects)} object{'s' if len(objects) > 1 else ''} in {segments.SHM_DIRECTORY}"


def _orphans(name: str, objects: list[SharedObject]) -> Iterator[Finding]:
    """Queues or a semaphore without a directory."""
    text = f"{_objects(objects)}, but its directory is gone"
    uids = {item.uid for item in objects}
    if not uids & ownership.trusted():
        yield _not_checked(NotTrusted(), objects[0])
        return
    objects = [item for item in objects if item.uid in ownership.trusted()]
    busy = _in_use(objects)
    if busy is None:
        yield Finding("segments", "note", f"{text}; only their owner or root can tell whether "
                      "they are in use")  # fmt: skip
    elif busy:
        yield problem("segments", f"{text}; processes still use them",
                       "end these processes; what they hold is flushed by their supervisor, if it "
                       f"lives: fuser {objects[0].path}")  # fmt: skip
    else:
        finding = problem("segments", text, "shmq doctor --fix, or `shmq serve`")
        yield replace(finding, fix=lambda: remove_orphans(name))


def _ready(name: str, objects: list[SharedObject]) -> Iterator[Finding]:
    """An instance as it should be: is its supervisor well?"""
    with layout.open_readonly(name) as source:
        directory = source.directory
        pid = directory.read("supervisor_pid")
        theirs, ours = directory.read("pid_namespace"), layout.pid_namespace()
        if directory.is_foreign:
            yield problem("namespace", f"runs in another PID namespace ({theirs}, this is {ours})"
                           ": from here nobody can attach, nor tell who lives",
                           "run both in one: docker --pid=container:NAME and "
                           "--ipc=container:NAME")  # fmt: skip
            return
        alive = layout.supervisor_alive(directory)
        silent = (time.clock_gettime_ns(time.CLOCK_MONOTONIC) - directory.read("heartbeat")) / 1e9
        if not alive:
            yield _without_supervisor(name, source, objects)
        elif silent > _NO_HEARTBEAT:
            yield problem("supervisor", f"its supervisor (pid {pid}) has not moved for "
                           f"{age(silent)} ({_state_of(pid)})",
                           f"kill -CONT {pid} if it was stopped; else look at its log, or restart "
                           "it")  # fmt: skip
        else:
            yield ok("supervisor", f"pid {pid} is alive, heartbeat {age(max(silent, 0))} ago")
        if not any(item.kind == "semaphore" for item in objects):
            yield problem("segments", "its semaphore is gone: nobody can attach any more",
                           "restart its supervisor (--on-stop=keep keeps the messages in memory)",
                           )  # fmt: skip
        free = directory.free_clients
        if free < layout.constant("CLIENTS") // 10:
            yield problem("clients", f"only {free} of {layout.constant('CLIENTS')} processes may "
                           "still attach", "end processes that are not needed")  # fmt: skip
        yield from _queues(source, objects)
    if alive:
        yield from _strain(pid)
        data_path = data_path_of(pid)
        if data_path is not None:
            yield from check_data_path(data_path, pid)


def _without_supervisor(
    name: str, source: layout.ReadOnlySource, objects: list[SharedObject]
) -> Finding:
    directory, found = source.directory, held(source)
    pid, path = directory.read("supervisor_pid"), directory.data_path
    where = f" --data-path {shlex.quote(path)}" if path else ""
    remedy = (
        f"start it again: shmq serve --instance {name}{where}; or write its {found.in_memory} "
        f"messages in memory to disk: shmq serve --drain --instance {name}; or throw it away: "
        f"shmq rm {name}"
    )
    if not is_own_path(path, name, objects[0].uid) or _in_use(objects) is not False:
        text = f"its supervisor (pid {pid}) is dead; clients go on with what is in memory, "
        return problem("supervisor", f"{text}nothing else happens", remedy)
    text = f"left by an embedded broker whose process has ended (supervisor pid {pid}), with "
    text += f"{found.messages} messages, files in {printable(path)}"
    if found.messages:
        return problem("supervisor", text, remedy)
    finding = problem("supervisor", text, f"shmq doctor --fix, or shmq rm {name}")
    return replace(finding, fix=lambda: _remove_embedded(name, path))


def _remove_embedded(name: str, path: str) -> str:
    """ShmqError if it came to life or holds anything now."""
    with layout.open_readonly(name) as source:
        if held(source).messages:
            raise ShmqError("it holds messages")
    uid = os.stat(segments.directory_path(name)).st_uid
    text, own = _removed(remove_dead(name)), own_directory(name, path, uid)
    is_removed = own is not None and remove_own_directory(own, uid)
    return f"{text} and {path}" if is_removed else text


def _queues(source: layout.ReadOnlySource, objects: list[SharedObject]) -> Iterator[Finding]:
    """Does every queue have its segment, and every segment its queue?"""
    serials = {item.serial for item in objects if item.kind == "queue"}
    entries = source.directory.live_queues()
    young = source.directory.read("next_serial")
    damaged = 0
    for entry in entries:
        try:
            source.queue(entry)
        except Gone:
            if entry.serial in serials or entry not in source.directory.live_queues():
                continue  # deleted meanwhile
            yield problem("segments", f"the segment of queue {entry.serial} "
                           f"({entry.channel or 'a backlog'}) was removed by somebody",
                           "restart its supervisor: it makes the queue anew, its messages in "
                           "memory are lost")  # fmt: skip
        except LayoutMismatch as exc:
            damaged += 1
            yield problem("segments", str(exc), "look at it with `shmq inspect`")
    known = {entry.serial for entry in entries}
    stray = [item for item in objects
             if item.kind == "queue" and item.serial not in known and _is_old(item)
             and (item.serial or 0) < young]  # fmt: skip
    if stray:
        yield Finding("segments", "note", f"{len(stray)} segments belong to no queue (such as "
                      f"{stray[0].name}); its supervisor removes them at its next start",
                      )  # fmt: skip
    elif not damaged:
        yield ok("segments", f"{len(entries)} queues, all in place")


def _is_old(item: SharedObject) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - os.lstat(item.path).st_ctime > _LONG_AGO
    return False


def _state_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "not to be seen"


def _strain(pid: int) -> Iterator[Finding]:
    """How close a supervisor is to its own limits."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(pid)
        soft, _ = process.rlimit(psutil.RLIMIT_NOFILE)
        used = process.num_fds()
        if soft not in (-1, resource.RLIM_INFINITY) and used > soft * 0.8:
            yield problem("limits", f"its supervisor has {used} of {soft} files open",
                           "LimitNOFILE=65536 in its unit, or ulimit -n, and restart it",
                           )  # fmt: skip
        most = number(Path("/proc/sys/vm/max_map_count")) or sys.maxsize
        with open(f"/proc/{pid}/maps", "rb") as file:
            mapped = sum(1 for _ in file)
        if mapped > most * 0.8:
            yield problem("limits", f"its supervisor has {mapped} of {most} mappings",
                           f"sysctl -w vm.max_map_count={4 * most}")  # fmt: skip


# ---- removing what is dead ----


def _in_use(objects: Iterable[SharedObject]) -> bool | None:
    """Whether any process has one of them open for writing, as everybody has who attached. None:
    not ours to find out."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # what the kernel sends a lease's holder
    try:
        paths = [item.path for item in objects if item.kind != "semaphore"]
        return sum(map(_is_open, paths)) > 0  # all of them: one that we may not ask decides
    except PermissionError:
        return None
    finally:
        signal.signal(signal.SIGIO, before)


def _refuse(busy: bool | None) -> None:
    if busy is not False:
        raise ShmqError(
            "a process uses it"
            if busy
            else "whether a process uses it can only be told by its owner or root"
        )


def _is_open(path: str) -> bool:
    """PermissionError if this is another user's."""
    try:
        fd = ownership.open_owned(path, os.O_RDONLY, ownership.trusted())
    except FileNotFoundError:
        return False
    except NotTrusted:  # a FIFO or the like: no process has it as shared memory
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except PermissionError:
        raise
    except OSError as exc:  # a file system without leases
        raise PermissionError(exc.errno, "cannot tell whether it is in use", path) from exc
    finally:
        os.close(fd)
    return False


def remove_leftover(instance: str) -> str:
    """Remove an instance whose directory says that nobody can use it. ShmqError if that changed.

    Under the lock that makes a supervisor the only one; the directory last, so that a death of
    this process leaves what it found.
    """
    fd = segments.open_directory(instance, read_only=True)
    try:
        _lock(instance, fd)
        why = _dead_directory(fd)
        uid, is_closed = os.fstat(fd).st_uid, int(_head(fd)["ready"]) == Ready.CLOSED
        objects = [item for item in segments.list_objects(instance, everybodys=True)
                   if item.uid == uid]  # fmt: skip
        others = [item for item in objects if item.kind != "directory"]
        if not why:
            raise ShmqError("it has come to life")
        if not is_closed and any(map(_is_whole, objects)):
            raise ShmqError("queues of it are whole: `shmq serve` saves what they hold")
        _refuse(_in_use(objects))
        count = sum([item.unlink() for item in others])
        return _removed(count + segments.unlink_segment(segments.directory_name(instance)))
    finally:
        os.close(fd)


def remove_dead(instance: str) -> int:
    """Remove an instance that no supervisor has and no process uses, whatever it holds; how many
    objects. ShmqError if one of the two does.

    Under the lock that makes a supervisor the only one; the directory last.
    """
    fd = segments.open_segment(segments.directory_name(instance), read_only=True)
    try:
        _lock(instance, fd)
        uid = os.fstat(fd).st_uid
        found = segments.list_objects(instance, everybodys=True)
        objects = [item for item in found if item.uid == uid]
        try:
            _refuse(_in_use(objects))
        except ShmqError as exc:
            raise ShmqError(f"instance {instance!r} cannot be removed: {exc}") from None
        count = sum([item.unlink() for item in objects if item.kind != "directory"])
        return count + segments.unlink_segment(segments.directory_name(instance))
    finally:
        os.close(fd)


#: Files that a broker makes in its data path.
_BROKERS_FILE = re.compile(
    r"(nsqd|shmq)\.dat|.+\.(diskqueue|deferred)\..+\.dat(\.bad(\.\d+)?)?|.+\.tmp"
)


def is_own_path(path: str, instance: str, uid: int) -> bool:
    """Whether an embedded broker of this user and name, which was given no data path, has its files
    in such a place."""
    place, state = Path(path), os.environ.get("XDG_STATE_HOME")
    if place.parent == Path(tempfile.gettempdir()):
        return place.name.startswith(f"shmq-{instance}-")
    homes = [Path(state) / "shmq"] if state else []
    with contextlib.suppress(KeyError):
        homes.append(Path(pwd.getpwuid(uid).pw_dir) / ".local/state/shmq")
    pattern = rf"{re.escape(instance)}(-\w{{8}})?"
    return place.parent in homes and re.fullmatch(pattern, place.name) is not None


def own_directory(instance: str, data_path: str | None, uid: int) -> str | None:
    """The data path, if an embedded broker of this user made it for itself and it is there."""
    if not data_path or not is_own_path(data_path, instance, uid):
        return None
    with contextlib.suppress(OSError):
        status = os.lstat(data_path)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == uid:
            return data_path
    return None


def remove_own_directory(path: str, uid: int) -> bool:
    """Remove such a directory with what a broker made in it; False: something else is in it too.

    Its name is from shared memory, so it need not be what it says: nothing of another user's is
    touched, nothing below it, and nothing by a path.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != uid:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in os.listdir(fd):
            if _BROKERS_FILE.fullmatch(name):
                os.unlink(name, dir_fd=fd)
        os.rmdir(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def remove_orphans(instance: str) -> str:
    """Remove what is left of an instance without a directory. ShmqError if it is used, or another
    instance of this name has come up.

    Takes the name meanwhile, so that nobody else can.
    """
    return _removed(remove_without_directory(instance))


def remove_without_directory(instance: str) -> int:
    """As `remove_orphans`; how many objects."""
    name = segments.directory_name(instance)
    try:
        fd = segments.create_directory(instance, 0o600)
    except FileExistsError:
        raise ShmqError("an instance of this name has come up") from None
    try:
        _lock(instance, fd)
        try:
            orphans = [item for item in segments.list_objects(instance, everybodys=True)
                       if item.kind != "directory"
                       and item.uid in ownership.trusted()]  # fmt: skip
            _refuse(_in_use(orphans))
            return sum([item.unlink() for item in orphans])
        finally:
            segments.unlink_segment(name)
    finally:
        os.close(fd)


def _lock(instance: str, fd: int) -> None:
    """Lock a directory segment, as a supervisor does, for as long as `fd` is open."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ShmqError("a supervisor has it") from None
    with contextlib.suppress(FileNotFoundError):
        path = segments.path_of(segments.directory_name(instance))
        if os.lstat(path).st_ino == os.fstat(fd).st_ino:
            return
    raise ShmqError("an instance of this name has come up")


def _removed(count: int) -> str:
    return f"removed {count} object{'' if count == 1 else 's'}"
