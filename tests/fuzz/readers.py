"""Fuzzes one of the readers of what is on disk, guided by coverage (atheris):

    python tests/fuzz/readers.py TARGET [libFuzzer's options and corpus]

Whatever the bytes, a reader answers, or raises the error it is documented to raise; and what it
answers, written again, is read the same. `--planted` weakens the reader in one place, which must be
found.
"""

from __future__ import annotations

import inspect
import logging
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import atheris

from shmq import _native
from shmq.storage import deferred, diskqueue, metadata

MOST = 1000  # max_msg_size
FILE = Path("/somewhere/file.dat")


def meta(data: bytes) -> None:
    found = diskqueue.parse_meta(data)
    if found is None:
        return
    read, write = diskqueue.unpack(found.read_position), diskqueue.unpack(found.write_position)
    text = f"{found.depth}\n{read[0]},{read[1]}\n{write[0]},{write[1]}\n"
    assert diskqueue.parse_meta(text.encode()) == found


def topics(data: bytes) -> None:
    try:
        found = metadata.parse_topics(FILE, data)
    except metadata.MetadataError:
        return
    for topic in found:
        assert metadata.valid_name(topic.name)
        assert all(metadata.valid_name(channel.name) for channel in topic.channels)


def reserve(data: bytes) -> None:
    try:
        assert metadata.parse_reserve(FILE, data) >= 0
    except metadata.MetadataError:
        return


def sidecar(data: bytes) -> None:
    try:
        found = deferred.decode(data)
    except deferred.DamagedChunk:
        _without_crc(data)
        return
    assert len(found.numbers) == len(found.entries)
    assert all(len(entry.record) >= diskqueue.RECORD_OVERHEAD for entry in found.entries)
    found.left(found.first + 1)
    again = deferred.decode(deferred.encode(found.entries, max(found.first, 0)))
    assert (again.entries, again.wrong) == (found.entries, "")


def _without_crc(data: bytes) -> None:
    """CRCs keep a fuzzer out of all that is behind them: give it theirs."""
    if len(data) < 40:
        return
    entry = data[28:-4]
    due, record = entry[:8], entry[12:]
    crc = struct.pack(">I", zlib.crc32(record, zlib.crc32(due)))
    head = deferred.MAGIC + data[16:24]
    body = head + struct.pack(">I", zlib.crc32(head)) + due + crc + record
    try:
        found = deferred.decode(body + struct.pack(">I", zlib.crc32(body)))
    except deferred.DamagedChunk:
        return
    for one in found.entries:
        assert diskqueue.RECORD_OVERHEAD <= len(one.record) <= len(record)


def record(data: bytes) -> None:
    scan = diskqueue.scan_records(data, MOST)
    assert (len(scan.offsets), scan.used, scan.stop == "length") == _native.scan_records(data, MOST)
    found = list(diskqueue.decode_records(data, MOST))
    columns = list(zip(*found, strict=True)) or [(), (), (), ()]
    assert diskqueue.encode_records(*columns) == data[: scan.used]


TARGETS: dict[str, Callable[[bytes], None]] = {
    "meta": meta,
    "metadata": topics,
    "reserve": reserve,
    "sidecar": sidecar,
    "record": record,
}


def plant(name: str) -> None:
    """One check less in the reader."""
    if name in ("metadata", "reserve"):
        real = metadata._nonsense
        metadata._nonsense = lambda path, what: KeyError(real(path, what))  # type: ignore[assignment,return-value]
    elif name == "meta":
        diskqueue.MAX_FILE = 10  # not what pack's callers expect
        diskqueue.pack = lambda file, offset: file * 7 + offset  # type: ignore[assignment]
    elif name == "sidecar":
        deferred._LEAST_ENTRY = 1
    else:
        diskqueue.MESSAGE_HEADER = 20


def main() -> None:
    logging.disable()
    arguments = [word for word in sys.argv if word != "--planted"]
    name = arguments.pop(1)
    if len(arguments) < len(sys.argv) - 1:
        plant(name)
    for module in (deferred, diskqueue, metadata):  # an editable install has an importer of its own
        for _, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__:
                atheris.instrument_func(function)
    atheris.Setup(arguments, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
