"""joblib with shmq's workers: results, errors, lambdas, large arrays, nested calls."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from joblib.parallel import get_active_backend

import shmq.integrations.joblib as integration


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
