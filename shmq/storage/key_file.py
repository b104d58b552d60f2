"""The key of the seals in the data path: `shmq.key`, 32 random bytes.

Messages of pools and queues that are on disk carry a tag made with it, so that what somebody else
put into the data path is never unpickled. The file is made once, before anything is sealed, and
stays: the tasks of durable pools outlive every process. It is complete on disk before it has its
name, so a death or a power cut leaves the whole file or none; one that is short was damaged.

Only the supervisor reads it. Other processes find the key in the directory segment.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import stat
from pathlib import Path
from typing import Final

from shmq.ownership import open_regular, user
from shmq.storage import StorageError, own_files
from shmq.storage.metadata import atomic_write

#: The file's name in the data path.
NAME: Final = "shmq.key"
#: Bytes of a key.
BYTES: Final = 32

_AFTERWARDS: Final = (
    "the next start makes a new key, and tasks and items that are on disk by then become dead "
    "letters"
)

_log = logging.getLogger(__name__)


def load(data_path: Path | str) -> bytes | None:
    """The key of a data path; None if it has none yet. Raises StorageError, with a remedy, if the
    file is not a whole one that this user made and nobody else may read or write."""
    path = Path(data_path) / NAME
    try:
        fd = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if isinstance(exc, PermissionError):
            why = own_files.not_permitted(path)
        elif why := own_files.no_file(os.lstat(path), str(path)):
            why += f"; {_AFTERWARDS}"
        sentence = f"the key of the seals cannot be read: {why or exc.strerror}"
        raise StorageError(exc.errno or errno.EIO, sentence, str(path)) from exc
    with open(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        _check(status, path)
        key = file.read(BYTES + 1) or b""
    if len(key) != BYTES or not any(key):
        sentence = (
            f"the key of the seals has {status.st_size} bytes, or zeros, instead of {BYTES} random "
            f"ones, so it was damaged: restore it, or remove it (rm {_quoted(path)})"
        )
        raise _refused(errno.EINVAL, sentence, path)
    return key


def load_or_make(data_path: Path | str) -> bytes:
    """The key of a data path, which is made if there is none. Raises as `load`, and OSError."""
    key = load(data_path)
    if key is None:
        key = os.urandom(BYTES)
        atomic_write(Path(data_path) / NAME, key)
    return key


def keep(data_path: Path | str, key: bytes) -> None:
    """Have the data path hold the key of an instance whose memory is taken over. Raises OSError,
    and as `load`."""
    found = load(data_path)
    if found == key:
        return
    if found is not None:
        _log.warning(
            "%s has another key than the memory that is taken over, and is replaced: tasks and "
            "items on disk that were sealed with it become dead letters",
            Path(data_path) / NAME,
        )
    atomic_write(Path(data_path) / NAME, key)


def _check(status: os.stat_result, path: Path) -> None:
    quoted, sentence = _quoted(path), ""
    if status.st_uid != os.geteuid():
        sentence = f"belongs to {user(status.st_uid)}: have it removed (rm {quoted})"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        sentence = (
            f"has mode {mode:04o}, so others may know it: remove it (rm {quoted}), or if nobody "
            f"has read or changed it, chmod 600 {quoted}"
        )
    elif status.st_nlink > 1:
        sentence = f"has a second name (a hard link), so others may change it: rm {quoted}"
    if sentence:
        raise _refused(errno.EACCES, f"the key of the seals {sentence}", path)


def _refused(number: int, sentence: str, path: Path) -> StorageError:
    return StorageError(number, f"{sentence}; {_AFTERWARDS}", str(path))


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
