"""A backend of joblib whose workers are those of `shmq.Executor`, with the extra `joblib`.

    import joblib
    import shmq.integrations.joblib

    with joblib.parallel_config(backend="shmq", n_jobs=2):
        print(joblib.Parallel()(joblib.delayed(abs)(-number) for number in range(5)))

The import makes the name known to joblib, so everything that runs in parallel by joblib
(scikit-learn's `n_jobs`) can use it.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

try:
    from joblib import cpu_count, register_parallel_backend
    from joblib._parallel_backends import (
        AutoBatchingMixin,
        FallbackToBackend,
        ParallelBackendBase,
        SequentialBackend,
    )

    from shmq.integrations import arrays
except ImportError as exc:
    raise ImportError(
        "shmq.integrations.joblib needs joblib: install shmq with the extra `joblib`"
    ) from exc

from shmq.integrations import blas
from shmq.objects import unpack_nested
from shmq.pool import Executor

#: joblib's `max_nbytes`, if it names none.
_VIEWED: Final = 1 << 20
#: Keywords of `Parallel` that concern joblib itself, its temporary files, and its pools.
_JOBLIBS: Final = frozenset(
    {"max_nbytes", "mmap_mode", "temp_folder", "prefer", "require", "verbose", "context"}
)
#: Options of the backend.
_OPTIONS: Final = frozenset(inspect.signature(Executor).parameters) - {"max_workers"} | {
    "idle_worker_timeout"
}


class SharedMemoryBackend(AutoBatchingMixin, ParallelBackendBase):
    """Runs joblib's calls in an executor of its own, which lives as long as this object.

    backend_kwargs: keywords of `shmq.Executor`, as in
    `joblib.parallel_config(backend="shmq", broker=broker)` or `joblib.Parallel(backend="shmq",
    initializer=function)`; inner_max_num_threads, as of joblib; and idle_worker_timeout: seconds
    after a call when the workers end, None: with this object.

    Functions and results are pickled by joblib's cloudpickle, so lambdas and local functions are
    allowed. An array in the arguments that has more than joblib's `max_nbytes` is a read-only view
    of shared memory in the workers, as joblib's own memory maps are. With `max_nbytes=None`, or
    another `mmap_mode` than "r", it is a copy that may be changed, as smaller arrays and those in
    results are. An array that maps a file (`numpy.memmap`) is that file in the workers too, so what
    they write is seen. Numeric libraries use as many threads in each worker as joblib gives to its
    own. An error or a call that is too late ends the workers, as joblib ends its own.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    _executor: Executor | None = None
    _made_with: tuple[Any, ...] = ()
    _given: dict[str, Any] | None = None  # the keywords of the last call of `Parallel`
    _copied: int | None = None
    _opened: int | None = None
    _idle_after: float | None = None
    _idle: threading.Timer | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """The number of workers for the `n_jobs` of a caller: negative numbers count down from the
        number of processors, None means one. Raises ValueError for 0."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None or multiprocessing.current_process().daemon:
            return 1
        return n_jobs if n_jobs > 0 else max(cpu_count() + 1 + n_jobs, 1)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **given: Any) -> int:
        """Make the executor for a call of `Parallel`, unless the last one is as this call needs it.

        given: keywords of `Parallel`. Raises TypeError for one that neither joblib nor
        `shmq.Executor` has, and what `shmq.Executor` raises.
        """
        workers = self.effective_n_jobs(n_jobs)
        if workers == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel, self._given = parallel, given
        self._stay()
        options = self.backend_kwargs | given
        most = options.get("max_nbytes", _VIEWED)
        views = options.get("mmap_mode", "r") == "r"
        self._copied = most if views else None
        self._opened = None if views else most
        options = {name: value for name, value in options.items() if name not in _JOBLIBS}
        wrong = options.keys() - _OPTIONS
        if wrong:
            raise TypeError(
                f"the joblib backend 'shmq' has no option {', '.join(map(repr, sorted(wrong)))}; "
                f"it has {', '.join(sorted(_OPTIONS))}"
            )
        self._idle_after = options.pop("idle_worker_timeout", None)
        made_with = workers, self._threads(workers), options
        if self._executor is None or not _same(made_with, self._made_with):
            if self._executor is not None:
                self._executor.shutdown(cancel_futures=True)
            self._executor = Executor(max_workers=workers, **_begun(made_with[1], **options))
            self._made_with = made_with
        return workers

    def _threads(self, workers: int) -> dict[str, str]:
        """The variables of a worker for the threads of numeric libraries. Those of the user hold,
        unless `inner_max_num_threads` says more."""
        if self.inner_max_num_threads is not None:
            return dict.fromkeys(self.MAX_NUM_THREADS_VARS, str(self.inner_max_num_threads))
        each = str(max(cpu_count() // workers, 1))
        return {name: os.environ.get(name, each) for name in self.MAX_NUM_THREADS_VARS}

    def submit(
        self, func: Callable[[], Any], callback: Callable[[Future[Any]], None] | None = None
    ) -> Future[Any]:
        """Schedule a batch of calls."""
        assert self._executor is not None
        future = self._executor.submit(_run, _Call(func, self._copied, self._opened))
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """The results of a batch. Raises what a call of it raised."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel the batches that no worker has begun, and kill the workers, as joblib does with
        its own: a call that failed or was too late may run for ever. The workers of a durable pool
        stay, since others use them."""
        executor, self._executor = self._executor, None
        if executor is not None:
            if executor.durable:
                executor.shutdown(wait=False, cancel_futures=True)
            else:
                executor.kill_workers()
        if ensure_ready:
            given = self._given or {}
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel, **given)

    def terminate(self) -> None:
        """End a call of `Parallel`. The workers stay for the next one."""
        self.reset_batch_stats()
        if self._idle_after is not None and self._executor is not None:
            self._idle = threading.Timer(self._idle_after, self._executor.shutdown)
            self._idle.daemon = True
            self._idle.start()

    def _stay(self) -> None:
        """Another call begins: the workers are not idle any more."""
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.cancel()
            idle.join()
            if self._executor is not None and self._executor.has_ended:
                self._executor = None


class _Call:
    """An object that arrives as cloudpickle restores it."""

    def __init__(self, value: Any, copied: int | None = None, opened: int | None = None) -> None:
        """copied: its buffers of at most so many bytes are copies, which programs may change, and
        the others are views; None: all are copies. opened: as of `arrays.dumps`."""
        self.value = value
        self._copied, self._opened = copied, opened

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        buffers: list[pickle.PickleBuffer] = []
        keep = buffers.append
        pickled = arrays.dumps(self.value, keep, self._opened)
        return _arrived, (pickled, buffers, self._copied)


def _arrived(pickled: bytes, buffers: list[Any], copied: int | None) -> Any:
    """An object in its new process. Small buffers are in the pickle, and not views."""
    found = [
        bytearray(buffer)
        if isinstance(buffer, memoryview) and (copied is None or buffer.nbytes <= copied)
        else buffer
        for buffer in buffers
    ]
    return unpack_nested(pickled, found)


def _run(call: Any) -> _Call:
    return _Call(call())


def _begun(
    threads: dict[str, str],
    initializer: Callable[..., object] | None = None,
    initargs: tuple[Any, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """The keywords of an executor whose workers begin with these variables."""
    return options | {
        "initializer": _begin,
        "initargs": (threads, _Call((initializer, initargs))),
    }


def _begin(threads: dict[str, str], call: Any) -> None:
    """A worker begins. call: of the caller's initializer; a forked worker inherits it as it is."""
    blas.limit(threads)
    initializer, initargs = call.value if isinstance(call, _Call) else call
    if initializer is not None:
        initializer(*initargs)


def _same(left: Any, right: Any) -> bool:
    """Whether two settings are equal. An argument may be an array, which is not comparable."""
    try:
        return bool(left == right)
    except Exception:
        return False


register_parallel_backend("shmq", SharedMemoryBackend)
