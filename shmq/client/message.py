"""What a consumer takes."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shmq import _native

#: One delivery: `id` (16 hex digits), `body` (bytes), `view` (memoryview in shared memory, which
#: keeps the body in place as long as it lives), `timestamp` (publish time, ns since 1970),
#: `attempts` (deliveries, this one included); `finish()`, `requeue(delay=0.0)`, `touch()` as nsqd's
#: FIN, REQ, TOUCH: each raises NotInFlight if the message timed out or was answered already. A
#: delay is at most max_req_timeout: a longer one is shortened to that, as nsqd's. `with message:`
#: finishes it at the end of the block, or requeues it if that raised.
Message = _native.Message


class Batch(_native.Batch):
    """Messages taken together by `Consumer.take_many`.

    `len`, iteration and indexing give Message objects, `bodies()` a list of bytes. `finish()`,
    `requeue(delay=0.0)` and `touch()` answer all of them under one lock; those that timed out
    meanwhile make it raise NotInFlight, after the others were answered. `with batch:` finishes what
    was not answered in the block, or requeues it if that raised.

    The arrays below are read-only and share the batch's memory, which is the process's own.
    """

    __slots__ = ()

    @property
    def ids(self) -> npt.NDArray[np.uint64]:
        """Ids as numbers: `f"{id:016x}"` is what `Message.id` shows."""
        return np.frombuffer(self.column("ids"), np.uint64)

    @property
    def timestamps(self) -> npt.NDArray[np.int64]:
        """Publish times, ns since 1970."""
        return np.frombuffer(self.column("timestamps"), np.int64)

    @property
    def attempts(self) -> npt.NDArray[np.uint16]:
        """Deliveries so far, this one included."""
        return np.frombuffer(self.column("attempts"), np.uint16)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Batch cannot be pickled: only the process that took it can finish it; send its "
            "bodies() and finish it here"
        )

    def to_arrow(self) -> Any:
        """A pyarrow RecordBatch without copying: id uint64, timestamp timestamp[ns, UTC], attempts
        uint16, body large_binary. ImportError if pyarrow is not installed."""
        schema, columns, from_arrays, from_buffers, py_buffer = _arrow()
        count, column = len(self), self.column
        arrays = [
            from_buffers(kind, count, [None, *(py_buffer(column(name)) for name in names)], 0)
            for kind, names in columns
        ]
        return from_arrays(arrays, schema=schema)


@functools.cache
def _arrow() -> tuple[Any, ...]:
    """What of pyarrow every batch needs, looked up once: a batch of 200 is a matter of 10 us."""
    try:
        import pyarrow as pa
    except ImportError as exc:
        raise ImportError(
            "Batch.to_arrow needs pyarrow: install it, or shmq with the extra `spark`"
        ) from exc
    columns = {
        "id": (pa.uint64(), ("ids",)),
        "timestamp": (pa.timestamp("ns", tz="UTC"), ("timestamps",)),
        "attempts": (pa.uint16(), ("attempts",)),
        "body": (pa.large_binary(), ("offsets", "data")),
    }
    schema = pa.schema([pa.field(name, kind, False) for name, (kind, _) in columns.items()])
    return (
        schema,
        tuple(columns.values()),
        pa.RecordBatch.from_arrays,
        pa.Array.from_buffers,
        pa.py_buffer,
    )
