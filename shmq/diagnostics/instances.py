"""Instances of this host: which there are, and the state and contents of each."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shmq import peek, shm, sources, stats, views
from shmq._native import NotReady
from shmq.diagnostics.segment import is_other_boot
from shmq.errors import Gone, LayoutMismatch, NotRunning, ShmqError
from shmq.names import valid_instance


def instance_names() -> list[str]:
    """Names of all instances that have a shared object, running or not."""
    found = set()
    for file in os.listdir(shm.SHM_DIRECTORY):
        match = re.fullmatch(r"(?:sem\.)?shmq\.(.+)", file)
        if match is not None:
            name = match[1]
            if file.startswith("sem."):
                name = name.removesuffix(".attach") if name.endswith(".attach") else ""
            else:
                name = re.sub(r"(\.[0-9]+(\.bad)?|:history)\Z", "", name)
            if name and valid_instance(name):
                found.add(name)
    return sorted(found)


def owners(names: Iterable[str]) -> Iterator[int]:
    """The uids that own these instances."""
    for name in names:
        for item in shm.list_objects(name, everybodys=True)[:1]:
            yield item.uid


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


def survey(name: str) -> Instance | None:
    """Look at an instance. None if it has no shared object."""
    found = shm.list_objects(name, everybodys=True)
    if not found:
        return None
    found = [item for item in found if item.uid == found[0].uid]
    uid, nbytes, is_file = os.getuid(), 0, False
    for number, item in enumerate(found):
        with contextlib.suppress(OSError):
            status = os.lstat(item.path)
            nbytes += status.st_blocks * 512
            if number == 0:
                uid, is_file = status.st_uid, stat.S_ISREG(status.st_mode)
    known: dict[str, Any] = dict.fromkeys(("pid", "data_path", "queues", "messages", "in_memory"))
    if found[0].kind != "directory":
        state = "orphaned"
    elif not is_file:
        state = "other"
    else:
        state = _look(name, known)
    return Instance(name=name, state=state, uid=uid, nbytes=nbytes, objects=len(found), **known)


def survey_all() -> list[Instance]:
    """Look at all instances of this host."""
    return [item for item in map(survey, instance_names()) if item is not None]


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
