"""Every public class of what can be open has a row in tests/lifecycle."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
from lifecycle.covered import OTHERS, PACKAGES
from lifecycle.handles import ROWS
from support.processes import HELPERS

import shmq


def is_value(cls: type) -> bool:
    """Whether there is nothing to end: an error, a tuple, or a frozen record."""
    parameters = getattr(cls, "__dataclass_params__", None)
    return issubclass(cls, BaseException | tuple) or (
        dataclasses.is_dataclass(cls) and bool(parameters and parameters.frozen)
    )


def test_every_handle_has_a_row_in_the_matrix_of_ends() -> None:
    public = [getattr(shmq, name) for name in shmq.__all__]
    handles = {each for each in public if isinstance(each, type) and not is_value(each)}
    assert {shmq.Broker, shmq.Consumer, shmq.Message, shmq.RemoteBroker} <= handles
    covered = {cls for row in ROWS.values() for cls in row.covers}
    missing = sorted(cls.__name__ for cls in handles - covered)
    assert not missing, f"without a row in tests/lifecycle/handles.py: {missing}"


@pytest.mark.parametrize("name", PACKAGES)
def test_every_handle_for_programs_of_others_has_a_row(name: str) -> None:
    pytest.importorskip({"spark": "pyspark"}.get(name, name), reason=f"{name} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "lifecycle.covered", name],
        env={**os.environ, **HELPERS},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found, *missing = done.stdout.split()
    assert int(found) >= 2
    assert set(missing) <= set(OTHERS), f"without a row in tests/lifecycle/rows_of_{name}.py"
