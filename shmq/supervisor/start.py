"""How a supervisor comes into its instance: makes the directory, or adopts what another left.

Two locks keep it the only one: nsqd's flock on the data path, and a flock on the directory segment
itself, which ends with its holder, whatever ends that. What is there decides:

    nothing                          make it, then topics and channels from nsqd.dat and the files
    raw, or closed                   a death while making or unlinking: remove it, make it
    cut short (`truncate`)           write what its queues hold to disk, remove it, make it
    ready, its supervisor dead       adopt: same segments, clients go on
    ready, its supervisor alive      refuse
    another layout or build          refuse, name both, leave everything where it is
    another user's, or no segment    refuse, name its owner, leave everything where it is

A member of the instance's group may cut a segment short while it is mapped. The kernel ends who
touches what is gone with SIGBUS, and nothing in Python can catch that: then this supervisor's end
is said by faulthandler and by whoever started it, and the next start does the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shlex
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shmq import _native, layout, ownership, segments
from shmq._native import Broker, Busy, Gone, LayoutMismatch, ShmqError
from shmq.layout import DirectoryView, EntryState, QueueEntry, Ready
from shmq.names import base_name, is_ephemeral
from shmq.options import Options
from shmq.ownership import NotTrusted
from shmq.storage import deferred, diskqueue, metadata
from shmq.storage.metadata import ChannelMeta, TopicMeta
from shmq.supervisor import damage, rescue
from shmq.supervisor.creator import Creator
from shmq.supervisor.process import is_alive
from shmq.supervisor.progress import Progress
from shmq.supervisor.roster import Queue, Roster, Topic
from shmq.supervisor.systemd import Notifier

_TRIES = 100  # other starts and stops may come between our looking and our locking

_log = logging.getLogger(__name__)


@dataclass
class Directory:
    """The directory segment, locked for this process as long as `fd` is open."""

    fd: int
    fresh: bool

    def close(self) -> None:
        """Give the lock back."""
        os.close(self.fd)


def enter(options: Options) -> Directory:
    """Make or lock the directory segment; fresh: it is new and empty of topics.

    Raises ShmqError if another supervisor has it or another user has one of its names,
    LayoutMismatch, Full if /dev/shm is.
    """
    name = segments.directory_name(options.instance)
    mode, group = options.permissions()
    segments.Permits.check_name(options.instance)
    for _ in range(_TRIES):
        try:
            fd, made = segments.create_segment(name, mode, group), True
        except FileExistsError:
            try:
                fd, made = segments.open_segment(name, owners=segments.own()), False
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


def _locked(options: Options, name: str, fd: int, made: bool) -> Directory | None:
    """The directory behind `fd`; None: look again, it was not what the name stands for now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ShmqError(_running(options.instance, fd)) from None
    try:
        if os.lstat(segments.path_of(name)).st_ino != os.fstat(fd).st_ino:
            return None
    except FileNotFoundError:
        return None
    if made:
        try:
            # what a former instance of this name may have left; nobody can have it in use
            for item in segments.list_objects(options.instance):
                if item.kind != "directory":
                    item.unlink()
            _native.create_directory(fd, **options.limits())
        except BaseException:
            segments.unlink_segment(name)
            raise
        return Directory(fd, True)
    is_short, is_leftover = _cut_short(fd), _leftover(fd)
    if is_short:
        _log.error(
            "%s: somebody has cut it short, to %d bytes; writing what its queues hold to disk and "
            "making it anew", name, os.fstat(fd).st_size,
        )  # fmt: skip
    elif is_leftover:
        _log.warning("%s: its making or its end was cut short; making it anew", name)
    if is_short or _is_raw(fd):
        rescue.rescue_all(options)
    if is_short or is_leftover:
        segments.unlink_segment(name)
        return None
    _keep_private(fd, name, options)
    return Directory(fd, False)


def _keep_private(fd: int, name: str, options: Options) -> None:
    """Give a segment that is taken up the permissions that the options ask for now."""
    mode, group = options.permissions()
    before = stat.S_IMODE(os.fstat(fd).st_mode)
    if before & ~mode:
        _log.warning(
            "%s had mode %04o, now %04o: who had it open meanwhile may still write it",
            name, before, mode,
        )  # fmt: skip
    segments.set_permissions(fd, segments.path_of(name), mode, group)


def open_queue(options: Options, serial: int) -> int:
    """A descriptor of a queue's segment, for the supervisor: its own only, with the permissions
    that the options ask for. FileNotFoundError, NotTrusted."""
    name = segments.queue_name(options.instance, serial)
    fd = segments.open_segment(name, owners=segments.own())
    try:
        _keep_private(fd, name, options)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _head(fd: int, size: int) -> bytes:
    """The first bytes behind `fd`, zeros where it is shorter."""
    return os.pread(fd, size, 0).ljust(size, b"\0")


def _cut_short(fd: int) -> bool:
    """Whether it has fewer bytes than it was made with."""
    kind = layout.dtype("segment")
    size = os.fstat(fd).st_size
    if 0 < size < kind.itemsize:  # anything so short may be of another program
        magic = layout.MAGIC.to_bytes(8, "little")
        return magic.startswith(_head(fd, min(size, 8)))
    head = np.frombuffer(_head(fd, kind.itemsize), kind)[0]
    is_ours = int(head["magic"]) == layout.MAGIC and int(head["fingerprint"]) == layout.FINGERPRINT
    return is_ours and int(head["ready"]) == Ready.READY and int(head["size"]) > size


def _is_raw(fd: int) -> bool:
    """Whether nothing says that it was ever made: it may also be what is left of one."""
    kind = layout.dtype("segment")
    head = np.frombuffer(_head(fd, kind.itemsize), kind)[0]
    return int(head["magic"]) == 0 and int(head["ready"]) == Ready.RAW


def _leftover(fd: int) -> bool:
    """Whether no client can be using it: not made to the end, or closed."""
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
        path = segments.path_of(segments.directory_name(instance))
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


def _user_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


# -- which data path


def _recorded(fd: int) -> tuple[str, set[int]]:
    """The data path in the directory segment behind `fd`, and when this instance's supervisor wrote
    nsqd.dat there; ("", {}) if another release made it, which is for others to say."""
    kind = layout.dtype("directory")
    header = np.frombuffer(_head(fd, kind.itemsize), kind)[0]
    segment = header["segment"]
    made_by = (int(segment["magic"]), int(segment["layout_version"]), int(segment["fingerprint"]))
    if made_by != (layout.MAGIC, layout.LAYOUT_VERSION, layout.FINGERPRINT):
        return "", set()
    path = os.fsdecode(bytes(header["data_path"]).partition(b"\0")[0])
    return path, {int(header["names_written"]), int(header["names_replaced"])} - {0}


def check_data_path(directory: Directory, options: Options) -> None:
    """Refuse to go on with an instance in another directory than its files are in: its queues would
    be split over the two.

    The same directory may have another name. Files that were moved are known by nsqd.dat, whose
    time of modification, in ns, the directory segment has.
    Raises ShmqError.
    """
    recorded, written = _recorded(directory.fd)
    given = os.path.abspath(options.data_path or ".")
    if directory.fresh or not recorded or _is_same(recorded, given):
        return
    has_old, has_new = (_modified(path) in written for path in (recorded, given))
    if has_new and not has_old:
        _log.warning("the files of instance %s were moved from %s to %s; going on there",
                     options.instance, recorded, given)  # fmt: skip
        return
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
        "were moved to (--data-path); to go on without what was on disk: mkdir "
        f"{quoted}, then --data-path={quoted}"
    )


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return os.path.realpath(one) == os.path.realpath(other)


def _modified(data_path: str) -> int:
    try:
        return metadata.modified(data_path)
    except OSError:
        return 0


# -- a new instance


def recreate(creator: Creator, data_path: Path, notifier: Notifier) -> None:
    """Topics and channels as nsqd.dat and the files on disk have them."""
    diskqueue.remove_temporary(data_path)
    creator.files, creator.chunks = _data_files(data_path), deferred.existing(data_path)
    _make_missing(creator, data_path, notifier)


def _make_missing(creator: Creator, data_path: Path, notifier: Notifier) -> None:
    """Whatever nsqd.dat names, or has files that no queue has taken up."""
    bases = {*(creator.files or ()), *creator.chunks}
    wanted = _wanted(metadata.load(data_path), bases)
    queues = sum(len(topic.channels) + (topic.name in bases) for topic in wanted)
    progress = Progress("making what was there", queues, notifier)
    for topic_meta in wanted:
        topic = creator.create_topic(topic_meta.name)
        is_new = not topic.queues
        for channel in topic_meta.channels:
            if channel.name not in topic.queues:
                creator.make(topic, channel.name, channel.paused)
            progress.step()
        if topic.name in bases:
            creator.make(topic, None)
            progress.step()
        if topic_meta.paused and is_new:
            creator.pause(topic)
    creator.files = None


def _data_files(data_path: Path) -> dict[str, list[int]]:
    """By base name, the numbers of the data files of whatever has any file."""
    found = diskqueue.existing(data_path)
    return {base: files.numbers for base, files in found.items() if files.has_data}


def _wanted(known: list[TopicMeta], bases: Iterable[str]) -> list[TopicMeta]:
    """nsqd.dat's topics, and those that only have files (it was written before they were made).

    An ordinary channel of an ephemeral topic may have files, too; as with nsqd it finds them when
    somebody makes it again.
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
    return [TopicMeta(name, paused.get(name, False), tuple(found.values()))
            for name, found in channels.items()]  # fmt: skip


# -- one that was left


def adopt(
    broker: Broker, roster: Roster, creator: Creator, options: Options, notifier: Notifier
) -> None:
    """Take up what a dead supervisor left: its topics and queues, resolved and rebuilt.

    If another broker (nsqd, or a shmq of another name) has had the data path since, what is in
    memory stays, and files are read on as that one left them: what it wrote is nobody else's, and
    where this instance was in them says nothing any more. Messages may come twice by that.

    Raises OSError if files cannot be opened; clients then go on with what is in memory.
    """
    directory, data_path = roster.directory, Path(options.data_path or ".")
    lost = rescue.mend_names(broker, directory, options)
    rescued = rescue.drop(broker, directory, options, lost)
    creator.chunks, files = deferred.existing(data_path), _data_files(data_path)
    had_another = _had_another(directory, data_path)
    if had_another:
        if metadata.modified(data_path):
            what = "another broker has used %s since: going on with the files it left; messages "
            what += "may be delivered twice"
        else:
            what = "%s has no nsqd.dat any more (was it emptied, or is its file system not "
            what += "mounted?): going on with what is in memory and the files that are there"
        _log.warning(what, data_path)
        creator.files = files
    topics = {}
    for entry in directory.live_topics():
        topics[entry.index] = roster.enter_topic(entry.index, entry.generation, entry.name)
    live, queues, wrecks = directory.live_queues(), [], []
    progress = Progress("adopting", len(live), notifier)
    for queue_entry in live:
        if queue_entry.topic not in topics:
            _log.error("queue %d belongs to no topic; left alone", queue_entry.serial)
        elif _can_be_used(broker, queue_entry):
            queues.append(queue_entry)
        else:
            wrecks.append(queue_entry)
    # all that cannot be used are out of the way first: the repair of a topic maps all of its queues
    for queue_entry in wrecks:
        _replace(broker, creator, topics[queue_entry.topic], queue_entry)
        progress.step()
    for queue_entry in queues:
        topic = topics[queue_entry.topic]
        try:
            broker.adopt(queue_entry.index)
            with contextlib.suppress(Busy):  # what a predecessor died giving back
                broker.give_back(queue_entry.index)
            base = base_name(topic.name, queue_entry.channel)
            queue = roster.enter_queue(
                queue_entry.index,
                queue_entry.serial,
                topic,
                queue_entry.channel,
                roster.disk_queue(base),
                roster.sidecar(base),
            )
        except (Gone, LayoutMismatch) as exc:
            _log.error("%s: %s", base_name(topic.name, queue_entry.channel), exc)
            _replace(broker, creator, topic, queue_entry)
            continue
        if had_another:
            _adopt_anothers_files(broker, queue, creator)
        else:
            _adopt_files(broker, roster, queue, creator, files)
        progress.step()
    if had_another:
        _make_missing(creator, data_path, notifier)
    elif lost:
        rescue.restore(creator, roster, data_path, rescued)
    _finish_deletions(broker, directory, options)
    _sweep(directory, options.instance)
    _log.info("adopted %d topics, %d queues", len(roster.topics), len(roster.queues))


def _can_be_used(broker: Broker, entry: QueueEntry) -> bool:
    """Whether its segment is there and its header one of ours."""
    try:
        broker.view(entry.index)
    except (Gone, LayoutMismatch, NotTrusted) as exc:
        _log.error("queue %d: %s", entry.serial, exc)
        return False
    return True


def _replace(broker: Broker, creator: Creator, topic: Topic, entry: QueueEntry) -> None:
    """Another queue in the place of one that cannot be used (or whose segment was removed by hand),
    with what is in its files, and what is intact in its segment."""
    paused = creator.salvage(topic, entry.channel, entry.serial)
    broker.remove_queue(entry.index, entry.serial, closed=True)
    creator.make(topic, entry.channel, paused)


def _had_another(directory: DirectoryView, data_path: Path) -> bool:
    """Whether nsqd.dat is not as this instance's supervisor wrote it; each start writes it anew."""
    ours = directory.read("names_written"), directory.read("names_replaced")
    return metadata.modified(data_path) not in ours


def _adopt_anothers_files(broker: Broker, queue: Queue, creator: Creator) -> None:
    """Whatever has the queue's name now is its."""
    if queue.view.read("base_pending"):
        broker.renamed(queue.index, queue.disk.base)
    queue.sidecar.take_up(creator.chunks.pop(queue.disk.base, []))
    found = creator.positions(queue.disk)
    broker.disk_adopt(
        queue.index, found.read_position, found.write_position, found.depth, queue.sidecar.highest
    )
    broker.chunk_depth(queue.index, queue.sidecar.depth)
    queue.seen_read = found.read_position


def _adopt_files(
    broker: Broker, roster: Roster, queue: Queue, creator: Creator, files: dict[str, list[int]]
) -> None:
    base, topic = queue.disk.base, queue.topic.name
    pending = bool(queue.view.read("base_pending"))
    chunks, numbers = creator.chunks.pop(base, []), files.get(base, [])
    if pending:
        queue.disk = roster.disk_queue(topic)
        queue.sidecar = roster.sidecar(topic)
        chunks += creator.chunks.pop(topic, [])
        numbers = [*numbers, *files.get(topic, [])]
    damage.take_up_chunks(broker, queue, chunks)
    broker.chunk_depth(queue.index, queue.sidecar.depth)
    if pending:
        creator.rename(queue)
    damage.mend_positions(broker, queue)
    read, write = queue.positions
    queue.disk.cut(write)
    if read == write:
        return
    depth = queue.disk.recount(read, write, _native.scan_records, sorted(numbers))
    if depth != queue.view.read("disk_depth"):
        broker.disk_set(queue.index, read, read, depth)


def _finish_deletions(broker: Broker, directory: DirectoryView, options: Options) -> None:
    """Queues whose removal was cut short."""
    table = directory.queues
    for index in np.flatnonzero(table["state"] == EntryState.DELETING).tolist():
        serial = int(table[index]["serial"])
        try:
            try:
                broker.remove_queue(index, serial)
            except (Gone, LayoutMismatch):  # its segment is closed or gone already
                broker.remove_queue(index, serial, closed=True)
        except ShmqError as exc:
            _log.error("queue %d: cannot finish its removal: %s", serial, exc)
        segments.unlink_queue(options.instance, serial)


def _sweep(directory: DirectoryView, instance: str) -> None:
    """Remove queue segments that no entry names: a death between making and entering them."""
    entered = {entry.serial for entry in directory.live_queues()}
    for item in segments.list_objects(instance):
        if item.kind == "queue" and item.serial not in entered and item.unlink():
            _log.info("%s: in no directory; removed", item.name)
