"""How arrays travel in calls of joblib, where cloudpickle alone would not keep its promises.

An array that maps a file is that file in the worker, so a program sees what its workers write.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections import ChainMap
from collections.abc import Callable
from typing import Any, Final

import cloudpickle
import numpy as np

PROTOCOL: Final = 5


class _Pickler(cloudpickle.Pickler):
    """A pickler of calls and results.

    opened: arrays of more than so many bytes arrive as ones that may be changed, even if they may
    not be here; None: read-only arrays stay so.
    """

    def __init__(
        self, file: Any, keep: Callable[[pickle.PickleBuffer], object], opened: int | None
    ) -> None:
        self._opened = opened
        ours = {np.ndarray: self._array, np.memmap: self._array}
        known: ChainMap[Any, Any] = cloudpickle.Pickler.dispatch_table
        self.dispatch_table = ChainMap(ours, *known.maps)  # __init__ reads it
        super().__init__(file, protocol=PROTOCOL, buffer_callback=keep)

    def _array(self, array: Any) -> Any:
        file = _file(array)
        if file is not None:
            return file
        usual = array.__reduce_ex__(PROTOCOL)
        opened = self._opened
        if opened is None or array.flags.writeable or array.nbytes <= opened or len(usual) != 2:
            return usual
        return _open, usual


def dumps(
    value: object, keep: Callable[[pickle.PickleBuffer], object], opened: int | None = None
) -> bytes:
    """Pickle a call or a result. keep: gets each buffer outside the pickle. opened: arrays of more
    than so many bytes may be changed where they arrive; None: those that may be here."""
    file = io.BytesIO()
    _Pickler(file, keep, opened).dump(value)
    return file.getvalue()


def _open(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """An array that may be changed."""
    found = make(*args)
    return found if found.flags.writeable else found.copy("K")


def _file(array: Any) -> Any:
    """How an array is pickled as a part of a file, None if it maps none."""
    root = array
    while not isinstance(root.base, mmap.mmap):
        root = root.base
        if not isinstance(root, np.ndarray):
            return None
    name = getattr(root, "filename", None)
    if name is None or not array.size or not isinstance(root, np.memmap):
        return None
    lowest, end = _bounds(array)
    start = lowest - _bounds(root)[0] + root.offset
    mode = "r+" if root.mode == "w+" else root.mode
    if array.flags.c_contiguous or array.flags.f_contiguous:
        order = "C" if array.flags.c_contiguous else "F"
        return np.memmap, (str(name), array.dtype, mode, start, array.shape, order)
    first = array.__array_interface__["data"][0] - lowest
    return _part, (
        str(name),
        mode,
        start,
        end - lowest,
        array.dtype,
        array.shape,
        first,
        array.strides,
    )


def _bounds(array: Any) -> tuple[int, int]:
    """The addresses of an array's first byte and of the byte after its last one."""
    first: int = array.__array_interface__["data"][0]
    spans = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    below, above = (sum(span for span in spans if (span < 0) is down) for down in (True, False))
    return first + below, first + above + array.itemsize


def _part(
    name: str,
    mode: Any,
    start: int,
    length: int,
    dtype: Any,
    shape: tuple[int, ...],
    first: int,
    strides: tuple[int, ...],
) -> Any:
    """An array that has only some of the elements in a part of a file."""
    found = np.memmap(name, np.uint8, mode, start, (length,))
    return np.ndarray(shape, dtype, found, first, strides)
