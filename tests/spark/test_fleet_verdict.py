"""Stories of a stream from many instances, told true and broken at one place."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from chaos.fleet.verdict import NAMED, Files, Loss, Row, Story, judge
from support.external_programs import peer
from support.processes import ROOT, TESTS

LOST = [("DataLoss", "a micro-batch of t/c of instance 'a:1' (lease 3) is not there any more")]
PUBLISHED = {1000 + number: number for number in range(6)}


class Told:
    """A story, what came, and which errors ended a query."""

    def __init__(self) -> None:
        self.story = Story(dict(PUBLISHED))
        self.rows = [Row(id, number, 1) for id, number in PUBLISHED.items()]
        self.named: list[tuple[str, str]] = []

    def problems(self) -> list[str]:
        return judge(self.story, self.rows, self.named)

    def without(self, *numbers: int) -> None:
        self.rows = [row for row in self.rows if row.number not in numbers]


def plain() -> Told:
    return Told()


def lost() -> Told:
    """0 waited in memory that was lost; 1 and 2 were leased there, and 3, which had come."""
    told = Told()
    told.story.losses.append(Loss("a:1", {0}, {7: {1, 2}, 8: {3}}))
    told.without(0, 1, 2)
    told.named = list(LOST)
    return told


def stalled() -> Told:
    """0 and 1 were leased while the driver was stopped, and 0 was processed before."""
    told = Told()
    told.story.risked, told.story.stalls = {0, 1}, 1
    told.rows += [Row(1000, 0, 2)]
    told.rows[1] = Row(1001, 1, 2)
    told.named = [("LeaseLost", "lease 3 is over")]
    return told


def replaced() -> Told:
    """A driver was stopped, and its tasks read later what another one had finished."""
    told = Told()
    told.story.seconds = 1
    told.named = [("LeaseLost", "read part 0 of lease 3 of t/c: it is not held any more")]
    return told


@pytest.mark.parametrize("tell", [plain, lost, stalled, replaced])
def test_a_true_story_has_no_problems(tell: Callable[[], Told]) -> None:
    assert tell().problems() == []


BREAKS: list[tuple[Callable[[], Told], Callable[[Told], object], str]] = [
    (plain, lambda told: told.without(4), "4 did not come"),
    (plain, lambda told: told.rows.append(told.rows[4]), "4 came 2 times"),
    (plain, lambda told: told.rows.append(Row(9, 4, 1)), "was not published"),
    (plain, lambda told: told.rows.append(Row(1004, 5, 1)), "was not published"),
    (plain, lambda told: told.rows.__setitem__(4, Row(1004, 4, 2)), "4 came in attempt 2"),
    (plain, lambda told: told.named.extend(LOST), "DataLoss without a reason"),
    (replaced, lambda told: setattr(told.story, "seconds", 0), "LeaseLost without a reason"),
    (replaced, lambda told: told.named.append(("LeaseLost", "finish")), "without a reason: finish"),
    (replaced, lambda told: told.rows.append(told.rows[4]), "4 came 2 times"),
    (lost, lambda told: told.without(4), "4 did not come"),
    (lost, lambda told: told.rows.append(Row(1000, 0, 1)), "0 waited in memory that was lost"),
    (lost, lambda told: told.rows.append(Row(1001, 1, 1)), "lease 7 of lost memory came in part"),
    (lost, lambda told: told.rows.append(Row(1003, 3, 1)), "3 came 2 times"),
    (lost, lambda told: told.named.clear(), "nobody said so"),
    (stalled, lambda told: told.named.clear(), "0 came 2 times"),
    (stalled, lambda told: told.without(1), "1 did not come"),
    (stalled, lambda told: told.rows.append(Row(1004, 4, 1)), "4 came 2 times"),
    (stalled, lambda told: told.rows.__setitem__(4, Row(1004, 4, 2)), "4 came in attempt 2"),
]


@pytest.mark.parametrize(("tell", "break_it", "problem"), BREAKS)
def test_a_broken_story_is_found(
    tell: Callable[[], Told], break_it: Callable[[Told], object], problem: str
) -> None:
    told = copy.deepcopy(tell())
    break_it(told)
    assert any(problem in each for each in told.problems())


def test_only_files_of_the_log_count(tmp_path: Path) -> None:
    def write(name: str, number: int) -> str:
        columns = {"id": [1000 + number], "body": [b"%d" % number], "attempts": [1]}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / name)
        return json.dumps({"path": f"file://{tmp_path / name}", "action": "add"})

    log = tmp_path / "_spark_metadata"
    log.mkdir()
    entries = [write(f"part {number}.parquet", number) for number in range(4)]
    files = Files(tmp_path)
    (log / "0").write_text("v1\n" + entries[0].replace("part 0", "part%200"))
    assert files.read() == 1
    (log / "1.compact").write_text("\n".join(["v1", *entries[:2]]))
    (log / ".2.tmp").write_text("v1\n" + entries[3])
    assert files.read() == 2
    assert files.rows == [Row(1000, 0, 1), Row(1001, 1, 1)]


def test_errors_are_named_as_spark_prints_them() -> None:
    said = "STREAM_FAILED\nshmq.spark.chain.DataLoss: a micro-batch\n  at a.b\nHostAway: read t/c"
    assert NAMED.findall(said) == [("DataLoss", "a micro-batch"), ("HostAway", "read t/c")]


@pytest.mark.parametrize("path", sorted((TESTS / "chaos" / "fleet" / "mutants").glob("*.patch")))
def test_the_planted_faults_fit_the_package(path: Path) -> None:
    assert re.search(r"^Found by: \w+(,\w+)*( --write)?$", path.read_text(), re.MULTILINE)
    words = [peer("patch"), "--dry-run", "--fuzz=0", "-p1", "-d", str(ROOT), "-i", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"make the change again, see tools/chaos/fleet_mutants.py\n{done}"
