"""The number of threads that the numeric libraries of this process use.

A library reads the environment when it is loaded. One that was loaded before, for example in the
parent of a forked process, has to be told by a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from typing import Final

_OPENBLAS: Final = tuple(
    f"{prefix}openblas_set_num_threads{suffix}"
    for prefix in ("", "scipy_")
    for suffix in ("", "64_", "_64")
)
#: A part of a library's file name -> its variable, and the names that its function may have.
_LIBRARIES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "openblas": ("OPENBLAS_NUM_THREADS", _OPENBLAS),
    "mkl_rt": ("MKL_NUM_THREADS", ("MKL_Set_Num_Threads",)),
    "blis": ("BLIS_NUM_THREADS", ("bli_thread_set_num_threads",)),
    "gomp": ("OMP_NUM_THREADS", ("omp_set_num_threads",)),
    "iomp": ("OMP_NUM_THREADS", ("omp_set_num_threads",)),
    "libomp": ("OMP_NUM_THREADS", ("omp_set_num_threads",)),
}


def limit(variables: Mapping[str, str]) -> None:
    """Set environment variables such as `OMP_NUM_THREADS`, and tell the libraries that have read
    them already."""
    os.environ.update(variables)
    for path in _loaded():
        for part, (variable, functions) in _LIBRARIES.items():
            count = variables.get(variable, "")
            if part in os.path.basename(path) and count.isdecimal():
                with contextlib.suppress(OSError):
                    _tell(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), functions, count)


def _tell(library: ctypes.CDLL, functions: tuple[str, ...], count: str) -> None:
    for name in functions:
        function = getattr(library, name, None)
        if function is not None:
            function(ctypes.c_int(int(count)))


def _loaded() -> Iterator[str]:
    """The files of the libraries in this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {fields[5].rstrip("\n") for line in maps if len(fields := line.split(None, 5)) == 6}
    yield from sorted(path for path in paths if path.startswith("/") and ".so" in path)
