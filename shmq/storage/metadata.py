"""The metadata files: `nsqd.dat` lists topics and channels, `shmq.dat` has the id clock's reserve
and the settings of topics and channels, `shmq.copy.dat` the same once more.

Source: nsqd, `nsqd/nsqd.go` (LoadMetadata, PersistMetadata). `nsqd.dat` is nsqd's own format, byte
for byte: JSON without white space or newline, `null` for empty lists, ephemeral names left out.
nsqd has no place for the reserve of the id clock, so `shmq.dat` holds it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from shmq.storage import StorageError, own_files

METADATA_NAME = "nsqd.dat"
RESERVE_NAME = "shmq.dat"
COPY_NAME = "shmq.copy.dat"
METADATA_VERSION = "1.3.0"  # as nsqd 1.3.0 writes it; no program checks it on load

T = TypeVar("T")

_EPHEMERAL = "#ephemeral"
_NAME = re.compile(r"(?=.{1,64}\Z)[.a-zA-Z0-9_-]+(?:#ephemeral)?")

_NEEDS = "a release of shmq that knows settings of channels"

_log = logging.getLogger(__name__)


class MetadataError(StorageError):
    """A metadata file (`filename`) cannot be read or makes no sense; starting would lose topics."""


@dataclass(frozen=True, slots=True)
class ChannelMeta:
    """A channel as `nsqd.dat` names it."""

    name: str
    paused: bool = False


@dataclass(frozen=True, slots=True)
class TopicMeta:
    """A topic as `nsqd.dat` names it, with its channels."""

    name: str
    paused: bool = False
    channels: tuple[ChannelMeta, ...] = ()


def load(data_path: Path | str) -> list[TopicMeta]:
    """The topics in `<data_path>/nsqd.dat`, in file order. A missing file is a fresh start: [].

    Like nsqd, this skips invalid names with a warning and ignores unknown keys and the version. A
    name that occurs twice counts once (paused if either is).
    Raises MetadataError if the file cannot be read, is empty, or is not the expected JSON.
    """
    path = Path(data_path) / METADATA_NAME
    return parse_topics(path, _read(path))


def parse_topics(path: Path, text: bytes) -> list[TopicMeta]:
    """`load` for a file `path` that contains `text`."""
    document = _parse(path, text)
    topics: dict[str, bool] = {}
    channels: dict[str, dict[str, bool]] = {}
    for entry in _list_of(path, document, "topics"):
        topic = _enter(path, entry, "topic", topics)
        for channel in _list_of(path, entry, "channels"):
            _enter(path, channel, "channel", channels.setdefault(topic, {}))
    return [
        TopicMeta(
            name,
            paused,
            tuple(ChannelMeta(*channel) for channel in channels.get(name, {}).items()),
        )
        for name, paused in topics.items()
    ]


def store(
    data_path: Path | str,
    topics: Iterable[TopicMeta],
    about_to: Callable[[int], None] | None = None,
) -> None:
    """Replace `<data_path>/nsqd.dat` atomically with these topics, without the ephemeral ones.

    about_to: called right before the file is replaced, with the new value of `modified`.
    Raises OSError (disk full, no permission); the old file is then unchanged.
    """
    document = {
        "topics": [
            {
                "name": topic.name,
                "paused": topic.paused,
                "channels": [
                    {"name": channel.name, "paused": channel.paused}
                    for channel in topic.channels
                    if not channel.name.endswith(_EPHEMERAL)
                ]
                or None,
            }
            for topic in topics
            if not topic.name.endswith(_EPHEMERAL)
        ]
        or None,
        "version": METADATA_VERSION,
    }
    atomic_write(Path(data_path) / METADATA_NAME, _compact(document), about_to=about_to)


def modified(data_path: Path | str) -> int:
    """When `<data_path>/nsqd.dat` was written (Unix ns), 0 if there is none.

    Every broker writes the file when it starts, so an unexpected time shows that another broker
    has used the data path. Raises OSError.
    """
    try:
        return os.stat(Path(data_path) / METADATA_NAME).st_mtime_ns
    except FileNotFoundError:
        return 0


@dataclass(frozen=True, slots=True)
class Own(Generic[T]):
    """The contents of shmq.dat: the id clock (in the unit in which it was stored) below which ids
    may have been issued, and the saved settings of topics and channels."""

    clock: int
    settings: T


def load_own(data_path: Path | str, understand: Callable[[Path, dict[str, Any]], T]) -> Own[T]:
    """The contents of `<data_path>/shmq.dat`, or of its copy if it is damaged or missing (logged).
    Without both it is a fresh start: no clock, no settings.

    understand: makes settings of the document that `store_reserve` was given; raises MetadataError
    if it makes no sense. Raises MetadataError, with the one remedy, if what is there of the two is
    damaged; ForeignFile and other OSErrors.
    """
    paths = [Path(data_path) / name for name in (RESERVE_NAME, COPY_NAME)]
    wrong: list[MetadataError | None] = []
    for path in paths:
        try:
            text = _read_file(path)
            if text is not None:
                found = Own(parse_reserve(path, text), understand(path, parse_settings(path, text)))
                break
            wrong.append(None)
        except MetadataError as exc:
            if exc.errno not in (errno.EINVAL, errno.EFBIG, errno.EIO):
                raise
            wrong.append(exc)
    else:
        if any(wrong):
            raise _both_damaged(paths, wrong)
        return Own(0, understand(paths[0], {}))
    if wrong:
        what = wrong[0].strerror if wrong[0] else "it is missing"
        _log.warning("%s: %s; going on with its copy %s", paths[0], what, paths[1])
    return found


def _both_damaged(paths: list[Path], wrong: list[MetadataError | None]) -> MetadataError:
    first = next(exc for exc in wrong if exc)
    other = paths[1] if first is wrong[0] else paths[0]
    which = "is damaged too" if all(wrong) else "is missing"
    words = " ".join(shlex.quote(str(path)) for path in paths)
    sentence = (
        f"{first.strerror}; and {other} is the same file once more, which {which}. Restore one of "
        f"them from a backup. Or rm -f {words}: that loses the settings of topics and channels "
        "(message_ttl, max_attempts, limits, ...), which must be made again before clients come, "
        "and if the system clock was set back, ids may come twice"
    )
    return MetadataError(first.errno, sentence, str(paths[0] if wrong[0] else paths[1]))


def load_reserve(data_path: Path | str) -> int:
    """The clock of `load_own`."""
    return load_own(data_path, lambda path, document: None).clock


def load_settings(data_path: Path | str) -> dict[str, Any]:
    """The settings of `load_own`, as `store_reserve` was given them."""
    return load_own(data_path, lambda path, document: document).settings


def parse_settings(path: Path, text: bytes) -> dict[str, Any]:
    """The settings in a file `path` that contains `text`; {} if it has none. Raises MetadataError
    for impossible contents."""
    settings = _parse(path, text).get("settings", {})
    if not isinstance(settings, dict):
        raise _nonsense(path, f"settings is {settings!r}, not an object")
    return settings


def parse_reserve(path: Path, text: bytes) -> int:
    """The id clock in a file `path` that contains `text`. Raises MetadataError for impossible
    contents."""
    document = _parse(path, text)
    clock = document.get("id_clock")
    if isinstance(clock, dict):
        clock = clock.get("clock")
        if not document.get("settings"):
            raise _nonsense(path, "it had settings of topics or channels, and they are missing")
    if not isinstance(clock, int) or isinstance(clock, bool) or clock < 0:
        raise _nonsense(path, f"id_clock is {clock!r}, not a count")
    return clock


def store_reserve(
    data_path: Path | str, clock: int, settings: dict[str, Any] | None = None
) -> None:
    """Replace `<data_path>/shmq.dat` atomically with this reserve of the id clock, and with the
    settings of topics and channels if there are any. Its copy is replaced first.

    A release that does not know settings would lose them. It demands that `id_clock` is a number,
    so with settings it is an object, which such a release shows in its error. Raises OSError; the
    old file is then unchanged.
    """
    if clock < 0:
        raise ValueError(f"id clock {clock} is negative")
    document: dict[str, Any] = {"id_clock": clock}
    if settings:
        document = {"id_clock": {"clock": clock, "needs": _NEEDS}, "settings": settings}
    data, path = _compact(document), Path(data_path)
    replace(path / COPY_NAME, data)
    atomic_write(path / RESERVE_NAME, data)


def valid_name(name: str) -> bool:
    """True if nsqd accepts this topic or channel name: at most 64 bytes, `#ephemeral` included."""
    return _NAME.fullmatch(name) is not None


def atomic_write(
    path: Path, data: bytes, mode: int = 0o600, about_to: Callable[[int], None] | None = None
) -> None:
    """Replace the contents of `path` with `data`, durably: a crash of the host does not undo it.

    This is `replace` followed by an fsync of the directory (nsqd omits the latter). Raises OSError
    as `replace` does.
    """
    replace(path, data, mode, about_to)
    sync_directory(path.parent)


def replace(
    path: Path, data: bytes, mode: int = 0o600, about_to: Callable[[int], None] | None = None
) -> None:
    """Replace the contents of `path` with `data`. After a crash of the host the file is old or new.

    The data goes to a temporary neighbour (`temporary_of`), which is fsynced and renamed. `mode` is
    set regardless of the umask. about_to: called before the rename, with the file's time of
    modification (ns). Raises OSError with `filename` set; the temporary file is then removed.
    """
    temporary = temporary_of(path)
    try:
        fd = own_files.make_file(temporary, mode)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
            time = os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
        if about_to is not None:
            about_to(time)
        os.rename(temporary, path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if exc.filename2 is not None:  # of a rename; set to None it would be shown as a name
            raise OSError(exc.errno, exc.strerror, str(path)) from exc
        exc.filename = str(path)
        raise


def temporary_of(path: Path) -> Path:
    """A new name for a file that shall replace `path`: `<name>.<random>.tmp`, nsqd's pattern."""
    return path.with_name(f"{path.name}.{int.from_bytes(os.urandom(8), 'big') >> 1}.tmp")


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: files created, renamed and removed in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _compact(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def _read(path: Path) -> bytes:
    """The bytes of a file; a JSON null if it does not exist."""
    text = _read_file(path)
    return b"null" if text is None else text


def _read_file(path: Path) -> bytes | None:
    """The bytes of a file; None if it does not exist. Raises MetadataError, ForeignFile."""
    try:
        return own_files.read_file(path, own_files.MOST_METADATA)
    except FileNotFoundError:
        return None
    except own_files.ForeignFile:
        raise
    except OSError as exc:
        if exc.errno == errno.EFBIG:
            raise MetadataError(exc.errno, exc.strerror, str(path)) from exc
        sentence = f"failed to read metadata: {exc.strerror}"
        raise MetadataError(exc.errno, sentence, str(path)) from exc


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object in a file; {} if it is null (as Go treats it)."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:  # JSONDecodeError, UnicodeDecodeError; too deep
        what = "the file is empty" if not text.strip() else str(exc)
        raise _nonsense(path, what) from exc
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise _nonsense(path, f"it holds a {type(document).__name__}, not an object")
    return document


def _list_of(path: Path, holder: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = holder.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _nonsense(path, f"{key!r} is not a list of objects")
    return value


def _enter(path: Path, entry: dict[str, Any], what: str, paused_of: dict[str, bool]) -> str:
    """Add one topic or channel to {name: paused} if its name is valid; returns the name."""
    name, paused = entry.get("name"), entry.get("paused")
    if not isinstance(name, str | None) or not isinstance(paused, bool | None):
        raise _nonsense(path, f"a {what} has name {name!r} and paused {paused!r}")
    name = name or ""
    if valid_name(name):
        paused_of[name] = paused_of.get(name, False) or bool(paused)
    else:
        _log.warning("%s: skipping %s with invalid name %r", path, what, name)
    return name


def _nonsense(path: Path, what: str) -> MetadataError:
    sentence = f"failed to parse metadata: {what}"
    if path.name == METADATA_NAME:
        words = f"{shlex.quote(str(path))} {shlex.quote(f'{path}.away')}"
        sentence += (
            f"; restore it from a copy, or move it away (mv {words}) to start without what it "
            "names: a topic or channel that has no messages in files here, and what was paused"
        )
    return MetadataError(errno.EINVAL, sentence, str(path))
