"""The names of go-diskqueue's files in a data path, for all queues together.

    <base>.diskqueue.000000.dat ...   records
    <base>.diskqueue.meta.dat         the position file
    <base>.diskqueue.removed.dat      the deletion of these files has begun (shmq's own)
    <base>.diskqueue.000000.dat.bad   set aside after damage

`<base>` is `<topic>` for a topic's backlog and `<topic>:<channel>` for a channel.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shmq.storage.metadata import valid_name
from shmq.storage.own_files import TEMPORARY

_DATA_NAME = re.compile(r"(?P<base>.+)\.diskqueue\.(?P<file>\d{6,})\.dat(?P<bad>\.bad(?:\.\d+)?)?")
_META_NAME = re.compile(r"(?P<base>.+)\.diskqueue\.meta\.dat")
_MARK_NAME = re.compile(r"(?P<base>.+)\.diskqueue\.removed\.dat")
_MOST_NUMBER = (1 << 63) - 1  # of nsqd's files; see `diskqueue_recovery` for those above LAST_FILE


@dataclass(slots=True)
class QueueFiles:
    """The files of one base name in a data path."""

    numbers: list[int]  # of the .dat files, rising
    bad: list[str]  # names of .bad files: evidence, no queue by themselves
    meta: bool = False

    @property
    def has_data(self) -> bool:
        """True if there is a queue to open, and not only .bad files."""
        return self.meta or bool(self.numbers)


def existing_files(data_path: Path | str) -> dict[str, QueueFiles]:
    """The files of every base name (`<topic>` or `<topic>:<channel>`) in the directory.

    This is one pass over the directory for all queues: pass `numbers` to `recover_positions`. Files
    with other names than nsqd's are ignored. Raises OSError if the directory cannot be read.
    """
    found: dict[str, QueueFiles] = {}
    for name in os.listdir(data_path):
        data, meta = _DATA_NAME.fullmatch(name), _META_NAME.fullmatch(name)
        match = data or meta
        if match is None or not valid_base(match["base"]):
            continue
        files = found.setdefault(match["base"], QueueFiles([], []))
        if data is None:
            files.meta = True
        elif data["bad"]:
            files.bad.append(name)
        elif (number := _number(data)) is not None:
            files.numbers.append(number)
    for files in found.values():
        files.numbers.sort()
        files.bad.sort()
    return found


def _number(match: re.Match[str]) -> int | None:
    """The number in a data file's name; None if no queue would give a file this name."""
    number = int(match["file"])
    return number if number <= _MOST_NUMBER and match["file"] == f"{number:06d}" else None


def remove_temporary(data_path: Path | str) -> int:
    """Delete temporary files (`*.<random>.tmp`) that a crash left, and the marks of deletions
    that have nothing more to delete. Returns their number.

    The caller holds the data path's lock. Raises OSError.
    """
    found = os.listdir(data_path)
    names = [name for name in found if TEMPORARY.fullmatch(name)]
    marks = {match["base"]: name for name in found if (match := _MARK_NAME.fullmatch(name))}
    if marks:
        there = {match["base"] for name in found if (match := _DATA_NAME.fullmatch(name))}
        names += [name for base, name in marks.items() if base not in there]
    for name in names:
        os.unlink(os.path.join(data_path, name))
    return len(names)


def valid_base(base: str) -> bool:
    """True if `base` is `<topic>` or `<topic>:<channel>` with valid names."""
    topic, colon, channel = base.partition(":")
    return valid_name(topic) and (not colon or valid_name(channel))


def data_file_number(name: str, base: str) -> int | None:
    """The number of a data file of `base`; None if the name is not one of its data files."""
    match = _DATA_NAME.fullmatch(name)
    if match is None or match["base"] != base or match["bad"]:
        return None
    return _number(match)


def bad_name(path: Path) -> Path:
    """The name under which a file is set aside: `<name>.bad`, or `.bad.1` and so on if there is
    one."""
    bad, attempt = path.with_name(path.name + ".bad"), 0
    while bad.exists():
        attempt += 1
        bad = path.with_name(f"{path.name}.bad.{attempt}")
    return bad
