"""Publishing to one topic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Self

import numpy as np

from shmq import _native

#: Distance of two ids of one batch: an id is 54 bits of clock and 10 bits of node id.
ID_STEP: Final = 1 << 10

# Arrow type -> its offsets are 64 bits wide
_ARROW_OFFSETS: Final = {
    "binary": False,
    "string": False,
    "large_binary": True,
    "large_string": True,
}


class Producer(_native.Producer):
    """Publishes to one topic; made by `Broker.producer`. Any thread may use it.

    `publish(body, defer=None, timeout=None) -> str`: publish one body (bytes or any buffer) to
    every channel of the topic, or to its backlog while it has none, and return its id, 16 hex
    digits. defer: seconds before it may be delivered (at most max_req_timeout). timeout: seconds to
    wait for room, None for ever, 0 not at all. Raises Full, MessageTooBig, Gone, NotRunning (only
    where the supervisor is needed: a backlog queue must be made). nsqd: PUB, DPUB.

    `loan(nbytes, defer=None, timeout=None)`: a context manager that yields a writable memoryview in
    shared memory, published at the end of the block and dropped if that raised.
    """

    def publish_many(
        self, bodies: Any, defer: float | None = None, timeout: float | None = None
    ) -> range:
        """Publish many bodies, all or nothing, in order; nsqd's MPUB.

        bodies: a list, tuple or other iterable of bytes-likes; a numpy array of uint8 with two
        dimensions (a row is a body); or a pyarrow Array or ChunkedArray of binary or string without
        nulls. defer and timeout as in `publish`. Returns the ids as numbers: `f"{id:016x}"` is what
        `Message.id` shows.

        Raises as `publish`; MessageTooBig also if the batch as a whole can never fit memory.
        """
        if isinstance(bodies, list | tuple):
            first, count = self._list(bodies, defer, timeout)
        elif isinstance(bodies, np.ndarray):
            first, count = self._numpy(bodies, defer, timeout)
        elif hasattr(bodies, "null_count") and hasattr(bodies, "type"):
            first, count = self._arrow(bodies, defer, timeout)
        elif isinstance(bodies, str | bytes | bytearray | memoryview):
            raise TypeError("publish_many takes many bodies; use publish for one")
        elif isinstance(bodies, Iterable):
            first, count = self._list(list(bodies), defer, timeout)
        else:
            raise TypeError(
                f"publish_many takes an iterable of bodies, not {type(bodies).__name__}"
            )
        return range(first, first + count * ID_STEP, ID_STEP)

    def _list(
        self, bodies: list[Any] | tuple[Any, ...], defer: float | None, timeout: float | None
    ) -> tuple[int, int]:
        if not bodies:
            return 0, 0
        return self.publish_list(bodies, defer, timeout), len(bodies)

    def _numpy(
        self, rows: np.ndarray[Any, Any], defer: float | None, timeout: float | None
    ) -> tuple[int, int]:
        if rows.ndim != 2 or rows.dtype != np.uint8:
            raise TypeError(
                f"publish_many takes a numpy array of uint8 with two dimensions (a row is a body), "
                f"not of {rows.dtype} with {rows.ndim}: use array.view(numpy.uint8).reshape(n, -1)"
            )
        count, width = rows.shape
        if not count:
            return 0, 0
        data = np.ascontiguousarray(rows)
        return self.publish_fixed(data, count, width, defer, timeout), count

    def _arrow(self, array: Any, defer: float | None, timeout: float | None) -> tuple[int, int]:
        """pyarrow, by its methods and not by importing it."""
        if array.null_count:
            raise ValueError(
                f"publish_many: {array.null_count} of the bodies are null; use drop_null()"
            )
        if hasattr(array, "chunks"):  # one transaction needs one array
            array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
            if hasattr(array, "chunks"):
                if array.num_chunks > 1:
                    raise ValueError(
                        "publish_many: more than 2 GiB in one batch; cast to large_binary"
                    )
                if not array.num_chunks:
                    return 0, 0
                array = array.chunk(0)
        kind, count = str(array.type), len(array)
        if not count:
            return 0, 0
        if kind.startswith("fixed_size_binary"):
            width = array.type.byte_width
            start = array.offset * width
            data = memoryview(array.buffers()[1] or b"")[start : start + count * width]
            return self.publish_fixed(data, count, width, defer, timeout), count
        if kind not in _ARROW_OFFSETS:
            raise TypeError(
                f"publish_many takes an Arrow array of binary or string, not {kind}: cast it"
            )
        _, offsets, data = array.buffers()
        wide, start = _ARROW_OFFSETS[kind], array.offset
        first = self.publish_offsets(
            b"" if data is None else data, offsets, wide, start, count, defer, timeout
        )
        return first, count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
