"""A supervisor that takes over finishes the deletions that a death cut short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.in_process_broker import World

from shmq.layout import EntryState
from shmq.supervisor import adoption


@pytest.mark.parametrize("again", [False, True])
def test_the_files_of_a_queue_that_was_made_again_stay(again: bool) -> None:
    """Its entry may outlive a deletion that had no lock for it; its files are gone then."""
    erased: list[str] = []
    with World() as world:
        queue = world.create_queue("t", "c")
        world.create_queue("t", "d")
        assert world.supervisor.erase_queue(*queue)
        if again:
            world.create_queue("t", "c")
        manager: Any = SimpleNamespace(instance="test-deletions", erase_files=erased.append)
        adoption._finish_deletions(world.supervisor, world.directory, manager, ours=True)
        assert not world.directory.queues_in(EntryState.ERASING)
        assert len(world.directory.live_queues()) == 1 + again
    assert erased == ([] if again else ["t:c"])
