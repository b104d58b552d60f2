"""The core against a plain model (`queue_model`): random operations of several clients and of the
supervisor in one process; after each, both hold the same messages in the same order, and an
independent recount of the segment (`recount`) finds nothing wrong.

SHMQ_HYPOTHESIS=long runs many more and longer examples.
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    initialize,
    run_state_machine_as_test,
)
from unit.model.base import CHANNELS
from unit.model.clients import Clients
from unit.model.supervisor import Supervisor

LONG = os.environ.get("SHMQ_HYPOTHESIS") == "long"
SETTINGS = settings(
    max_examples=10_000 if LONG else 150,
    stateful_step_count=200 if LONG else 100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


class Machine(Clients, Supervisor):
    """All rules together."""

    @initialize(
        channels=st.lists(st.sampled_from(CHANNELS), max_size=3),
        clients=st.integers(1, 3),
        count=st.integers(0, 60),
    )
    def begin(self, channels: list[str], clients: int, count: int) -> None:
        for _ in range(clients):
            self.somebody_attaches()
        for number, channel in enumerate(channels):
            self.consumer_opens(number, channel, 12, 0)
        if count:
            self.publish_batch(0, [20] * count, None)


def test_core_and_model_agree_after_some_operations() -> None:
    run_state_machine_as_test(Machine, settings=settings(SETTINGS, max_examples=25))


@pytest.mark.deep
@pytest.mark.timeout(20_000 if LONG else 900)
def test_core_and_model_agree_after_any_operations() -> None:
    run_state_machine_as_test(Machine, settings=SETTINGS)
