"""joblib with shmq's workers: results, errors, lambdas, large arrays, nested calls."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from joblib.parallel import get_active_backend
from support.processes import wait_ended

import shmq.integrations.joblib as integration
from shmq.integrations import blas


@pytest.fixture
def backend() -> Iterator[Any]:
    """The backend of this test's calls, with two workers. Its workers end with the test."""
    with joblib.parallel_config(backend="shmq", n_jobs=2):
        active, _ = get_active_backend()
        assert isinstance(active, integration.SharedMemoryBackend)
        yield active
        active.abort_everything(ensure_ready=False)


def run(calls: Any, **options: Any) -> Any:
    return joblib.Parallel(**options)(calls)


@pytest.mark.usefixtures("backend")
def test_results_come_in_the_order_of_the_calls() -> None:
    assert run(joblib.delayed(divmod)(number, 7) for number in range(200)) == [
        divmod(number, 7) for number in range(200)
    ]


@pytest.mark.usefixtures("backend")
def test_the_work_is_done_in_other_processes() -> None:
    found = run(joblib.delayed(os.getpid)() for _ in range(4))
    assert os.getpid() not in found


def test_one_executor_serves_call_after_call(backend: Any) -> None:
    first = set(run((joblib.delayed(os.getpid)() for _ in range(20)), batch_size=1))
    executor = backend._executor
    second = set(run((joblib.delayed(os.getpid)() for _ in range(20)), batch_size=1))
    assert backend._executor is executor
    assert len(first | second) <= 2


@pytest.mark.usefixtures("backend")
def test_lambdas_and_local_functions_travel_in_both_directions() -> None:
    factor = 3
    functions = run(
        joblib.delayed(lambda n: lambda x: factor * n * x)(number) for number in range(4)
    )
    assert [function(5) for function in functions] == [0, 15, 30, 45]


@pytest.mark.usefixtures("backend")
def test_large_arguments_are_views_and_large_results_may_be_changed() -> None:
    array = np.arange(1 << 20, dtype=np.float64)

    def work(given: Any) -> tuple[bool, bool, Any]:
        return given.flags.writeable, given.flags.owndata, given + 1

    for writable, own, result in run(joblib.delayed(work)(array) for _ in range(3)):
        assert not writable
        assert not own
        result += 1
        np.testing.assert_array_equal(result, array + 2)


@pytest.mark.usefixtures("backend")
def test_an_error_of_a_call_is_raised_and_the_next_call_works() -> None:
    with pytest.raises(ZeroDivisionError):
        run(joblib.delayed(divmod)(1, number) for number in (1, 0, 2))
    assert run(joblib.delayed(abs)(-number) for number in range(3)) == [0, 1, 2]


@pytest.mark.usefixtures("backend")
def test_a_pool_that_is_kept_works_after_an_error() -> None:
    with joblib.Parallel() as parallel:
        with pytest.raises(ZeroDivisionError):
            parallel(joblib.delayed(divmod)(1, number) for number in (1, 0, 2))
        assert parallel(joblib.delayed(abs)(-number) for number in range(3)) == [0, 1, 2]


@pytest.mark.usefixtures("backend")
def test_a_killed_worker_costs_one_more_run_of_its_batch(tmp_path: Path) -> None:
    def work(number: int) -> int:
        if number == 3:
            with contextlib.suppress(FileExistsError):
                (tmp_path / "begun").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return number

    assert run(joblib.delayed(work)(number) for number in range(10)) == list(range(10))


@pytest.mark.usefixtures("backend")
def test_nested_calls_run_in_threads_of_the_worker() -> None:
    def inner(number: int) -> tuple[int, int]:
        return os.getpid(), number

    def outer(number: int) -> tuple[int, list[tuple[int, int]]]:
        calls = (joblib.delayed(inner)(10 * number + each) for each in range(3))
        return os.getpid(), joblib.Parallel(n_jobs=2)(calls)

    for number, (pid, found) in enumerate(run(joblib.delayed(outer)(each) for each in range(4))):
        assert found == [(pid, 10 * number + each) for each in range(3)]


@pytest.mark.usefixtures("backend")
def test_results_can_be_taken_as_they_come() -> None:
    found = run(
        (joblib.delayed(abs)(-number) for number in range(50)), return_as="generator_unordered"
    )
    assert sorted(found) == list(range(50))


def test_the_number_of_workers_is_as_joblib_counts() -> None:
    counted = integration.SharedMemoryBackend(nesting_level=0)
    assert counted.effective_n_jobs(3) == 3
    assert counted.effective_n_jobs(None) == 1
    assert counted.effective_n_jobs(-1) == joblib.cpu_count()
    assert counted.effective_n_jobs(-10_000) == 1
    with pytest.raises(ValueError, match="n_jobs == 0"):
        counted.effective_n_jobs(0)


def test_one_job_needs_no_executor(backend: Any) -> None:
    assert run((joblib.delayed(os.getpid)() for _ in range(3)), n_jobs=1) == [os.getpid()] * 3
    assert backend._executor is None


def test_without_joblib_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "joblib", None)
    monkeypatch.delitem(sys.modules, "shmq.integrations.joblib")
    with pytest.raises(ImportError, match="extra `joblib`"):
        __import__("shmq.integrations.joblib")


# ---- options of joblib ----


def change(array: Any) -> float:
    array[0] = 1.0
    return float(array[0])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("nbytes", "options", "may"),
    [
        (200_000, {}, True),
        (8 << 20, {}, False),
        (8 << 20, {"max_nbytes": None}, True),
        (8 << 20, {"max_nbytes": "16M"}, True),
        (8 << 20, {"mmap_mode": "c"}, True),
        (200_000, {"max_nbytes": 100_000}, False),
    ],
)
@pytest.mark.parametrize("name", ["shmq", "loky"])
def test_an_array_may_be_changed_when_joblibs_own_may(
    nbytes: int, options: dict[str, Any], may: bool, name: str
) -> None:
    calls = (joblib.delayed(change)(np.zeros(nbytes // 8)) for _ in range(2))
    expected = contextlib.nullcontext() if may else pytest.raises(ValueError, match="read-only")
    with joblib.parallel_config(backend=name, n_jobs=2), expected:
        assert run(calls, **options) == [1.0, 1.0]


def threads_of_a_worker() -> tuple[str | None, set[int]]:
    """The variable that a library reads which is loaded later, and the threads of the loaded."""
    np.ones((4, 4)) @ np.ones((4, 4))
    found = set()
    for path in blas._loaded():
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD) if "openblas" in path else None
        for name in blas._OPENBLAS:
            function = getattr(library, name.replace("_set_", "_get_"), None)
            if function is not None:
                found.add(function())
    return os.environ.get("OMP_NUM_THREADS"), found


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("inner", [None, 3])
def test_numeric_libraries_use_as_many_threads_as_joblib_says(
    method: str, inner: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "cpu_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    options = {} if inner is None else {"inner_max_num_threads": inner}
    context = multiprocessing.get_context(method)
    with joblib.parallel_config(backend="shmq", n_jobs=2, mp_context=context, **options):
        variable, threads = run(joblib.delayed(threads_of_a_worker)() for _ in range(2))[0]
    assert variable == str(inner or 2)
    assert threads == {inner or 2}
    assert "OMP_NUM_THREADS" not in os.environ


def keep(value: Any) -> None:
    builtins.kept = value  # type: ignore[attr-defined]


def kept() -> Any:
    return builtins.kept  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_options_are_honoured_wherever_they_are_given(method: str) -> None:
    calls = [joblib.delayed(kept)() for _ in range(4)]
    begun: dict[str, Any] = {
        "initializer": lambda value: keep(value * 2),
        "initargs": (2,),
        "mp_context": multiprocessing.get_context(method),
    }
    assert run(calls, backend="shmq", n_jobs=2, **begun) == [4] * 4
    with joblib.parallel_config(backend="shmq", n_jobs=2, **begun):
        assert run(calls) == [4] * 4


def test_an_option_that_nobody_has_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no option 'atempts'.* attempts, .*idle_worker_timeout"):
        run([joblib.delayed(abs)(-1)], backend="shmq", n_jobs=2, atempts=3)
    with pytest.raises(TypeError, match="attempts must be a whole number"):
        run([joblib.delayed(abs)(-1)], backend="shmq", n_jobs=2, attempts="nonsense")


def test_workers_end_when_they_were_idle_for_as_long_as_they_may() -> None:
    calls = [joblib.delayed(os.getpid)() for _ in range(4)]
    with joblib.parallel_config(backend="shmq", n_jobs=2, idle_worker_timeout=0.01):
        first = set(run(calls))
        for pid in first:
            wait_ended(pid)
        assert not first & set(run(calls))


def fill(array: Any, index: int) -> tuple[str, Any]:
    array[index] = index + 1
    return type(array).__name__, array


PARTS: dict[str, Any] = {
    "all": lambda mapped: mapped,
    "a range": lambda mapped: mapped[3:],
    "a column": lambda mapped: mapped.reshape(8, 8)[:, 2],
    "backwards": lambda mapped: mapped[::-1],
    "every third": lambda mapped: mapped[60:5:-3],
    "an array": lambda mapped: np.asarray(mapped)[1:40],
    "Fortran": lambda mapped: mapped.reshape(8, 8).T.reshape(-1, order="F"),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("offset", [0, 24])
@pytest.mark.usefixtures("backend")
def test_what_workers_write_into_a_mapped_file_is_in_the_file(
    part: str, offset: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    mapped = np.memmap(path, "i8", "w+", offset, (64,))
    array = PARTS[part](mapped)
    found = run(joblib.delayed(fill)(array, index) for index in range(4))
    assert list(array[:4]) == [1, 2, 3, 4]
    assert sorted(np.memmap(path, "i8", "r", offset))[-5:] == [0, 1, 2, 3, 4]
    for _, back in found:  # a result is the file, too
        array[5] += 1
        assert back[5] == array[5]
        assert back.shape == array.shape


@pytest.mark.usefixtures("backend")
def test_a_file_mapped_for_reading_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(800))
    array = np.memmap(tmp_path / "file", "i8", "r")
    with pytest.raises(ValueError, match="read-only"):
        run(joblib.delayed(fill)(array, index) for index in range(2))


@pytest.mark.parametrize("name", ["shmq", "loky"])
def test_a_read_only_array_may_be_changed_where_the_mode_says_so(name: str) -> None:
    array = np.zeros(1 << 18)
    array.flags.writeable = False
    with joblib.parallel_config(backend=name, n_jobs=2):
        calls = [joblib.delayed(change)(array) for _ in range(2)]
        assert run(calls, mmap_mode="c") == [1.0, 1.0]
        with pytest.raises(ValueError, match="read-only"):
            run(calls)


def sleep_for_ever(pids: Path) -> None:
    (pids / str(os.getpid())).touch()
    while True:
        signal.pause()


@pytest.mark.usefixtures("backend")
def test_a_call_that_is_too_late_is_killed(tmp_path: Path) -> None:
    with pytest.raises(multiprocessing.TimeoutError):
        run([joblib.delayed(sleep_for_ever)(tmp_path) for _ in range(2)], timeout=0.2)
    for path in tmp_path.iterdir():
        wait_ended(int(path.name))
    assert run([joblib.delayed(abs)(-1)]) == [1]


def raise_local() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("of a function")


@pytest.mark.usefixtures("backend")
def test_an_exception_of_a_local_class_arrives() -> None:
    with pytest.raises(Exception, match="of a function") as caught:
        run([joblib.delayed(raise_local)()])
    assert type(caught.value).__name__ == "LocalError"


def test_an_exception_of_the_main_script_is_caught_by_its_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import joblib\n"
        "import shmq.integrations.joblib\n"
        "class MyError(Exception): pass\n"
        "def f():\n"
        "    raise MyError('mine')\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        joblib.Parallel(backend='shmq', n_jobs=2)([joblib.delayed(f)()])\n"
        "    except MyError as exc:\n"
        "        print('caught', exc)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ended.stdout == "caught mine\n", ended.stderr
