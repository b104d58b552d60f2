"""Ten faults around the core are planted, and each is found by a machine in every run of
`tools/dev test --all`."""

from __future__ import annotations

import re

import pytest
from differ.planted import FAULTS
from lifecycle.plants import PLANTS as OF_LIFECYCLE
from limits.planted import PLANTS as OF_LIMITS
from support.processes import TESTS

#: The machines, the lists of what is planted for them, and the names that their tests have for
#: these.
MACHINES = {
    "lifecycle": (OF_LIFECYCLE, r"plants\.PLANTS"),
    "limits": (OF_LIMITS, r"PLANTS"),
    "differ": (FAULTS, r"(planted\.)?FAULTS"),
}
#: The fault, the machine that finds it, its name there.
TEN = {
    "a permit is not given back": ("lifecycle", "permit"),
    "a store of a dead owner is kept": ("lifecycle", "store"),
    "an outcome is stored twice": ("differ", "stored_twice"),
    "a wait does not look": ("limits", "no_look"),
    "a limit is believed from a stale value": ("limits", "stale_limit"),
    "an order of queues starves one": ("differ", "starves"),
    "a result is cut in silence": ("differ", "cut_in_silence"),
    "a lock is inherited": ("lifecycle", "lock"),
    "a signal mask is inherited": ("lifecycle", "mask"),
    "a name is used again": ("lifecycle", "name"),
}


@pytest.mark.parametrize("fault", TEN)
def test_each_fault_is_planted(fault: str) -> None:
    machine, name = TEN[fault]
    assert name in MACHINES[machine][0]


def test_there_are_ten() -> None:
    assert len(TEN) == len(set(TEN.values())) == 10


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_has_a_test_for_each_of_its_plants(machine: str) -> None:
    """One test with the list as its parameter, which `--all` does not leave out."""
    source = "\n".join(path.read_text() for path in (TESTS / machine).glob("test_*.py"))
    list_ = MACHINES[machine][1]
    marked = (
        rf'((?:@.*\n)*)@pytest\.mark\.parametrize\("\w+", {list_}\)\n((?:@.*\n)*)def test_a_planted'
    )
    found = re.search(marked, source)
    assert found, f"no test in {machine} is parametrized with its plants"
    assert "shallow" not in found[0]
