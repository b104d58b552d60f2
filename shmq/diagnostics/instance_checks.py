"""Checks of one instance: its segments, its supervisor, its queues, its data path."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from shmq import homes, layout, ownership, procfs, shm, sources
from shmq.diagnostics.findings import Finding, ok, problem
from shmq.diagnostics.host import check_data_path, data_path_of, number
from shmq.diagnostics.instances import contents_of
from shmq.diagnostics.readable import age, size
from shmq.diagnostics.removal import (
    in_use,
    is_intact,
    is_own_path,
    remove_embedded,
    remove_leftover,
    remove_orphans,
    removed,
    why_dead,
)
from shmq.diagnostics.segment import head_of
from shmq.errors import Gone, LayoutMismatch, ShmqError
from shmq.layout import Ready
from shmq.ownership import NotTrusted
from shmq.printing import printable
from shmq.shm import SharedObject
from shmq.views import DirectoryView

_LONG_AGO = 60.0  # seconds; no creation takes longer
#: Seconds within which the supervisor sets the number of permits right, and between two looks.
_PERMITS_RIGHT = 2.0
_PERMITS_LOOK = 0.05
_NO_HEARTBEAT = 5.0


def check_instance(name: str, objects: list[SharedObject] | None = None) -> Iterator[Finding]:
    """All checks of one instance. objects: everybody's objects of it, if they are known."""
    if objects is None:
        objects = shm.list_objects(name, everybodys=True)
    trusted = ownership.trusted()
    is_known = not objects or any(item.uid in trusted for item in objects)
    bad = shm.list_set_aside(name) if is_known else []
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
        fd = shm.open_segment(objects[0].name, read_only=True)
    except FileNotFoundError:
        yield Finding("segments", "note", "it was stopped just now")
        return
    except NotTrusted as exc:
        yield _not_checked(exc, objects[0])
        return
    except PermissionError:
        yield Finding(
            "segments",
            "note",
            f"belongs to uid {objects[0].uid}; run doctor as that "
            "user or as root to have it looked at",
        )
        return
    try:
        uid = os.fstat(fd).st_uid
        yield from _strangers(uid, objects)
        yield from _group(os.fstat(fd))
        yield from _directory(name, fd, [item for item in objects if item.uid == uid])
    finally:
        os.close(fd)


def _not_checked(exc: NotTrusted, item: SharedObject) -> Finding:
    """The finding for an instance of a user who is not trusted. Its contents are not read."""
    if item.uid in ownership.trusted():
        return problem("segments", str(exc), f"remove it: rm {item.path}")
    return Finding(
        "segments",
        "note",
        f"{item.path} is owned by {ownership.user(item.uid)}, not "
        "checked: name its owner to have it looked at (--owner)",
    )


def _strangers(uid: int, objects: list[SharedObject]) -> Iterator[Finding]:
    """Report objects that other users have created under names of this instance."""
    others = [item for item in objects if item.uid != uid]
    if others:
        yield problem(
            "segments",
            f"{others[0].path} is owned by {ownership.user(others[0].uid)} "
            f"and not by the broker's user ({len(others)} such); nothing uses it",
            f"as root: rm {' '.join(item.path for item in others[:3])}"
            f"{' ...' if len(others) > 3 else ''}",
        )


def _group(status: os.stat_result) -> Iterator[Finding]:
    """Report which other users the mode of the directory segment lets in."""
    if status.st_mode & 0o022:
        members = "every user of this host"
        if not status.st_mode & 0o002:
            members = f"members of group {ownership.group(status.st_gid)}"
        yield Finding(
            "trust",
            "note",
            f"{members} may write its memory, and so run code as "
            f"{ownership.user(status.st_uid)} and as everybody who attaches: let only "
            "those in who may do all that",
        )


def _set_aside(paths: list[str]) -> Finding:
    used = 0
    for path in paths:
        with contextlib.suppress(OSError):
            used += os.stat(path).st_blocks * 512
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return problem(
        "segments",
        f"set aside because something had overwritten it: {paths[0]}{more} "
        f"({size(used)} of shared memory); what was intact went to the queue's files",
        f"see what it was: shmq inspect {paths[0]}; then rm {' '.join(paths[:3])}"
        f"{' ...' if len(paths) > 3 else ''}",
    )


def _directory(name: str, fd: int, objects: list[SharedObject]) -> Iterator[Finding]:
    dead = why_dead(fd)
    if dead:
        yield from _leftover(name, fd, dead, objects)
        return
    head = head_of(fd)
    if int(head["magic"]) != layout.MAGIC:
        yield problem(
            "segments",
            f"{objects[0].path} was not made by shmq (magic "
            f"{int(head['magic']):#x}), so no instance can have this name",
            "remove it by hand, or use another --instance",
        )
        return
    version = int(head["layout_version"])
    if version != layout.LAYOUT_VERSION or int(head["fingerprint"]) != layout.FINGERPRINT:
        other = (
            f"layout version {version}, this shmq {layout.VERSION} has {layout.LAYOUT_VERSION}"
            if version != layout.LAYOUT_VERSION
            else "another build of shmq (compiler, C library or page size differ)"
        )
        yield problem(
            "layout",
            f"was made by {other}; it may hold messages",
            "use the installation that made it; to change over, write it to disk with "
            f"that one: shmq serve --drain --instance {name} --data-path DIRECTORY",
        )
        return
    yield from _ready(name, objects)


def _leftover(name: str, fd: int, why: str, objects: list[SharedObject]) -> Iterator[Finding]:
    """Report an instance with an unusable directory, unless it is being created at this moment."""
    if time.time() - os.fstat(fd).st_ctime < _LONG_AGO and in_use(objects):
        yield Finding("segments", "note", "it is being made or removed just now")
        return
    whole = 0 if int(head_of(fd)["ready"]) == Ready.CLOSED else sum(map(is_intact, objects))
    if whole:  # the next start saves their messages
        yield problem(
            "segments",
            f"its directory segment was truncated; {whole} of its queues are intact",
            "start it again: shmq serve writes what they hold to disk",
        )
        return
    finding = problem(
        "segments", f"{why} ({_objects(objects)})", "shmq doctor --fix, or `shmq serve`"
    )
    yield replace(finding, fix=lambda: removed(remove_leftover(name)))


def _objects(objects: list[SharedObject]) -> str:
    return f"{len(objects)} object{'s' if len(objects) > 1 else ''} in {shm.SHM_DIRECTORY}"


def _orphans(name: str, objects: list[SharedObject]) -> Iterator[Finding]:
    """Report queues or a semaphore without a directory."""
    uids = {item.uid for item in objects}
    if not uids & ownership.trusted():
        yield _not_checked(NotTrusted(), objects[0])
        return
    objects = [item for item in objects if item.uid in ownership.trusted()]
    text = f"{_objects(objects)}, but its directory is gone"
    busy = in_use(objects)
    if busy is None:
        yield Finding(
            "segments", "note", f"{text}; only their owner or root can tell whether they are in use"
        )
    elif busy:
        yield problem(
            "segments",
            f"{text}; processes still use them",
            "end these processes; what they hold is flushed by their supervisor, if it "
            f"lives: fuser {objects[0].path}",
        )
    else:
        finding = problem("segments", text, "shmq doctor --fix, or `shmq serve`")
        yield replace(finding, fix=lambda: removed(remove_orphans(name)))


def _ready(name: str, objects: list[SharedObject]) -> Iterator[Finding]:
    """Check the supervisor, the free client entries and the queues of a complete instance."""
    with sources.open_readonly(name) as source:
        directory = source.directory
        pid = directory.read("supervisor_pid")
        theirs, ours = directory.read("pid_namespace"), procfs.pid_namespace()
        if directory.is_foreign:
            yield problem(
                "namespace",
                f"runs in another PID namespace ({theirs}, this is {ours})"
                ": from here nobody can attach, or tell which processes are alive",
                "run both in one: docker --pid=container:NAME and --ipc=container:NAME",
            )
            return
        alive = sources.supervisor_alive(directory)
        silent = (time.clock_gettime_ns(time.CLOCK_MONOTONIC) - directory.read("heartbeat")) / 1e9
        if not alive:
            yield _without_supervisor(name, source, objects)
        elif silent > _NO_HEARTBEAT:
            yield problem(
                "supervisor",
                f"its supervisor (pid {pid}) has not moved for {age(silent)} ({_state_of(pid)})",
                f"kill -CONT {pid} if it was stopped; else look at its log, or restart it",
            )
        else:
            yield ok("supervisor", f"pid {pid} is alive, heartbeat {age(max(silent, 0))} ago")
        if not any(item.kind == "semaphore" for item in objects):
            yield problem(
                "segments",
                "its semaphore is gone: nobody can attach any more",
                "restart its supervisor (--on-stop=keep keeps the messages in memory)",
            )
        if alive:
            yield from _permits(name, directory)
        free = directory.free_clients
        if free < layout.constant("CLIENTS") // 10:
            yield problem(
                "clients",
                f"only {free} of {layout.constant('CLIENTS')} processes may still attach",
                "end processes that are not needed",
            )
        yield from _queues(source, objects)
        refused, named = directory.disk_trouble[0] if alive else 0, directory.data_path
    if alive:
        yield from _strain(pid)
        if refused == errno.ESTALE:
            yield problem(
                "data path",
                f"{printable(named)} is not the directory that it was (moved, or its file system "
                "unmounted)",
                "bring that one back under this name (mount, mv)",
            )
            return
        if refused:
            yield problem(
                "data path",
                f"{printable(named)}: its supervisor cannot write there: {os.strerror(refused)}",
                "mend that: the supervisor's log has the file; it tries again every second",
            )
        data_path = data_path_of(pid)
        if data_path is not None:
            yield from check_data_path(data_path, pid)


def _permits(name: str, directory: DirectoryView) -> Iterator[Finding]:
    """Compare the permits to attach with the table of clients, for longer than the supervisor
    needs to set them right after a death."""
    deadline = time.monotonic() + _PERMITS_RIGHT
    while True:
        try:
            permits = shm.Permits(name)
        except (OSError, ShmqError):  # this user may not open it, or it is gone: said elsewhere
            return
        missing = directory.free_clients - permits.free
        permits.close()
        if not missing:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(_PERMITS_LOOK)
    yield problem(
        "clients",
        f"{abs(missing)} permits to attach are {'missing' if missing > 0 else 'too many'}, and the "
        "supervisor does not set that right: a client was stopped while it attached or detached",
        "end or continue stopped processes (state T in ps), or restart the supervisor",
    )


def _without_supervisor(
    name: str, source: sources.ReadOnlySource, objects: list[SharedObject]
) -> Finding:
    directory, found = source.directory, contents_of(source)
    pid, path = directory.read("supervisor_pid"), directory.data_path
    remedy = (
        f"start it again: {shm.to_start(name, path)}; or write its {found.in_memory} "
        f"messages in memory to disk: shmq serve --drain --instance {name}; or throw it away: "
        f"shmq rm {name}"
    )
    if not is_own_path(path, name, objects[0].uid) or in_use(objects) is not False:
        text = f"its supervisor (pid {pid}) is dead; clients go on with what is in memory, "
        return problem("supervisor", f"{text}nothing else happens", remedy)
    text = f"left by an embedded broker whose process has ended (supervisor pid {pid}), with "
    text += f"{found.messages} messages, files in {printable(path)}"
    if found.messages and homes.is_in_memory(Path(path)):
        return problem("supervisor", f"{text}, where nothing is kept", f"shmq rm {name}")
    if found.messages:
        return problem("supervisor", text, remedy)
    finding = problem("supervisor", text, f"shmq doctor --fix, or shmq rm {name}")
    return replace(finding, fix=lambda: remove_embedded(name, path))


def _queues(source: sources.ReadOnlySource, objects: list[SharedObject]) -> Iterator[Finding]:
    """Check that every queue has its segment and every segment its queue."""
    serials = {item.serial for item in objects if item.kind == "queue"}
    entries = source.directory.live_queues()
    young = source.directory.read("next_serial")
    damaged = 0
    for entry in entries:
        try:
            source.queue(entry)
        except Gone:
            if entry.serial in serials or entry not in source.directory.live_queues():
                continue  # deleted in the meantime
            yield problem(
                "segments",
                f"the segment of queue {entry.serial} "
                f"({entry.channel or 'a backlog'}) was removed by somebody",
                "restart its supervisor: it creates the queue again; the messages "
                "in memory are lost",
            )
        except LayoutMismatch as exc:
            damaged += 1
            yield problem("segments", str(exc), "look at it with `shmq inspect`")
    known = {entry.serial for entry in entries}
    known |= {entry.serial for entry in source.directory.live_stores()}
    stray = [
        item
        for item in objects
        if item.kind == "queue"
        and item.serial not in known
        and _is_old(item)
        and shm.serial_number(item.serial or 0) < young
    ]
    if stray:
        yield Finding(
            "segments",
            "note",
            f"{len(stray)} segments belong to no queue (such as "
            f"{stray[0].name}); its supervisor removes them at its next start",
        )
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
        return "state not known"


def _strain(pid: int) -> Iterator[Finding]:
    """Report a supervisor that is close to its limits of files and mappings."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(pid)
        soft, _ = process.rlimit(psutil.RLIMIT_NOFILE)
        used = process.num_fds()
        if soft not in (-1, resource.RLIM_INFINITY) and used > soft * 0.8:
            yield problem(
                "limits",
                f"its supervisor has {used} of {soft} files open",
                "LimitNOFILE=65536 in its unit, or ulimit -n, and restart it",
            )
        most = number(Path("/proc/sys/vm/max_map_count")) or sys.maxsize
        with open(f"/proc/{pid}/maps", "rb") as file:
            mapped = sum(1 for _ in file)
        if mapped > most * 0.8:
            yield problem(
                "limits",
                f"its supervisor has {mapped} of {most} mappings",
                f"sysctl -w vm.max_map_count={4 * most}",
            )
