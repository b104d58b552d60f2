"""Diagnosis of a file in a data path: records, positions, deferred messages, metadata.

The checks are stricter than the broker's, and no damage ends them: the report says what is wrong at
which offset, and where whole records follow after it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmq import _native, names
from shmq.diagnostics.findings import Report, Table
from shmq.diagnostics.readable import body_field, moment
from shmq.layout import constant
from shmq.storage import deferred, metadata
from shmq.storage.positions import MAX_OFFSET
from shmq.storage.records import MESSAGE_HEADER, RECORD_OVERHEAD, decode_records

_BLOCK = 8 << 20  # bytes read at once
_SEARCH = 4 << 20  # bytes searched at a time for the next record after a damage
_MOST = 0x7FFFFFFF  # largest value of a length field
_MOST_WHOLE = 256 << 20  # largest size of a file that is read whole

_RECORD = struct.Struct(">iqH16s")
_ID = re.compile(rb"[0-9a-f]{16}")
_META = re.compile(rb"([+-]?\d{1,19})\r?\n(\d{1,19}),(\d{1,19})\r?\n(\d{1,19}),(\d{1,19})\r?\n?")

Progress = Callable[[str], None]
Reader = Callable[[Path, int, int, Progress], Report]
"""Arguments: path, descriptor, rows of long tables, and a function that takes the progress text."""


# ---- records ----


def read_records(path: Path, fd: int, count: int, say: Progress) -> Report:
    """Report on a segment file of a disk queue, also on one that was set aside as `.bad`."""
    report = Report("records of a disk queue")
    size = os.fstat(fd).st_size
    shown = Table(["OFFSET", "ID", "PUBLISHED", "ATTEMPTS", "BYTES", "BODY"])
    walk = _Walk(report, fd, size, count, shown)
    while walk.position < size:
        walk.block()
        say(f"reading {path.name}: {100 * walk.position // max(size, 1)} %")
    report.facts |= {
        "size": size,
        "records": walk.records,
        "body bytes": walk.body_bytes,
        "first published": None if walk.first is None else moment(walk.first),
        "last published": None if walk.last is None else moment(walk.last),
        "attempts": {str(number): times for number, times in sorted(walk.attempts.items())},
    }
    report.tables["records"] = shown
    meta = re.sub(r"\.\d{6,}\.dat(\.bad(\.\d+)?)?\Z", ".meta.dat", path.name)
    if meta != path.name and not (path.parent / meta).exists():
        report.notes.append(f"there is no position file {meta} beside it")
    return report


class _Walk:
    """A pass over the records of a file, one block at a time."""

    def __init__(self, report: Report, fd: int, size: int, count: int, shown: Table) -> None:
        self._report, self._fd, self._size, self._count, self._shown = (
            report,
            fd,
            size,
            count,
            shown,
        )
        self.position = 0
        self.records = self.body_bytes = 0
        self.first: int | None = None
        self.last: int | None = None
        self.attempts: Counter[int] = Counter()

    def block(self) -> None:
        """Read the whole records of the next block. Bytes that are no record are reported and
        skipped."""
        data = os.pread(self._fd, _BLOCK, self.position)
        used = 0
        while used + RECORD_OVERHEAD <= len(data):
            length, timestamp, attempts, name = _RECORD.unpack_from(data, used)
            why = _wrong(length, name, self._size - self.position - used)
            if why:
                self._damage(self.position + used, why)
                return
            end = used + 4 + length
            if end > len(data):
                break
            self._note(used, timestamp, attempts, name, data[used + RECORD_OVERHEAD : end])
            used = end
        self.position += used
        if used:
            return
        if self._size - self.position < RECORD_OVERHEAD:
            rest = self._size - self.position
            self._report.hurt(self.position, f"{rest} bytes at the end are no record")
            self.position = self._size
        elif len(data) < RECORD_OVERHEAD:
            self._report.hurt(self.position, "the disk cannot read it")
            self.position = self._size
        else:
            self._large(data)

    def _large(self, data: bytes) -> None:
        """Read a record that is longer than a block."""
        length, timestamp, attempts, name = _RECORD.unpack_from(data)
        self._note(0, timestamp, attempts, name, data[RECORD_OVERHEAD:])
        self.body_bytes += length - MESSAGE_HEADER - (len(data) - RECORD_OVERHEAD)
        if self._shown.rows and self._shown.rows[-1][0] == self.position:
            self._shown.rows[-1][4] = length - MESSAGE_HEADER
        self.position += 4 + length

    def _note(self, used: int, timestamp: int, attempts: int, name: bytes, data: bytes) -> None:
        _, body = _native.split_body(data)
        self.records += 1
        self.body_bytes += len(body)
        self.first = timestamp if self.first is None else min(self.first, timestamp)
        self.last = timestamp if self.last is None else max(self.last, timestamp)
        self.attempts[attempts] += 1
        if len(self._shown.rows) < self._count:
            self._shown.rows.append(
                [
                    self.position + used,
                    name.decode("ascii"),
                    moment(timestamp),
                    attempts,
                    len(body),
                    body_field(body[: 1 << 16]),
                ]
            )

    def _damage(self, offset: int, why: str) -> None:
        """Report a damage, and move to the next offset at which whole records follow."""
        found = self._next(offset + 1)
        end = self._size if found is None else found
        text = f"{why}; a broker stops reading this file here"
        if found is not None:
            text += f", but there are records again after {end - offset} bytes, at {found}"
        self._report.hurt(offset, text)
        self.position = end

    def _next(self, begin: int) -> int | None:
        """The first offset from `begin` on at which a record begins that is followed by another one
        or by the end of the file; None if there is none."""
        while begin < self._size:
            data = os.pread(self._fd, _SEARCH + RECORD_OVERHEAD, begin)
            for match in _ID.finditer(data):
                for at in range(begin + match.start() - 14, begin + match.start() - 13):
                    if at >= begin and self._whole(at):
                        return at
            if len(data) < _SEARCH:
                return None
            begin += _SEARCH
        return None

    def _whole(self, at: int, follow: bool = True) -> bool:
        raw = os.pread(self._fd, RECORD_OVERHEAD, at)
        if len(raw) < RECORD_OVERHEAD:
            return False
        length, _, _, name = _RECORD.unpack(raw)
        if _wrong(length, name, self._size - at):
            return False
        after = at + 4 + length
        return not follow or after == self._size or self._whole(after, follow=False)


def _wrong(length: int, name: bytes, room: int) -> str:
    """Why these fields are no record's; "" if they are."""
    if length < MESSAGE_HEADER:
        return f"impossible record length {length}"
    if 4 + length > room:
        return f"a record of {4 + length} bytes where {room} are left"
    if not _ID.fullmatch(name):
        return f"the message id {name!r} is not 16 hex digits"
    return ""


# ---- positions ----


def read_meta(path: Path, fd: int, count: int, say: Progress) -> Report:
    """Report on the position file of a disk queue."""
    report = Report("positions of a disk queue")
    text = os.pread(fd, 4096, 0)
    report.facts["size"] = os.fstat(fd).st_size
    match = _META.fullmatch(text)
    if match is None:
        report.hurt(_meta_stops(text), f"not 'depth\\nfile,offset\\nfile,offset\\n': {text[:80]!r}")
        return report
    depth, read_file, read_at, write_file, write_at = map(int, match.groups())
    report.facts |= {
        "depth": depth,
        "read file": read_file,
        "read offset": read_at,
        "write file": write_file,
        "write offset": write_at,
    }
    if depth < 0:
        report.hurt(0, f"depth {depth} is negative")
    for group, number in ((3, read_at), (5, write_at)):
        if number > MAX_OFFSET:
            report.hurt(match.start(group), f"offset {number} is larger than any file may be")
    if (read_file, read_at) > (write_file, write_at):
        report.hurt(match.start(2), "the read position is beyond the write position")
    elif (read_file, read_at) == (write_file, write_at) and depth > 0:
        report.hurt(0, f"depth {depth}, but all was read")
    _beside(report, path, (read_file, read_at), (write_file, write_at))
    return report


def _meta_stops(text: bytes) -> int:
    """The offset up to which the text is a position file's."""
    patterns = (rb"[+-]?\d{1,19}\r?\n", rb"\d{1,19},\d{1,19}\r?\n", rb"\d{1,19},\d{1,19}\r?\n?")
    at = 0
    for pattern in patterns:
        match = re.compile(pattern).match(text, at)
        if match is None:
            return at
        at = match.end()
    return at


def _beside(report: Report, path: Path, read: tuple[int, int], write: tuple[int, int]) -> None:
    """Compare the positions with the segment files in the same folder."""
    base = path.name.removesuffix(".meta.dat")
    if base == path.name or read > write:
        return
    files = Table(["FILE", "SIZE"])
    for file in sorted(path.parent.iterdir()):
        if re.fullmatch(re.escape(base) + r"\.\d{6,}\.dat", file.name):
            files.rows.append([file.name, file.stat().st_size])
    report.tables["files"] = files
    sizes = {row[0]: row[1] for row in files.rows}
    if read == write:
        return
    for number, at, what in ((read[0], read[1], "read"), (write[0], write[1], "write")):
        name = f"{base}.{number:06d}.dat"
        if name not in sizes and at:
            report.hurt(None, f"{name}, which the {what} position names, is missing")
        elif sizes.get(name, 0) < at:
            report.hurt(None, f"{name} has {sizes[name]} bytes, the {what} position is {at}")
    name = f"{base}.{write[0]:06d}.dat"
    if sizes.get(name, 0) > write[1]:
        report.notes.append(
            f"{name} has {sizes[name]} bytes, more than the {write[1]} written: a broker did not "
            "stop cleanly, or runs; at the next start all of it is read"
        )


# ---- deferred messages ----

_CHUNK_NAME = re.compile(r".+\.deferred\.\d{6,}(?:\.(\d+))?\.dat(\.bad(\.\d+)?)?")
_CHUNK_HEADER = len(deferred.encode([])) - 4
_CHUNK_ENTRY = len(deferred.encode([(0, b"")])) - len(deferred.encode([]))


def read_deferred(path: Path, fd: int, count: int, say: Progress) -> Report:
    """Report on a chunk of deferred messages and their due times."""
    report = Report("deferred messages")
    size = report.facts["size"] = os.fstat(fd).st_size
    if size > _MOST_WHOLE:
        report.hurt(_MOST_WHOLE, "too long for a chunk of deferred messages")
        return report
    data = os.pread(fd, size, 0)
    try:
        found = deferred.decode(data)
    except deferred.DamagedChunk as exc:
        report.hurt(0, f"{exc.strerror}; no message of it is intact")
        return report
    match = _CHUNK_NAME.fullmatch(path.name)
    read = int(match[1] or 0) if match else 0
    dues = [entry.due for entry in found.entries]
    report.facts |= {
        "messages": len(dues),
        "first number": None if found.first < 0 else found.first,
        "in memory again": max(min(read - found.first, len(dues)), 0) if found.first >= 0 else None,
        "first due": moment(min(dues), True) if dues else None,
        "last due": moment(max(dues), True) if dues else None,
    }
    table = report.tables["deferred"] = Table(
        ["DUE", "ID", "PUBLISHED", "ATTEMPTS", "BYTES", "BODY"]
    )
    for due, raw in found.entries[:count]:
        for record in decode_records(raw, len(raw)):
            _, body = _native.split_body(record.body)
            table.rows.append(
                [
                    moment(due, True),
                    record.id.decode("ascii", "backslashreplace"),
                    moment(record.timestamp),
                    record.attempts,
                    len(body),
                    body_field(body),
                ]
            )
    if found.wrong:
        lost = f"; {found.lost} messages are lost" if found.lost > 0 else ""
        report.hurt(_chunk_stops(data, found), f"{found.wrong}{lost}")
    late = [now for before, now in itertools.pairwise(dues) if now < before]
    if late:
        report.hurt(None, f"{len(late)} messages are out of the order of due times")
    return report


def _chunk_stops(data: bytes, found: deferred.Contents) -> int:
    """The offset up to which the bytes are those of an intact chunk."""
    if found.first < 0:
        return 0
    at = _CHUNK_HEADER
    for _, record in found.entries:
        begin = at + _CHUNK_ENTRY
        if data[begin : begin + len(record)] != record:
            break
        at = begin + len(record)
    return at


# ---- metadata ----


def read_topics(path: Path, fd: int, count: int, say: Progress) -> Report:
    """Report on `nsqd.dat`."""
    report = Report("topics and channels")
    document = _json(report, fd)
    if document is None:
        return report
    table = report.tables["topics"] = Table(["TOPIC", "CHANNEL", "PAUSED"])
    seen: set[tuple[str, str]] = set()
    report.facts["version"] = str(document.get("version"))
    for topic in _objects(report, document, "topics", ""):
        name = _named(report, topic, "topic", seen, "", table)
        for channel in _objects(report, topic, "channels", f" of topic {name!r}"):
            _named(report, channel, "channel", seen, name, table)
    report.facts["topics"] = sum(not row[1] for row in table.rows)
    report.facts["channels"] = sum(bool(row[1]) for row in table.rows)
    return report


def _objects(report: Report, holder: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    value = holder.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        report.hurt(None, f"{key}{where} is a {type(value).__name__} and not a list")
        return []
    good = [item for item in value if isinstance(item, dict)]
    if len(good) < len(value):
        report.hurt(None, f"{len(value) - len(good)} of {key}{where} are no objects")
    return good


def _named(
    report: Report,
    item: dict[str, Any],
    what: str,
    seen: set[tuple[str, str]],
    topic: str,
    table: Table,
) -> str:
    name, paused = item.get("name"), item.get("paused")
    if not isinstance(name, str) or not names.valid_name(name):
        report.hurt(
            None, f"a {what} is called {name!r}, which is no valid name: a broker ignores it"
        )
        name = str(name)
    pair = (topic, name) if what == "channel" else (name, "")
    if pair in seen:
        report.notes.append(f"{what} {name!r} is there twice")
    seen.add(pair)
    if not isinstance(paused, bool | None):
        report.hurt(None, f"{what} {name!r} has paused {paused!r}")
    table.rows.append([*pair, paused is True])
    return name


def read_reserve(path: Path, fd: int, count: int, say: Progress) -> Report:
    """Report on `shmq.dat`."""
    report = Report("reserve of message ids")
    document = _json(report, fd)
    if document is None:
        return report
    text = os.pread(fd, _MOST_WHOLE, 0)
    try:
        clock = metadata.parse_reserve(path, text)
        report.facts["topics with settings"] = len(metadata.parse_settings(path, text))
    except metadata.MetadataError as exc:
        report.hurt(None, str(exc.strerror))
    else:
        report.facts["id clock"] = clock
        when = constant("EPOCH_NS") + clock * constant("ID_UNIT_NS")
        report.facts["ids given before"] = moment(when)
    return report


def _json(report: Report, fd: int) -> dict[str, Any] | None:
    """The JSON object in the file. If there is none, report a damage and return None."""
    size = report.facts["size"] = os.fstat(fd).st_size
    text = os.pread(fd, _MOST_WHOLE, 0)
    if size > _MOST_WHOLE:
        report.hurt(_MOST_WHOLE, "too long to be metadata")
        return None
    try:
        document = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as exc:
        report.hurt(exc.start, f"not UTF-8: {exc.reason}")
    except json.JSONDecodeError as exc:
        at = len(exc.doc[: exc.pos].encode())
        report.hurt(at, "the file is empty" if not text.strip() else f"not JSON: {exc.msg}")
    except (ValueError, RecursionError) as exc:
        report.hurt(None, f"not JSON that a broker could read: {exc}")
    else:
        if isinstance(document, dict):
            return document
        if document is None:
            return {}  # Go decodes null into an empty struct
        report.hurt(0, f"holds a {type(document).__name__}, not an object")
    return None


# ---- which file is what ----

#: Reader of a file by its name; the first match counts. A new kind of file gets a line here.
READERS: list[tuple[re.Pattern[str], Reader]] = [
    (re.compile(r"nsqd\.dat(\..+)?"), read_topics),
    (re.compile(r"shmq\.(copy\.)?dat(\..+)?"), read_reserve),
    (re.compile(r".+\.diskqueue\.meta\.dat(\..+)?"), read_meta),
    (re.compile(r".+\.diskqueue\.\d+\.dat(\.bad(\.\d+)?)?"), read_records),
    (_CHUNK_NAME, read_deferred),
]


def reader_of(name: str, head: bytes) -> Reader | None:
    """The reader for a file, chosen by its name, or else by its first bytes; None if unknown."""
    for pattern, reader in READERS:
        if pattern.fullmatch(name):
            return reader
    if head.startswith(deferred.MAGIC):
        return read_deferred
    if head.lstrip()[:1] == b"{":
        return read_reserve if b'"id_clock"' in head else read_topics
    if _META.match(head):
        return read_meta
    if len(head) >= RECORD_OVERHEAD and not _wrong(*_first(head)):
        return read_records
    return None


def _first(head: bytes) -> tuple[int, bytes, int]:
    length, _, _, name = _RECORD.unpack_from(head)
    return length, name, _MOST
