"""Instances of this host: which there are, and the state and contents of each."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from dataclasses import dataclass
from typing import Any

from shmq import ownership, peek, shm, sources, stats, views
from shmq.diagnostics.segment import is_other_boot
from shmq.errors import Gone, LayoutMismatch, NotReady, NotRunning, ShmqError
from shmq.shm import SharedObject

#: How many instances of users who are not trusted are listed. Anybody may create any number.
MOST_FOREIGN = 100

Objects = dict[str, list[SharedObject]]


def everything() -> tuple[Objects, int]:
    """The objects of all instances that have one, running or not, by name, and how many instances
    of users who are not trusted were left out. An instance with nothing but set-aside segments has
    no object."""
    found, trusted, foreign = shm.objects_by_instance(), ownership.trusted(), 0
    for name in shm.set_aside_instances():
        found.setdefault(name, [])
    for name in list(found):
        if found[name] and not any(item.uid in trusted for item in found[name]):
            foreign += 1
            if foreign > MOST_FOREIGN:
                del found[name]
    return dict(sorted(found.items())), max(foreign - MOST_FOREIGN, 0)


def instance_names() -> list[str]:
    """Names of the instances that `everything` lists."""
    return list(everything()[0])


@dataclass(frozen=True)
class Contents:
    """Queues and messages of an instance."""

    queues: int
    messages: int
    in_memory: int


def contents_of(source: sources.ReadOnlySource) -> Contents:
    """Count messages by the headers of the queues: waiting, in flight, deferred and leased."""
    queues = messages = on_disk = 0
    for _, view in sources.live_queues(source):
        found = stats.read_queue(None, view)
        queues += 1
        messages += found.depth + found.in_flight + found.deferred + found.leased
        on_disk += found.backend_depth + view.read("deferred_depth")
        on_disk += peek.run_length(view.header)
    return Contents(queues, messages, max(messages - on_disk, 0))


def is_of_another_boot(directory: views.DirectoryView) -> bool:
    """Returns true if the instance was made before the last boot, or on another machine."""
    return is_other_boot(tuple(int(word) for word in directory.header["segment"]["boot_id"]))


@dataclass(frozen=True)
class Instance:
    """An instance as it is now. A field is None if it cannot be known from this process."""

    name: str
    state: str
    """running, dead, foreign (runs in another PID namespace), leftover (a creation or removal was
    interrupted), orphaned (its directory is gone), other (another release made it), hidden (another
    user owns it)."""
    uid: int
    pid: int | None
    """PID of the present supervisor, or of the last one."""
    data_path: str | None
    queues: int | None
    messages: int | None
    """Messages in memory and on disk, in any state."""
    in_memory: int | None
    nbytes: int
    """Bytes that its objects take in /dev/shm."""
    objects: int

    @property
    def user(self) -> str:
        """The owner's name, or the uid if it has none."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)


def survey(name: str, found: list[SharedObject] | None = None) -> Instance | None:
    """Look at an instance. None if it has no shared object. found: its objects, if they are
    known."""
    found = shm.list_objects(name, everybodys=True) if found is None else found
    if not found:
        return None
    trusted = ownership.trusted()
    # another user may have taken the directory's name after it was removed
    first = next((item for item in found if item.uid in trusted), found[0])
    found = [item for item in found if item.uid == first.uid]
    uid, nbytes, is_file = found[0].uid, sum(item.nbytes for item in found), False
    with contextlib.suppress(OSError):
        is_file = stat.S_ISREG(os.lstat(found[0].path).st_mode)
    known: dict[str, Any] = dict.fromkeys(("pid", "data_path", "queues", "messages", "in_memory"))
    if found[0].kind != "directory":
        state = "orphaned"
    elif not is_file:
        state = "other"
    else:
        state = _look(name, known)
    return Instance(name=name, state=state, uid=uid, nbytes=nbytes, objects=len(found), **known)


def survey_all() -> tuple[list[Instance], int]:
    """Look at the instances of this host. Returns also how many of users who are not trusted were
    left out."""
    found, more = everything()
    looked = (survey(name, objects) for name, objects in found.items())
    return [item for item in looked if item is not None], more


def _look(name: str, known: dict[str, Any]) -> str:
    """Fill `known` from the instance's directory segment and return the state."""
    try:
        with sources.open_readonly(name) as source:
            directory = source.directory
            contents = contents_of(source)
            known["pid"] = directory.read("supervisor_pid") or None
            known["data_path"] = directory.data_path or None
            known["queues"] = contents.queues
            known["messages"], known["in_memory"] = contents.messages, contents.in_memory
            if is_of_another_boot(directory):
                return "leftover"
            alive = sources.supervisor_alive(directory)
            return "foreign" if directory.is_foreign else "running" if alive else "dead"
    except Gone:
        return "leftover"
    except (NotReady, NotRunning):
        return "leftover"  # its making was cut short, or it was removed just now
    except LayoutMismatch:
        return "other"
    except (ShmqError, OSError):
        return "hidden"
