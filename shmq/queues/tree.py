"""One broker for a tree of processes, which queues and executors without a broker of their own use.

The process that asks first is the root: it starts an embedded broker, with everything in shared
memory and nothing on a disk. Its children find the broker by `multiprocessing`, however they were
started, and forked children by inheritance. The broker ends with the root: in order, after
`multiprocessing` has joined the children, or within a second of the root's death. Nothing stays in
shared memory then, and calls of children that live on raise `Gone`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import multiprocessing
import os
import re
import resource
import secrets
import threading
from multiprocessing import util
from pathlib import Path
from typing import Any, Final

from shmq import shm, sources
from shmq.broker import Broker, attach
from shmq.errors import Gone, NotRunning, ShmqError
from shmq.keywords import Keywords
from shmq.procfs import Process

#: The key of the instance's name in the settings that `multiprocessing` hands to each child.
_KEY: Final = "shmq"
_NAME: Final = re.compile(r"tree-(\d+)-[0-9a-f]{8}")

#: Most items of one queue, and bytes of their bodies. Memory is taken as it is needed.
_ITEMS: Final = 1 << 20
_HELD: Final = 1 << 18
_BYTES: Final = 16 << 30
_LARGEST: Final = (1 << 31) - 64

#: The parts of a limited address space that the arena takes, a queue, and a results store's keys,
#: or its values.
_ARENA_SHARE: Final = 8
_QUEUE_SHARE: Final = 64
STORE_SHARE: Final = 256
_LEAST: Final = 1 << 24  # bytes of a mapping, however little there is
_ROUND: Final = 1 << 12
_PER_ITEM: Final = 700  # bytes of a queue, without bodies

_MADV_POPULATE_WRITE: Final = 23  # include/uapi/asm-generic/mman-common.h
#: Finalizers below 0 run after `multiprocessing` has joined the children.
_AFTER_CHILDREN: Final = -100

_lock = threading.Lock()
_broker: Broker | None = None
_user = -1  # whose that one is


def broker() -> Broker:
    """The broker of this process's tree, which is started if there is none. Raises ShmqError if it
    does not start. A process that has become another user's since starts one of its own; queues
    that it has made before stay with the first."""
    global _broker, _user
    if _broker is None or _user != os.geteuid() or has_ended(_broker):
        with _lock:
            if _broker is None or _user != os.geteuid() or has_ended(_broker):
                _broker = _joined() or _started()
                _user = os.geteuid()
    return _broker


def has_ended(broker: Broker) -> bool:
    """Returns True if the broker was closed or stopped, also in a forked child that has not
    attached yet."""
    try:
        return broker.ended
    except NotRunning:
        return True


def _config() -> dict[str, Any]:
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config


def _joined() -> Broker | None:
    """The broker of the tree that this process was started in, if it still runs and this process
    has not become another user's."""
    instance = _config().get(_KEY)
    if instance is not None and _is_own(instance):
        with contextlib.suppress(NotRunning, Gone):
            return attach(instance)
    return None


def _is_own(instance: str) -> bool:
    try:
        return os.lstat(shm.path_of(shm.directory_name(instance))).st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _started() -> Broker:
    _sweep()
    instance = f"tree-{os.getpid()}-{secrets.token_hex(4)}"
    made = Broker.owned(instance, **_sizes())
    _config()[_KEY] = instance
    util.Finalize(None, made.close, exitpriority=_AFTER_CHILDREN)
    return made


def _sizes() -> Keywords:
    """Options of the broker: as much as there may ever be, if the kernel gives memory piece by
    piece; otherwise, the defaults."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError as exc:  # older than Linux 5.14
            if exc.errno == errno.EINVAL:
                return {}
    arena, items = within_reach(_BYTES, _ARENA_SHARE), within_reach(_ITEMS, _QUEUE_SHARE, _PER_ITEM)
    return {
        "mem_queue_size": items,
        "in_flight_slots": min(_HELD, items),
        "arena_size": arena,
        # each results store has room for two values of this size
        "max_msg_size": _LARGEST if arena == _BYTES else arena // 8,
    }


def within_reach(most: int, share: int, each: int = 1) -> int:
    """How much a mapping is to hold, of things that have so many bytes each: `most`, or what a
    limit of the address space (`ulimit -v`) leaves for this share of it. A forked child maps
    everything once more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return most
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    found = max(max(limit - used, 0) // share, _LEAST) // each
    return min(most, found - found % _ROUND)


def _sweep() -> None:
    """Remove the memory of trees whose root and supervisor were both killed."""
    for path in Path(shm.SHM_DIRECTORY).glob("shmq.tree-*"):
        found = _NAME.fullmatch(path.name.removeprefix("shmq."))
        if found and Process.look(int(found[1])) is None and not _supervised(found[0]):
            shm.unlink_instance(found[0])


def _supervised(instance: str) -> bool:
    """Returns False only if this user's instance certainly has no supervisor."""
    try:
        with sources.open_readonly(instance) as source:
            return sources.supervisor_alive(source.directory)
    except NotRunning:
        return False
    except ShmqError:
        return True


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held the parent's


os.register_at_fork(after_in_child=_in_child)
