"""The results stores of an instance: made on request, swept, written to disk at a stop.

* make: reserve a place and a serial, make the segment, enter it in the directory (one store)
* remove: close the segment for everybody, take it out of the directory, unlink it
* stop: close the segment, then write it to its file, so that no value that was stored is missing;
  after an error on disk the segment is opened again and stays
* start: the file is read back into a new segment, and deleted when the start is complete; a
  supervisor that adopts keeps the segments and deletes files that are older than they

A death at any step leaves the segment in the directory, which the next supervisor adopts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shmq import _native, audit, shm
from shmq._native import Broker, Store
from shmq.errors import BadArgument, Gone, LayoutMismatch, MessageTooBig, ShmqError
from shmq.names import is_ephemeral
from shmq.options import Options
from shmq.ownership import NotTrusted
from shmq.storage import results_file
from shmq.storage.results_file import DamagedResults, Record, ResultsFile
from shmq.supervisor.loops import Bell, Pace
from shmq.views import DirectoryView

_SHARE: Final = 0.003  # of a core's time, at most, for sweeps
_EVERY: Final = 1.0  # seconds between two sweeps, at least
_BITE: Final = 2048  # entries looked at under one hold of a store's lock
_SCAN_BYTES: Final = 1 << 20  # copied under one hold of the lock, for a file
_LARGE: Final = 1 << 20  # bytes of memory that a store may keep
_FEW: Final = 16  # a store that uses at most this part (1/16) of its memory is trimmed
_QUIET: Final = 10.0  # seconds between two looks at memory; both must find it idle
_FILE_MODE: Final = 0o600

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Kept:
    """One store. idle: it was almost empty at the last look."""

    name: str
    place: int
    serial: int
    store: Store
    idle: bool = False


class ResultsKeeper:
    """Makes, removes, sweeps and flushes the stores."""

    def __init__(self, broker: Broker, options: Options, directory: DirectoryView) -> None:
        self._broker = broker
        self._instance = options.instance
        self._mode, self._group = options.permissions()
        self._data_path = Path(options.data_path or ".")
        self._directory = directory
        self._lock = threading.Lock()  # of `_stores`
        self._stores: dict[str, _Kept] = {}
        self._files_read: list[tuple[ResultsFile, Exception | None]] = []
        self._pace = Pace(_EVERY, _SHARE)
        self._looked = 0.0

    # -- make, remove

    def create(self, name: str, max_keys: int, max_bytes: int) -> None:
        """Make the store unless it is there; one that is there keeps its limits. Raises ShmqError,
        OSError."""
        if name not in self._stores:
            self._make(name, max_keys, max_bytes)
            _log.info("RESULTS(%s): created", name)
            audit.note("create_results", name)

    def delete(self, name: str) -> None:
        """Remove the store with all its keys. Raises Gone if there is none."""
        kept = self._stores.get(name)
        if kept is None:
            raise Gone(f"there is no results store {name!r}")
        with contextlib.suppress(Gone, LayoutMismatch):
            kept.store.retire()
        self._broker.remove_store(kept.place, kept.serial)
        with self._lock:
            del self._stores[name]
        shm.unlink_queue(self._instance, kept.serial)
        self._file(name).remove()
        _log.info("RESULTS(%s): deleted", name)
        audit.note("delete_results", name)

    def _make(
        self,
        name: str,
        max_keys: int,
        max_bytes: int,
        records: Iterable[Record] = (),
        damage: list[Exception] | None = None,
    ) -> None:
        """records: what it holds at first. damage: what could not be put into it is added here."""
        place, serial, fd = shm.make_queue(
            self._instance, self._broker.reserve_store, self._mode, self._group
        )
        try:
            self._broker.create_store(fd, place, serial, name, max_keys, max_bytes)
            store = Store(self._broker, place, serial, name)
            for key, value, expires in records:
                try:
                    _put_back(store, key, value, expires)
                except MessageTooBig as exc:  # max_msg_size was larger
                    assert damage is not None
                    damage.append(exc)
            self._broker.enter_store(place, serial, name, max_keys, max_bytes)
        except BaseException:
            shm.unlink_queue(self._instance, serial)
            raise
        finally:
            os.close(fd)
        with self._lock:
            self._stores[name] = _Kept(name, place, serial, store)

    def _file(self, name: str) -> ResultsFile:
        return ResultsFile(self._data_path, name)

    # -- start

    def adopt(self) -> None:
        """Take over the stores that a dead supervisor left. One that cannot be used is removed."""
        for entry in self._directory.live_stores():
            try:
                fd = shm.open_queue(self._instance, entry.serial, owners=shm.own())
                try:
                    _native.reopen_store(fd)  # a stop that died may have closed it
                finally:
                    os.close(fd)
                store = Store(self._broker, entry.index, entry.serial, entry.name)
            except (OSError, ShmqError, NotTrusted) as exc:
                _log.error("RESULTS(%s): cannot be used, and is removed: %s", entry.name, exc)
                self._broker.remove_store(entry.index, entry.serial)
                continue
            self._stores[entry.name] = _Kept(entry.name, entry.index, entry.serial, store)
            self._file(entry.name).remove()

    def recreate(self) -> None:
        """Make the stores whose files are in the data path again. Raises OSError, ShmqError."""
        for file in results_file.existing(self._data_path):
            if file.name not in self._stores:
                self._read_back(file)

    def _read_back(self, file: ResultsFile) -> None:
        damage: list[Exception] = []

        def intact(records: Iterator[Record]) -> Iterator[Record]:
            try:
                yield from records
            except DamagedResults as exc:
                damage.append(exc)

        try:
            max_keys, max_bytes, records = file.read()
            self._make(file.name, max_keys, max_bytes, intact(records), damage)
            keys = self._stores[file.name].store.info()[0]
            _log.info("RESULTS(%s): read back, %d keys", file.name, keys)
        except (DamagedResults, BadArgument) as exc:
            damage.append(exc)
        self._files_read.append((file, damage[0] if damage else None))

    def started(self) -> None:
        """Delete the files that were read back, now that nothing can undo the start."""
        for file, damage in self._files_read:
            try:
                if damage is None:
                    file.remove()
                else:
                    _log.error(
                        "RESULTS(%s): %s; set aside as %s", file.name, damage, file.set_aside()
                    )
            except OSError as exc:
                _log.error("RESULTS(%s): its old file cannot be deleted: %s", file.name, exc)
        self._files_read.clear()

    # -- stop

    def flush(self) -> None:
        """Write every store to its file, and close it. Raises OSError; the stores are then still in
        shared memory, and open."""
        for kept in self._list():
            with contextlib.suppress(Gone):
                try:
                    self._flush(kept)
                except LayoutMismatch as exc:
                    _log.error("RESULTS(%s): cannot be flushed: %s", kept.name, exc)

    def _flush(self, kept: _Kept) -> None:
        kept.store.retire()
        file = self._file(kept.name)
        try:
            keys, max_keys, _, max_bytes, *_ = kept.store.info()
            if not keys or is_ephemeral(kept.name):
                file.remove()
                return
            written = file.write(max_keys, max_bytes, _records(kept.store), _FILE_MODE)
            _log.info("RESULTS(%s): flushed %d keys to disk", kept.name, written)
        except OSError:
            fd = shm.open_queue(self._instance, kept.serial, owners=shm.own())
            try:
                _native.reopen_store(fd)
            finally:
                os.close(fd)
            raise

    def _list(self) -> list[_Kept]:
        with self._lock:
            return list(self._stores.values())

    # -- the loop

    def run(self, bell: Bell) -> None:
        """Remove what has expired and give idle memory back, until the bell is stopped."""
        while not bell.check():
            now = time.monotonic()
            if not self._pace.is_due(now):
                bell.wait(self._pace.left(now))
                continue
            look = now - self._looked >= _QUIET
            for kept in self._list():
                with contextlib.suppress(ShmqError):  # deleted, or a stopped process has its lock
                    _sweep(kept.store, bell)
                    if look:
                        _trim(kept)
            if look:
                self._looked = now
            self._pace.did(now)


def _sweep(store: Store, bell: Bell) -> None:
    more = True
    while more and not bell.check():
        _, more = store.sweep(_BITE)


def _trim(kept: _Kept) -> None:
    used, committed = kept.store.info()[2], kept.store.info()[8]
    idle = committed > _LARGE and used * _FEW <= committed
    if idle and kept.idle:
        given = kept.store.trim()
        if given:
            _log.info("RESULTS(%s): gave %d KiB of memory back", kept.name, given >> 10)
    kept.idle = idle


def _put_back(store: Store, key: bytes, value: bytes, expires: int) -> None:
    left = expires - _native.realtime()
    if not expires:
        store.set(key, value)
    elif left > 0:
        store.set(key, value, left / 1e9)


def _records(store: Store) -> Iterator[Record]:
    now = _native.realtime()
    at: int | None = 0
    while at is not None:
        found, at = store.scan(at, True, _SCAN_BYTES)
        for key, value, ttl in found:
            yield key, value, 0 if ttl is None else now + ttl
