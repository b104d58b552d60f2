"""Fuzzes a reader of what is on disk or of what comes over TCP, guided by coverage (atheris):

    python tests/fuzz/readers.py TARGET [libFuzzer's options and corpus]

For any bytes a reader answers, or raises the error it is documented to raise; and its answer,
written again, is read the same. A session answers and publishes the same however its bytes are cut.
`--mutant` weakens the reader in one place, which must be found."""

from __future__ import annotations

import gc
import inspect
import logging
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris
from support.session_without_socket import Host, drive

import shmq
from shmq import _native
from shmq.gateway import delivery, identify, protocol, publish
from shmq.gateway import session as gateway
from shmq.storage import deferred, metadata, positions, records
from shmq.storage.positions import parse_meta, unpack
from shmq.storage.records import (
    RECORD_OVERHEAD,
    decode_records,
    encode_records,
    scan_records,
)

MOST = 1000  # max_msg_size
FILE = Path("/somewhere/file.dat")


def meta(data: bytes) -> None:
    found = parse_meta(data)
    if found is None:
        return
    read, write = unpack(found.read_position), unpack(found.write_position)
    text = f"{found.depth}\n{read[0]},{read[1]}\n{write[0]},{write[1]}\n"
    assert parse_meta(text.encode()) == found


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


def chunk(data: bytes) -> None:
    try:
        found = deferred.decode(data)
    except deferred.DamagedChunk:
        _without_crc(data)
        return
    assert len(found.numbers) == len(found.entries)
    assert all(len(entry.record) >= RECORD_OVERHEAD for entry in found.entries)
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
        assert RECORD_OVERHEAD <= len(one.record) <= len(record)


def record(data: bytes) -> None:
    scan = scan_records(data, MOST)
    assert (len(scan.offsets), scan.used, scan.stop == "length") == _native.scan_records(data, MOST)
    found = list(decode_records(data, MOST))
    columns = list(zip(*found, strict=True)) or [(), (), (), ()]
    assert encode_records(*columns) == data[: scan.used]


_consumer: Any = None  # of an empty channel: commands of a subscriber are read too


def session(data: bytes) -> None:
    """The first four bytes say where the others are cut; one byte each if they are 0."""
    marks, stream = data[:4], b"  V2" + data[4:]
    cuts = sorted({mark * len(stream) // 256 for mark in marks} - {0})
    whole = drive(stream, [], Host(_consumer))
    pieces = drive(stream, cuts or list(range(1, len(stream))), Host(_consumer))
    assert pieces == whole, (pieces, whole)


def _subscribe() -> None:
    global _consumer
    broker = shmq.Broker(data_path=tempfile.mkdtemp(prefix="shmq-fuzz-"))
    _consumer = broker.consumer("t", "c", 1)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "meta": meta,
    "metadata": topics,
    "reserve": reserve,
    "chunk": chunk,
    "record": record,
    "session": session,
}


_PATHS = 4096  # sets of blocks that libFuzzer can tell from each other


def fuzz(target: Callable[[bytes], None], arguments: list[str]) -> None:
    """Guided by coverage, cheaply.

    A call of atheris' counter at every block that is run takes longer than all the rest; that of a
    set's method does not. The blocks an input ran are counted if no input before ran just these.
    """
    paths = [atheris._reserve_counter() for _ in range(_PATHS)]
    ran: set[int] = set()
    known: set[int] = set()
    count = atheris._trace_branch

    def run(data: bytes) -> None:
        nonlocal count
        if not known:  # Fuzz has put in its own
            count, atheris._trace_branch = atheris._trace_branch, ran.add
        ran.clear()
        target(data)
        path = hash(frozenset(ran))
        if path not in known:
            known.add(path)
            for block in (*ran, paths[path % _PATHS]):
                count(block)

    atheris.Setup(arguments, run)
    gc.freeze()
    atheris.Fuzz()


def weaken(name: str) -> None:
    """One check less in the reader."""
    if name in ("metadata", "reserve"):
        real = metadata._nonsense
        metadata._nonsense = lambda path, what: KeyError(real(path, what))  # type: ignore[assignment,return-value]
    elif name == "meta":
        positions.MAX_FILE = 10  # not what pack's callers expect
        positions.pack = lambda file, offset: file * 7 + offset  # type: ignore[assignment]
    elif name == "chunk":
        deferred._LEAST_ENTRY = 1
    elif name == "session":
        whole = gateway.Session._whole
        gateway.Session._whole = (
            lambda self, data, start, end: (  # type: ignore[method-assign]
                whole(self, data, start, end) or bytes(data[start + 4 : end - 1]) or None
            )
        )
    else:
        records.MESSAGE_HEADER = 20


def main() -> None:
    logging.disable()
    arguments = [word for word in sys.argv if word != "--mutant"]
    name = arguments.pop(1)
    if len(arguments) < len(sys.argv) - 1:
        weaken(name)
    modules = (
        deferred,
        positions,
        records,
        metadata,
        protocol,
        gateway,
        identify,
        publish,
        delivery,
    )
    classes = (gateway.Session, publish.Publishing, delivery.Delivery)
    names = {module.__name__ for module in modules}
    for place in (*modules, *classes):  # an editable install has an importer of its own
        for _, function in inspect.getmembers(place, inspect.isfunction):
            if function.__module__ in names:
                function.__code__ = atheris.patch_code(function.__code__, trace_dataflow=False)
    if name == "session":
        _subscribe()
    fuzz(TARGETS[name], arguments)


if __name__ == "__main__":
    main()
