"""How a supervisor starts: it creates the instance, or takes over the one that another left.

Two locks keep it the only one: nsqd's flock on the data path, and a flock on the directory segment
itself, which the kernel releases when its holder ends. The state of the directory segment decides:

    it does not exist                create it, then topics and channels from nsqd.dat and the files
    raw, or closed                   a death while creating or unlinking it: remove and create it
    cut short (`truncate`)           write the queues' messages to disk, remove and create it
    ready, its supervisor dead       adopt (`adoption`): same segments, clients continue
    ready, its supervisor alive      refuse
    another layout or build          refuse, name both, change nothing
    another user's, or no segment    refuse, name its owner, change nothing

A member of the instance's group may cut a segment short while it is mapped. A process that then
touches the missing part is killed by SIGBUS, which Python cannot catch. If that ends this
supervisor, faulthandler and the process that started it report it, and the next start repairs the
instance.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shmq import _native, layout, ownership, shm
from shmq.errors import ShmqError
from shmq.layout import ClientKind, ClientState, Ready
from shmq.names import is_ephemeral
from shmq.options import Options
from shmq.procfs import is_alive
from shmq.storage import deferred, key_file, metadata
from shmq.storage.data_path import existing_files, remove_temporary
from shmq.storage.metadata import ChannelMeta, TopicMeta
from shmq.supervisor import directory_recovery
from shmq.supervisor.progress import Progress
from shmq.supervisor.systemd import Notifier
from shmq.supervisor.topics import TopicManager

_TRIES = 100  # other starts and stops may happen between looking and locking

_log = logging.getLogger(__name__)


@dataclass
class Directory:
    """The directory segment, locked for this process as long as `fd` is open."""

    fd: int
    fresh: bool

    def close(self) -> None:
        """Release the lock."""
        os.close(self.fd)


def enter(options: Options) -> Directory:
    """Create or lock the directory segment. `fresh` in the result: it is new and has no topics.

    Raises ShmqError if another supervisor has it or another user has one of its names,
    LayoutMismatch if another build made it, Full if /dev/shm is full.
    """
    name = shm.directory_name(options.instance)
    mode, group = options.permissions()
    data_path_text(options.data_path or ".")
    shm.Permits.check_name(options.instance)
    for _ in range(_TRIES):
        try:
            fd, made = shm.create_segment(name, mode, group), True
        except FileExistsError:
            try:
                fd, made = shm.open_segment(name, owners=shm.own()), False
            except FileNotFoundError:
                continue
        try:
            directory = _locked(options, name, fd, made)
        except BaseException:
            os.close(fd)
            raise
        if directory is not None:
            return directory
        os.close(fd)
    raise ShmqError(f"instance {options.instance!r}: others keep starting and stopping it")


def data_path_text(path: str) -> str:
    """The absolute data path as the directory segment has it, whatever the locale is. Raises
    ShmqError if it is no UTF-8."""
    absolute = os.path.abspath(path)
    try:
        return os.fsencode(absolute).decode()
    except UnicodeDecodeError:
        raise ShmqError(
            f"data path {absolute!a}: its name is not UTF-8; rename it, or give a link to it "
            "(--data-path)"
        ) from None


def _locked(options: Options, name: str, fd: int, made: bool) -> Directory | None:
    """Lock the directory segment open as `fd`. None if it was removed or replaced: try again."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ShmqError(_running(options.instance, fd)) from None
    try:
        if os.lstat(shm.path_of(name)).st_ino != os.fstat(fd).st_ino:
            return None
    except FileNotFoundError:
        return None
    if made:
        try:
            # segments that a former instance of this name left; nobody can be using them
            for item in shm.list_objects(options.instance):
                if item.kind != "directory":
                    item.unlink()
            key = key_file.load_or_make(options.data_path or ".")
            _native.create_directory(fd, key, **options.limits())
        except BaseException:
            shm.unlink_segment(name)
            raise
        return Directory(fd, True)
    is_short, is_leftover = _cut_short(fd), _leftover(fd)
    if is_short:
        _log.error(
            "%s: somebody has cut it short, to %d bytes; writing what its queues hold to disk and "
            "making it again",
            name,
            os.fstat(fd).st_size,
        )
    elif is_leftover:
        _log.warning("%s: its making or its end was cut short; making it again", name)
    if is_short or _is_raw(fd):
        directory_recovery.salvage_all(options)
    if is_short or is_leftover:
        shm.unlink_segment(name)
        return None
    _keep_private(fd, name, options)
    return Directory(fd, False)


def _keep_private(fd: int, name: str, options: Options) -> None:
    """Give an existing segment the permissions that the options ask for now."""
    mode, group = options.permissions()
    before = stat.S_IMODE(os.fstat(fd).st_mode)
    if before & ~mode:
        _log.warning(
            "%s had mode %04o, now %04o: who had it open meanwhile may still write it",
            name,
            before,
            mode,
        )
    shm.set_permissions(fd, shm.path_of(name), mode, group)


def open_queue(options: Options, serial: int) -> int:
    """Open a queue's segment for the supervisor, and give it the permissions that the options ask
    for. Returns a descriptor. Raises FileNotFoundError, NotTrusted if another user owns it."""
    name = shm.queue_name(options.instance, serial)
    fd = shm.open_segment(name, owners=shm.own())
    try:
        _keep_private(fd, name, options)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _head(fd: int, size: int) -> bytes:
    """The first `size` bytes of a segment, padded with zeros if it is shorter."""
    return os.pread(fd, size, 0).ljust(size, b"\0")


def _cut_short(fd: int) -> bool:
    """True if the segment has fewer bytes than it was created with."""
    kind = layout.dtype("segment")
    size = os.fstat(fd).st_size
    if 0 < size < kind.itemsize:  # a file this short may be another program's
        magic = layout.MAGIC.to_bytes(8, "little")
        return magic.startswith(_head(fd, min(size, 8)))
    head = np.frombuffer(_head(fd, kind.itemsize), kind)[0]
    is_ours = int(head["magic"]) == layout.MAGIC and int(head["fingerprint"]) == layout.FINGERPRINT
    return is_ours and int(head["ready"]) == Ready.READY and int(head["size"]) > size


def _is_raw(fd: int) -> bool:
    """True if the segment's head is empty: it was never filled, or its head is lost."""
    kind = layout.dtype("segment")
    head = np.frombuffer(_head(fd, kind.itemsize), kind)[0]
    return int(head["magic"]) == 0 and int(head["ready"]) == Ready.RAW


def _leftover(fd: int) -> bool:
    """True if no client can be using the segment: its creation did not end, or it was closed."""
    kind = layout.dtype("segment")
    head = np.frombuffer(_head(fd, kind.itemsize), kind)[0]
    if int(head["magic"]) not in (0, layout.MAGIC):
        return False
    if int(head["magic"]) == layout.MAGIC and int(head["layout_version"]) != layout.LAYOUT_VERSION:
        return False
    return int(head["ready"]) in (Ready.RAW, Ready.CLOSED)


def _running(instance: str, fd: int) -> str:
    kind = layout.dtype("directory")
    header = np.frombuffer(_head(fd, kind.itemsize), kind)[0]
    pid = int(header["supervisor_pid"])
    holder = ownership.flock_holder(fd)
    if holder != pid and not is_alive(pid, int(header["supervisor_start_time"])):
        # any process that may open the segment can lock it
        path = shm.path_of(shm.directory_name(instance))
        if holder is None or holder <= 0:
            return (
                f"instance {instance!r}: a process that is not to be seen from here (of another "
                f"container?) holds the supervisor's lock on {path}: end it (fuser {path}), then "
                "start again"
            )
        if _user_of(holder) != os.geteuid():
            return (
                f"instance {instance!r}: {ownership.process(holder)} holds a lock (flock) on "
                f"{path} that only its supervisor is to have, and is none: end that process "
                f"(kill {holder}), then start again; to keep such users out, leave out --group or "
                "take them from the group"
            )
        pid = holder
    who = f"pid {pid}" if pid else "just starting"
    return (
        f"instance {instance!r} is already running ({who}): stop that supervisor first, or use "
        "another name (--instance)"
    )


def dead_supervisor(directory: Directory) -> tuple[int, int] | None:
    """(pid, uid) of the supervisor that left an instance by its death; None if there is none, or it
    kept the instance and detached. To be called before this process attaches."""
    kind, client = layout.dtype("directory"), layout.dtype("client")
    header = np.frombuffer(_head(directory.fd, kind.itemsize), kind)[0]
    place = int(header["supervisor_client"]) - 1
    if directory.fresh or not 0 <= place < layout.constant("CLIENTS"):
        return None
    try:
        at = int(header["clients_at"]) + place * client.itemsize
        raw = os.pread(directory.fd, client.itemsize, at).ljust(client.itemsize, b"\0")
    except (OSError, OverflowError):  # the header is damaged
        return None
    entry = np.frombuffer(raw, client)[0]
    is_its = (int(entry["pid"]), int(entry["kind"])) == (
        int(header["supervisor_pid"]),
        ClientKind.SUPERVISOR,
    )
    is_left = int(entry["state"]) == ClientState.LIVE
    return (int(entry["pid"]), int(entry["uid"])) if is_its and is_left else None


def _user_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


# -- which data path


def _recorded(fd: int) -> tuple[str, set[int]]:
    """From the directory segment: its data path, and when this instance's supervisor wrote nsqd.dat
    there. ("", set()) if another release made the segment; attaching then reports that."""
    kind = layout.dtype("directory")
    header = np.frombuffer(_head(fd, kind.itemsize), kind)[0]
    segment = header["segment"]
    made_by = (int(segment["magic"]), int(segment["layout_version"]), int(segment["fingerprint"]))
    if made_by != (layout.MAGIC, layout.LAYOUT_VERSION, layout.FINGERPRINT):
        return "", set()
    path = os.fsdecode(bytes(header["data_path"]).partition(b"\0")[0])
    return path, {int(header["names_written"]), int(header["names_replaced"])} - {0}


def check_data_path(directory: Directory, options: Options) -> None:
    """Refuse to continue an instance in another directory than the one with its files: its queues
    would be split over the two.

    The same directory may have another name. Files that were moved are recognised by nsqd.dat: the
    directory segment has its time of modification (ns). Raises ShmqError.
    """
    recorded, written = _recorded(directory.fd)
    given = os.path.abspath(options.data_path or ".")
    if directory.fresh or not recorded or _is_same(recorded, given):
        return
    has_old, has_new = (_modified(path) in written for path in (recorded, given))
    if has_new and not has_old:
        _log.warning(
            "the files of instance %s were moved from %s to %s; going on there",
            options.instance,
            recorded,
            given,
        )
        return
    import shlex  # for a mistake only

    quoted = shlex.quote(recorded)
    is_there = os.path.isdir(recorded)
    recorded = recorded if recorded.isprintable() else ascii(recorded)
    instead = f"{given}, the current directory," if not options.data_path else given
    if is_there:
        raise ShmqError(
            f"instance {options.instance!r} has its files in {recorded}, so {instead} cannot be "
            f"its data path: give --data-path={quoted}, or move all files from "
            f"there to {given} first"
        )
    raise ShmqError(
        f"instance {options.instance!r} has its files in {recorded}, which is not there any more, "
        f"and {instead} does not have them: mount or restore it, or give the directory that they "
        f"were moved to (--data-path); to go on without what was on disk: mkdir {quoted} && "
        f"{without_files(recorded)}, then --data-path={quoted}"
    )


def without_files(data_path: str) -> str:
    """A command after which a start takes a data path that has lost its files as one that has
    none."""
    import shlex  # for a mistake only

    path = shlex.quote(os.path.join(data_path, metadata.METADATA_NAME))
    return f"""echo '{{"topics":[]}}' > {path}"""


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them does not exist
        return os.path.realpath(one) == os.path.realpath(other)


def _modified(data_path: str) -> int:
    try:
        return metadata.modified(data_path)
    except OSError:
        return 0


# -- a new instance


def recreate(manager: TopicManager, data_path: Path, notifier: Notifier) -> None:
    """Create the topics and channels that nsqd.dat and the files on disk name."""
    remove_temporary(data_path)
    manager.files, manager.chunks = data_files(data_path), deferred.existing(data_path)
    create_missing(manager, data_path, notifier)


def create_missing(manager: TopicManager, data_path: Path, notifier: Notifier) -> None:
    """Create the missing topics and channels that nsqd.dat names or that have files."""
    bases = {*(manager.files or ()), *manager.chunks}
    wanted = _wanted(metadata.load(data_path), bases)
    queues = sum(len(topic.channels) + (topic.name in bases) for topic in wanted)
    _check_counts(data_path, len(wanted), queues)
    progress = Progress("making what was there", queues, notifier)
    for topic_meta in wanted:
        topic = manager.create_topic(topic_meta.name)
        if not topic_meta.channels:  # then no step is counted below
            progress.within(topic_meta.name)
        is_new = not topic.queues
        for channel in topic_meta.channels:
            if channel.name not in topic.queues:
                manager.make(topic, channel.name, channel.paused)
            progress.step()
        if topic.name in bases:
            manager.make(topic, None)
            progress.step()
        if topic_meta.paused and is_new:
            manager.pause(topic)
    manager.files = None


def _check_counts(data_path: Path, topics: int, queues: int) -> None:
    """Raises ShmqError, before any is made, if an instance has no room for so many."""
    for count, what, most in (
        (topics, "topics", layout.constant("TOPICS")),
        (queues, "channels and backlogs", layout.constant("QUEUES")),
    ):
        if count > most:
            raise ShmqError(
                f"nsqd.dat and the files in {data_path} name {count} {what}, and an instance has "
                f"room for {most}: give some of them a data path and an instance of their own"
            )


def data_files(data_path: Path) -> dict[str, list[int]]:
    """The numbers of the data files of every base name that has data or position files."""
    found = existing_files(data_path)
    return {base: files.numbers for base, files in found.items() if files.has_data}


def _wanted(known: list[TopicMeta], bases: Iterable[str]) -> list[TopicMeta]:
    """The topics of nsqd.dat, and those that only have files (created after it was written).

    An ordinary channel of an ephemeral topic may have files too. As with nsqd, it gets them back
    when somebody creates it again.
    """
    paused = {topic.name: topic.paused for topic in known}
    channels = {topic.name: {item.name: item for item in topic.channels} for topic in known}
    for base in sorted(bases):
        name, colon, channel = base.partition(":")
        if is_ephemeral(name) or is_ephemeral(channel):
            continue
        found = channels.setdefault(name, {})
        if colon:
            found.setdefault(channel, ChannelMeta(channel))
    return [
        TopicMeta(name, paused.get(name, False), tuple(found.values()))
        for name, found in channels.items()
    ]
