"""Random programs do the same on the original and on shmq: samples of `tools/dev differ`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from differ import differences, planted
from differ.machine import Run
from support.external_programs import REMEDIES, found, peer

SEED = "suite"
#: Programs in `tools/dev test`, and in `--all`.
FEW, MANY = 60, 300
#: The kind whose programs find a planted fault, if not the standard library's, and what it needs.
KINDS = {"smaller_limit": "nsqd", "result_cut_in_silence": "joblib", "queue_starves": "celery"}
PEERS = {"nsqd": "nsqd", "celery": "redis-server", "dramatiq": "redis-server"}


def differ(kind: str, programs: int, fault: str = "") -> list[str]:
    """Run so many programs. Returns what differed."""
    if kind in PEERS:
        name = PEERS[kind]
        if name == "redis-server" and sys.version_info >= (3, 13) and not found(name):
            pytest.skip(REMEDIES[name])  # tools/dev has none for this Python
        peer(name)
    run = Run(kind, SEED, fault)
    run.run(programs)
    assert run.done
    return run.findings


@pytest.mark.shallow
def test_programs_of_the_standard_library_do_the_same() -> None:
    assert not differ("stdlib", FEW)


@pytest.mark.deep
def test_many_programs_of_the_standard_library_do_the_same() -> None:
    assert not differ("stdlib", MANY)


@pytest.mark.shallow
def test_programs_of_joblib_do_the_same() -> None:
    assert not differ("joblib", FEW // 30)


@pytest.mark.deep
def test_many_programs_of_joblib_do_the_same() -> None:
    assert not differ("joblib", FEW // 6)


@pytest.mark.peers
@pytest.mark.shallow
def test_programs_of_nsqds_clients_do_the_same() -> None:
    assert not differ("nsqd", FEW // 3)


@pytest.mark.peers
@pytest.mark.deep
def test_many_programs_of_nsqds_clients_do_the_same() -> None:
    assert not differ("nsqd", MANY // 3)


@pytest.mark.peers
@pytest.mark.shallow
def test_programs_of_celery_do_the_same() -> None:
    assert not differ("celery", FEW // 10)


@pytest.mark.peers
@pytest.mark.deep
def test_many_programs_of_celery_do_the_same() -> None:
    assert not differ("celery", FEW // 3)


@pytest.mark.peers
@pytest.mark.shallow
def test_programs_of_dramatiq_do_the_same() -> None:
    assert not differ("dramatiq", FEW // 15)


@pytest.mark.peers
@pytest.mark.deep
def test_many_programs_of_dramatiq_do_the_same() -> None:
    assert not differ("dramatiq", FEW // 6)


@pytest.mark.parametrize("fault", planted.FAULTS)
@pytest.mark.deep
def test_a_planted_fault_is_found(fault: str) -> None:
    assert differ(KINDS.get(fault, "stdlib"), 1000, fault)


def test_a_difference_without_a_row_is_none_that_is_wanted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- differ: some -->\n\n| a | b | c | d |\n|---|---|---|---|\n"
        "| `Queue.put of *` | `None` | `TypeError` | because |\n| for readers | no | yes | so |\n"
        "\n# Next\n\n| `*` | `*` | `*` | of no section |\n"
    )
    (row,) = differences.rows("some", page)
    assert row.covers("Queue.put of lock", "None", "TypeError")
    assert not row.covers("Queue.put of lock", "None", "ValueError")
    assert not row.covers("Queue.get", "None", "TypeError")


def test_a_row_without_a_reason_is_none(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- differ: some -->\n| `Queue.put` | `None` | `TypeError` |  |\n")
    with pytest.raises(ValueError, match=r"page\.md:2"):
        differences.rows("some", page)
