"""A backend of joblib whose workers are those of `shmq.Executor`, with the extra `joblib`.

    import joblib
    import shmq.integrations.joblib

    with joblib.parallel_config(backend="shmq", n_jobs=2):
        print(joblib.Parallel()(joblib.delayed(abs)(-number) for number in range(5)))

The import makes the name known to joblib, so everything that runs in parallel by joblib
(scikit-learn's `n_jobs`) can use it.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

try:
    import cloudpickle
    from joblib import cpu_count, register_parallel_backend
    from joblib._parallel_backends import (
        AutoBatchingMixin,
        FallbackToBackend,
        ParallelBackendBase,
        SequentialBackend,
    )
except ImportError as exc:
    raise ImportError(
        "shmq.integrations.joblib needs joblib: install shmq with the extra `joblib`"
    ) from exc

from shmq.objects import unpack_nested
from shmq.pool import Executor

_PROTOCOL: Final = 5


class SharedMemoryBackend(AutoBatchingMixin, ParallelBackendBase):
    """Runs joblib's calls in an executor of its own, which lives as long as this object.

    backend_kwargs: keywords of `shmq.Executor`, as in
    `joblib.parallel_config(backend="shmq", broker=broker)`.

    Functions and results are pickled by joblib's cloudpickle, so lambdas and local functions are
    allowed. Large arrays in the arguments are read-only views of shared memory in the workers, as
    joblib's own memory maps are; large arrays in results are copies that may be changed.
    """

    supports_retrieve_callback = True
    _executor: Executor | None = None
    _workers = 0

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """The number of workers for the `n_jobs` of a caller: negative numbers count down from the
        number of processors, None means one. Raises ValueError for 0."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None or multiprocessing.current_process().daemon:
            return 1
        return n_jobs if n_jobs > 0 else max(cpu_count() + 1 + n_jobs, 1)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **ignored: Any) -> int:
        """Make the executor for a call of `Parallel`, unless the last one has as many workers.

        ignored: joblib's settings of its memory maps and processes.
        """
        workers = self.effective_n_jobs(n_jobs)
        if workers == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        if self._executor is None or workers != self._workers:
            self._end(wait=True)
            self._executor = Executor(max_workers=workers, **self.backend_kwargs)
            self._workers = workers
        return workers

    def submit(
        self, func: Callable[[], Any], callback: Callable[[Future[Any]], None] | None = None
    ) -> Future[Any]:
        """Schedule a batch of calls."""
        assert self._executor is not None
        future = self._executor.submit(_run, _Call(func))
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """The results of a batch. Raises what a call of it raised."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel the batches that no worker has begun."""
        self._end(wait=False)
        if ensure_ready:
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)

    def terminate(self) -> None:
        """End a call of `Parallel`. The workers stay for the next one."""
        self.reset_batch_stats()

    def _end(self, wait: bool) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=wait, cancel_futures=True)
            self._executor = None


class _Call:
    """An object that arrives as cloudpickle restores it, with views of its large buffers."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _views, _pickled(self.value)


class _Result(_Call):
    """The same, with copies of its buffers: programs change the results of joblib in place."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _copies, _pickled(self.value)


def _run(call: Any) -> _Result:
    return _Result(call())


def _pickled(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return cloudpickle.dumps(value, protocol=_PROTOCOL, buffer_callback=buffers.append), buffers


def _views(pickled: bytes, buffers: list[Any]) -> Any:
    return unpack_nested(pickled, buffers)


def _copies(pickled: bytes, buffers: list[Any]) -> Any:
    return unpack_nested(pickled, [bytearray(buffer) for buffer in buffers])


register_parallel_backend("shmq", SharedMemoryBackend)
