"""The program that reads Arrow data for the page: bytes on stdin, one line of JSON on stdout.

It is given only the beginning of a body, and the body's length as its argument. The data may be
anything, so it runs with limits, and may die of it. pyarrow unpickles nothing (since version 14).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sized
from typing import Any, Final

_MEMORY: Final = 256 << 20  # bytes beside those that the libraries have taken
_SECONDS: Final = 5  # of processor time, likewise
_COLUMNS: Final = 100
_CELLS: Final = 1000
_ROWS: Final = 20
_VALUES: Final = 100  # of a cell that is a list
_TEXT: Final = 200  # characters of a name, a type or a cell
_MAGIC: Final = b"ARROW1\0\0"


def main() -> int:
    """Read, and print."""
    try:
        import pyarrow as pa
    except ImportError:
        _say({"error": "It is shown as a table if pyarrow is installed beside shmq."})
        return 0
    _limit()
    pa.set_cpu_count(1)
    data = sys.stdin.buffer.read()
    try:
        _say(_described(pa, data, int(sys.argv[1])))
    except (pa.ArrowException, ValueError, MemoryError, OSError, RecursionError) as exc:
        _say({"error": f"It cannot be read: {_short(exc)}"})
    return 0


def _limit() -> None:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for what, most in (
        (resource.RLIMIT_AS, taken + _MEMORY),
        (resource.RLIMIT_CPU, int(time.process_time()) + _SECONDS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        _, hard = resource.getrlimit(what)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (limit, limit))


def _described(pa: Any, data: bytes, length: int) -> dict[str, Any]:
    # A file is a stream between two marks, with an index at its end, which is not needed here.
    is_file = data.startswith(_MAGIC)
    reader = pa.ipc.open_stream(pa.py_buffer(data)[len(_MAGIC) if is_file else 0 :])
    schema = reader.schema
    rows, first, stopped = 0, [], None
    try:
        for batch in reader:
            batch.validate(full=not rows)
            if not rows:
                first = _texts(batch)
            rows += batch.num_rows
    except (pa.ArrowException, ValueError, MemoryError, OSError) as exc:
        stopped = (
            f"The first {len(data)} bytes were read."
            if len(data) < length
            else f"The rest cannot be read: {_short(exc)}"
        )
    return {
        "format": "file" if is_file else "stream",
        "columns": len(schema),
        "fields": [
            {"name": _short(each.name), "type": _short(each.type), "nullable": each.nullable}
            for each in (schema.field(at) for at in range(min(len(schema), _COLUMNS)))
        ],
        "rows": rows,
        "complete": stopped is None,
        "stopped": stopped,
        "first": first,
    }


def _texts(batch: Any) -> list[list[str]]:
    """The first rows."""
    columns = min(batch.num_columns, _COLUMNS)
    rows = min(batch.num_rows, _ROWS, max(_CELLS // max(columns, 1), 1))
    return [[_cell(batch.column(at)[row]) for at in range(columns)] for row in range(rows)]


def _cell(scalar: Any) -> str:
    if not scalar.is_valid:
        return "null"
    if isinstance(values := getattr(scalar, "values", None), Sized) and len(values) > _VALUES:
        return _short(f"{len(values)} values of {scalar.type}")
    if hasattr(scalar, "as_buffer"):  # text or bytes: not more than is shown
        buffer = scalar.as_buffer()
        head = buffer[: 4 * _TEXT].to_pybytes() if buffer is not None else b""
        is_text = "string" in str(scalar.type)
        return _short(head.decode("utf-8", "replace") if is_text else head)
    return _short(scalar)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."


def _say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
