"""The messages that a consumer takes: one (`Message`) or several together (`Batch`)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from shmq import _native
from shmq.client.properties import unpack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: One delivery of a message. It has `id` (16 hex digits), `body` (bytes), `view` (a memoryview in
#: shared memory, which keeps the body in place as long as it lives), `timestamp` (publish time, ns
#: since 1970), `attempts` (deliveries, including this one) and `properties` (a read-only mapping of
#: names to bytes, empty if it was published without any). `finish()`, `requeue(delay=0.0)` and
#: `touch()` are nsqd's FIN, REQ and TOUCH: each raises NotInFlight if the message timed out or was
#: answered already. A delay is in seconds; one above max_req_timeout is shortened to that, as
#: nsqd does. `with message:` finishes it at the end of the block, or requeues it if the block
#: raised.
Message = _native.Message


class Batch(_native.Batch):
    """Messages taken together by `Consumer.take_many`.

    `len(batch)` is their number; iteration and indexing give Message objects, and `bodies()` gives
    a list of bytes. `finish()`, `requeue(delay=0.0)` and `touch()` answer all messages that are
    not answered yet, under one lock. They raise NotInFlight if some had timed out, after the others
    were answered. `with batch:` finishes the messages that were not answered in the block, or
    requeues them if the block raised.

    Any library that speaks Arrow's PyCapsule protocol imports a batch with the columns of
    `to_arrow`, without copying: `polars.DataFrame(batch)`, `pyarrow.table(batch)`, and DuckDB's
    `connection.register("name", batch)`. An imported batch stays valid after `finish()`, and
    after the broker was closed.

    The arrays below are read-only and share the batch's memory, which is a copy of the process's
    own. Each has one element per message.
    """

    __slots__ = ()

    @property
    def ids(self) -> npt.NDArray[np.uint64]:
        """Ids as numbers, uint64: `Message.id` is `f"{id:016x}"`."""
        import numpy as np

        return np.frombuffer(self.column("ids"), np.uint64)

    @property
    def timestamps(self) -> npt.NDArray[np.int64]:
        """Publish times, int64, ns since 1970."""
        import numpy as np

        return np.frombuffer(self.column("timestamps"), np.int64)

    @property
    def attempts(self) -> npt.NDArray[np.uint16]:
        """Deliveries so far, uint16, including this one."""
        import numpy as np

        return np.frombuffer(self.column("attempts"), np.uint16)

    @property
    def properties(self) -> list[Mapping[str, bytes]]:
        """The properties of each message, read-only mappings of names to bytes."""
        return [unpack(block) for block in self.blocks()]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Batch cannot be pickled: only the process that took it can finish it; send its "
            "bodies() and finish it here"
        )

    def to_arrow(self, properties: bool = False) -> Any:
        """Return the batch as a pyarrow RecordBatch, without copying: id uint64, timestamp
        timestamp[ns, UTC], attempts uint16, body large_binary, one row per message. properties:
        with one more column of that name, map<string, binary>. Raises ImportError if pyarrow is
        not installed."""
        importer, schema = _record_batch()
        batch = importer(self) if schema is None else self.import_arrow(importer, schema)
        return batch.append_column(*arrow_properties(self.blocks())) if properties else batch


def arrow_properties(blocks: Iterable[bytes]) -> tuple[Any, Any]:
    """The field and the array of the column `properties`, of a block for each message."""
    import pyarrow as pa

    kind = pa.map_(pa.string(), pa.binary())
    rows = [list(unpack(block).items()) for block in blocks]
    return pa.field("properties", kind, False), pa.array(rows, kind)


@functools.cache
def _record_batch() -> tuple[Any, Any]:
    """The function of pyarrow that imports a batch and the schema that it takes, looked up once. A
    pyarrow that lacks that function gets another one, and None: it reads the schema each time."""
    try:
        import pyarrow as pa
    except ImportError as exc:
        raise ImportError(
            "Batch.to_arrow needs pyarrow: install it, or shmq with the extra `spark`"
        ) from exc
    importer = getattr(pa.RecordBatch, "_import_from_c", None)
    if importer is None:
        return pa.record_batch, None
    return importer, pa.record_batch(_native.Batch()).schema
