"""The file of a results store: what is left of it while the broker does not run.

`shmq.results.<name>.dat`, written by a stop and removed by the start that reads it. All numbers are
big-endian.

    head     8 bytes `shmqres1`, u32 max_keys, u64 max_bytes, u32 CRC-32 of these 20 bytes
    record   u32 CRC-32 of what follows in the record, i64 time of expiry (Unix ns; 0: never),
             u32 length of the value, u8 length of the key, key, value
    end      a record with a key of length 0 and a value of 8 bytes: u64 number of records

The file is written under another name and renamed when it is whole, so a death or a full disk
leaves the file that was there before, or none.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from shmq.names import valid_name
from shmq.storage import own_files
from shmq.storage.data_path import bad_name
from shmq.storage.metadata import sync_directory, temporary_of

MAGIC: Final = b"shmqres1"
_HEAD: Final = struct.Struct(">8sIQI")
_RECORD: Final = struct.Struct(">IqIB")
_CRC: Final = 4
_NAME = re.compile(r"shmq\.results\.(?P<name>.+)\.dat")

#: (key, value, time of expiry in Unix ns or 0)
Record = tuple[bytes, bytes, int]


class DamagedResults(Exception):
    """The file is damaged from here on; the records before are intact. The text says where."""


@dataclass(frozen=True)
class ResultsFile:
    """The file of one store."""

    data_path: Path
    name: str

    @property
    def path(self) -> Path:
        """Its path."""
        return self.data_path / f"shmq.results.{self.name}.dat"

    def write(self, max_keys: int, max_bytes: int, records: Iterable[Record], mode: int) -> int:
        """Write the file, in place of the one that is there. Returns the number of records. Raises
        OSError with its name; the file that was there is then untouched."""
        temporary = temporary_of(self.path)
        try:
            fd = own_files.make_file(temporary, mode)
            with open(fd, "wb", buffering=1 << 20) as file:
                count = _write(file, max_keys, max_bytes, records)
                file.flush()
                os.fsync(fd)
            os.rename(temporary, self.path)
            sync_directory(self.data_path)
        except BaseException as exc:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if isinstance(exc, OSError):
                exc.filename = str(self.path)
            raise
        return count

    def read(self) -> tuple[int, int, Iterator[Record]]:
        """(max_keys, max_bytes, records). Raises OSError and DamagedResults; the iterator too,
        after the records before the damage."""
        fd = own_files.open_file(self.path, os.O_RDONLY)
        file = open(fd, "rb", buffering=1 << 20)
        try:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or head[:8] != MAGIC:
                raise DamagedResults(f"{self.path} does not begin as a results file")
            _, max_keys, max_bytes, crc = _HEAD.unpack(head)
            if crc != zlib.crc32(head[:-_CRC]):
                raise DamagedResults(f"{self.path}: its head has a wrong checksum")
        except BaseException:
            file.close()
            raise
        return max_keys, max_bytes, self._records(file, max_bytes)

    def _records(self, file: BinaryIO, max_bytes: int) -> Iterator[Record]:
        count = 0
        with file:
            while True:
                at = file.tell()
                head = file.read(_RECORD.size)
                if len(head) < _RECORD.size:
                    raise DamagedResults(f"{self.path} ends at {at + len(head)}, in a record")
                crc, expires, length, key_length = _RECORD.unpack(head)
                size = os.fstat(file.fileno()).st_size
                if length > max_bytes and key_length:
                    raise DamagedResults(
                        f"{self.path}: the record at {at} is larger than the store"
                    )
                if key_length + length > size - at - _RECORD.size:
                    raise DamagedResults(f"{self.path}: the record at {at} is longer than the file")
                rest = file.read(key_length + length)
                if crc != zlib.crc32(rest, zlib.crc32(head[_CRC:])):
                    raise DamagedResults(f"{self.path}: the record at {at} has a wrong checksum")
                if not key_length:
                    break
                count += 1
                yield rest[:key_length], rest[key_length:], expires
        if rest != count.to_bytes(8, "big"):
            raise DamagedResults(f"{self.path} has {count} records, and says another number")

    def remove(self) -> None:
        """Delete the file if it is there. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def set_aside(self) -> Path:
        """Rename the damaged file, for people to examine. Returns its new path. Raises OSError."""
        bad = bad_name(self.path)
        os.rename(self.path, bad)
        return bad


def _write(file: BinaryIO, max_keys: int, max_bytes: int, records: Iterable[Record]) -> int:
    head = _HEAD.pack(MAGIC, max_keys, max_bytes, 0)[:-_CRC]
    file.write(head + zlib.crc32(head).to_bytes(_CRC, "big"))
    count = 0
    for key, value, expires in records:
        _write_record(file, key, value, expires)
        count += 1
    _write_record(file, b"", count.to_bytes(8, "big"), 0)
    return count


def _write_record(file: BinaryIO, key: bytes, value: bytes, expires: int) -> None:
    head = _RECORD.pack(0, expires, len(value), len(key))[_CRC:]
    crc = zlib.crc32(value, zlib.crc32(key, zlib.crc32(head)))
    file.write(crc.to_bytes(_CRC, "big") + head + key)
    file.write(value)


def existing(data_path: Path) -> list[ResultsFile]:
    """The files of all stores in the directory, by name. Raises OSError."""
    names = (_NAME.fullmatch(name) for name in os.listdir(data_path))
    found = sorted(match["name"] for match in names if match and valid_name(match["name"]))
    return [ResultsFile(data_path, name) for name in found]
