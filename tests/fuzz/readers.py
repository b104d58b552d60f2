"""Fuzzes a reader of what is on disk or of what comes over TCP, guided by coverage (atheris):

    python tests/fuzz/readers.py TARGET [libFuzzer's options and corpus]

For any bytes a reader answers, or raises the error it is documented to raise; and its answer,
written again, is read the same. A session answers and publishes the same however its bytes are cut.
`--mutant` weakens the reader in one place, which must be found."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import re
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import atheris
import rules
from support.session_without_socket import Direct, Host, drive

import shmq
from shmq import _native, option_types, settings, users
from shmq.client import properties
from shmq.gateway import acts, delivery, identify, leasing, protocol, publish
from shmq.gateway import session as gateway
from shmq.storage import deferred, metadata, positions, records, results_file
from shmq.storage.positions import parse_meta, unpack
from shmq.storage.records import (
    RECORD_OVERHEAD,
    decode_records,
    encode_records,
    scan_records,
)
from shmq.storage.results_file import DamagedResults, Record, ResultsFile
from shmq.supervisor import book

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


def saved_settings(data: bytes) -> None:
    """Settings of shmq.dat; what they say is said again by what is saved of them."""
    try:
        found = book.from_document(FILE, metadata.parse_settings(FILE, data))
    except metadata.MetadataError:
        return
    assert book.from_document(FILE, book.to_document(found)) == found
    for own, channels in found.values():
        for one in (own, *channels.values()):
            if one is not None:
                assert settings.Settings.from_native(one.to_native()) == one


def plain_results(data: bytes) -> tuple[list[Record], bool]:
    """The records of a results file with checksums of 0, and whether it is whole."""
    found: list[Record] = []
    if len(data) < 24 or data[:8] != b"shmqres1" or any(data[20:24]):
        return found, False
    (most,) = struct.unpack(">Q", data[12:20])
    rest = data[24:]
    while len(rest) >= 17 and not any(rest[:4]):
        expires, length, key_length = struct.unpack(">qIB", rest[4:17])
        if len(rest) < 17 + key_length + length or (key_length and length > most):
            return found, False
        if not key_length:
            return found, rest[17 : 17 + length] == struct.pack(">Q", len(found))
        key, value = rest[17 : 17 + key_length], rest[17 + key_length : 17 + key_length + length]
        found.append((key, value, expires))
        rest = rest[17 + key_length + length :]
    return found, False


def read_results(file: ResultsFile) -> tuple[list[Record], bool]:
    found: list[Record] = []
    try:
        *_, rows = file.read()
        for row in rows:
            found.append(row)
    except DamagedResults:
        return found, False
    return found, True


_results = ResultsFile(Path("/dev/null"), "r")  # until main() has a directory for it


def results(data: bytes) -> None:
    """As it is, and where each checksum is 0, as with the data's own."""
    _results.path.write_bytes(data)
    with without_checksums():
        assert read_results(_results) == plain_results(data)
    found, whole = read_results(_results)
    if whole:
        _results.write(1, max((len(value) for _, value, _ in found), default=0), found, 0o600)
        assert read_results(_results) == (found, True)


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    real = results_file.zlib
    results_file.zlib = SimpleNamespace(crc32=lambda data, before=0: 0)  # type: ignore[assignment]
    try:
        yield
    finally:
        results_file.zlib = real


def plain_properties(data: bytes) -> list[tuple[bytes, bytes]] | None:
    """The entries of a block; None if it is none."""
    found = []
    while data:
        name, rest = data[1 : 1 + data[0]], data[1 + data[0] :]
        value = rest[2 : 2 + int.from_bytes(rest[:2], "little")]
        if not name or len(name) > 64 or name.strip(_NAME) or len(rest) < 2:
            return None
        if len(value) < int.from_bytes(rest[:2], "little"):
            return None
        found.append((name, value))
        data = rest[2 + len(value) :]
    return found


_NAME = b"abcdefghijklmnopqrstuvwxyz0123456789._-"


def block(data: bytes) -> None:
    """A block of properties, and in a record's body."""
    plain = plain_properties(data)
    try:
        found = dict(properties.unpack(data))
    except shmq.LayoutMismatch:
        assert plain is None
    else:
        assert plain is not None
        assert found == {name.decode(): value for name, value in plain}
        own = not any(name.startswith("shmq-") for name in found)
        if own and len(found) == len(plain) and len(data) <= properties.MOST_BYTES:
            assert properties.pack(found) == data
            body = b"\xf5shmqp\1\n" + struct.pack("<I", len(data)) + data + b"the body"
            assert _native.split_body(body) == (data, b"the body")
    for body in (data, b"\xf5shmqp\1\n" + data):
        its_own, rest = _native.split_body(body)
        assert body.endswith(rest)
        assert plain_properties(its_own) is not None
        one = encode_records([1], [1], [1], [body])
        assert _native.record_properties(one, 1)[1] == its_own


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
_direct: Direct | None = None  # the extension's way, where pieces are whole publishes


def session(data: bytes) -> None:
    """The first four bytes say where the others are cut; one byte each if they are 0."""
    marks, stream = data[:4], b"  V2" + data[4:]
    cuts = sorted({mark * len(stream) // 256 for mark in marks} - {0})
    whole = drive(stream, [], Host(_consumer))
    pieces = drive(stream, cuts or list(range(1, len(stream))), Host(_consumer))
    assert pieces == whole, (pieces, whole)
    cuts += [match.end() for match in re.finditer(rb"(?=M?PUB )", stream)]
    pieces = drive(stream, sorted(set(cuts)), Host(_consumer), _direct)
    assert pieces == whole, (pieces, whole)


def _subscribe() -> None:
    global _consumer, _direct
    directory = tempfile.mkdtemp(prefix="shmq-fuzz-")
    broker = shmq.Broker(directory, instance=os.environ.get("FUZZ_INSTANCE"))
    _consumer = broker.consumer("t", "c", 1)
    _direct = Direct(broker.producer("published"), broker.consumer("published", "c", MOST))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "meta": meta,
    "metadata": topics,
    "reserve": reserve,
    "settings": saved_settings,
    "results": results,
    "properties": block,
    "chunk": chunk,
    "record": record,
    "session": session,
    "access": rules.session,
    "requests": rules.requests,
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
    elif name == "settings":
        book.BadArgument = KeyError  # type: ignore[assignment,misc]
    elif name == "results":
        results_file.ResultsFile._records = believing(ResultsFile._records)  # type: ignore[method-assign]
    elif name == "properties":
        properties.unpack = lambda block: {}  # type: ignore[assignment]
    elif name == "chunk":
        deferred._LEAST_ENTRY = 1
    elif name in ("access", "requests"):
        users.Rule.covers = lambda self, act, topic, channel: (  # type: ignore[method-assign]
            act in self.acts and users._covers(self.topics, topic)
        )
    elif name == "session":
        whole = gateway.Session._whole
        gateway.Session._whole = (
            lambda self, data, start, end: (  # type: ignore[method-assign]
                whole(self, data, start, end) or bytes(data[start + 4 : end - 1]) or None
            )
        )
    else:
        records.MESSAGE_HEADER = 20


def believing(read: Callable[..., Iterator[Record]]) -> Callable[..., Iterator[Record]]:
    """A reader that takes the end of the file for the end of the records."""

    def read_on(*arguments: Any) -> Iterator[Record]:
        with contextlib.suppress(DamagedResults):
            yield from read(*arguments)

    return read_on


def main() -> None:
    global _results
    logging.disable()
    arguments = [word for word in sys.argv if word != "--mutant"]
    name = arguments.pop(1)
    if len(arguments) < len(sys.argv) - 1:
        weaken(name)
    modules = (
        book,
        settings,
        option_types,
        results_file,
        deferred,
        positions,
        records,
        metadata,
        protocol,
        gateway,
        identify,
        publish,
        delivery,
        users,
        leasing,
        acts,
    )
    classes = (
        gateway.Session,
        publish.Publishing,
        delivery.Delivery,
        settings.Settings,
        ResultsFile,
        leasing.Leasing,
        users.Rule,
        users.User,
        users.Users,
    )
    names = {module.__name__ for module in modules}
    for place in (*modules, *classes):  # an editable install has an importer of its own
        for _, function in inspect.getmembers(place, inspect.isfunction):
            if function.__module__ in names:
                function.__code__ = atheris.patch_code(function.__code__, trace_dataflow=False)
    plain_properties.__code__ = atheris.patch_code(  # the core, whose work it is, has no counters
        plain_properties.__code__, trace_dataflow=False
    )
    if name == "session":
        _subscribe()
    if name == "requests":
        directory = tempfile.mkdtemp(prefix="shmq-fuzz-")
        rules.prepare(directory, os.environ.get("FUZZ_INSTANCE"))
    _results = ResultsFile(Path(tempfile.gettempdir()), f"fuzz-{os.getpid()}")
    fuzz(TARGETS[name], arguments)


if __name__ == "__main__":
    main()
