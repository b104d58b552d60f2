"""The judge of a soak tells flat from growing, and its ledger notices lost messages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.soak import ledger
from chaos.soak.judge import Finding, Measure, Sample, judge, table
from chaos.soak.ledger import Ledger, Log, What

MEASURE = Measure("MiB", 0.05, 2.0, 1 << 20)


def findings(
    value: Callable[[int], float], count: int = 300, life: Callable[[int], int] = lambda _: 1
) -> Finding:
    samples = [
        Sample(at * 5.0, {"memory": value(at) * (1 << 20)}, {"memory": life(at)})
        for at in range(count)
    ]
    (found,) = judge(samples, {"memory": MEASURE})
    return found


def noise() -> Callable[[int], float]:
    choice = random.Random(1)
    return lambda _: choice.gauss(0, 1.5)


def test_noise_and_what_comes_and_goes_are_flat() -> None:
    jitter = noise()
    assert findings(lambda _: 30.0).flat
    assert findings(lambda at: 30 + jitter(at)).flat
    assert findings(lambda at: 30 + (25 if at % 7 == 0 else 0) + jitter(at)).flat
    assert findings(lambda at: 60 - at / 20).flat  # it shrinks
    assert findings(lambda at: 30 + 40 * (140 < at < 160)).flat  # it came back


def test_a_leak_is_not_however_small_beside_the_noise() -> None:
    jitter = noise()
    assert not findings(lambda at: 30 + at / 60 + jitter(at)).flat
    assert not findings(lambda at: 30 + 5 * (at > 180) + jitter(at)).flat  # a step that stays
    found = findings(lambda at: 100 + at / 30)
    assert (found.allowed, round(found.growth, 1), found.flat) == (
        pytest.approx(0.05 * found.first),
        6.7,
        False,
    )
    assert "GROWS" in table([found])


def test_what_is_not_known_is_not_flat() -> None:
    assert not findings(lambda _: 30.0, count=0).flat
    assert not findings(lambda _: 30.0, count=10).flat
    (missing,) = judge([Sample(1.0, {}, {})] * 100, {"memory": MEASURE})
    assert not missing.flat
    assert "NOT KNOWN" in table([missing])


def test_only_one_process_is_compared_with_itself() -> None:
    # the first process was killed: it was small, the next one is larger and flat
    assert findings(lambda at: 20 if at < 100 else 40, life=lambda at: 1 if at < 100 else 2).flat
    assert not findings(lambda at: 20 if at < 100 else 40).flat


@pytest.fixture
def book() -> Ledger:
    return Ledger(["t", "u"], [("t", "a"), ("t", "b"), ("u", "c")])


def test_the_ledger_finds_what_is_lost_and_nothing_else(book: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    for start in range(0, 1000, 100):
        log.write(What.OWED, 0, [(7, start + 100)])
        log.write(What.CAME, 0, [(7, number) for number in reversed(range(start, start + 100))])
        assert book.read(path)
    log.write(What.CAME, 1, [(7, number) for number in range(1000) if number not in (5, 999)])
    log.write(What.CAME, 1, [(7, 1000), (7, 1)])  # of a publish that a death cut off; one again
    log.write(What.COUNT, 3, [(0, 5), (0, 6)])
    log.write(What.OWED, 1, [(9, 4)])
    book.close(path)
    assert not path.exists()
    assert book.counts[3] == 11
    assert (book.published, book.again) == (1004, 1)
    assert sorted(book.missing()) == [("t/b", 7, 2), ("u/c", 9, 4)]
    book.forget([7, 8, 9])
    assert sorted(book.missing()) == [("t/b", 7, 2), ("u/c", 9, 4)]


def test_the_ledger_forgets_what_has_all_come(book: Ledger, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    for publisher in range(50):
        log.write(What.OWED, 0, [(publisher, 3)])
        for channel, number in itertools.product((0, 1), range(3)):
            log.write(What.CAME, channel, [(publisher, number)])
    book.read(tmp_path / "log")
    book.forget(range(50))
    assert not any(book._owed)
    assert not any(book._came)
    log.write(What.CAME, 0, [(3, 2), (3, 3)])  # again, and one that a death cut off
    book.read(tmp_path / "log")
    assert not any(book._came)
    assert (list(book.missing()), book.again) == ([], 2)


def test_a_record_that_a_death_cut_off_waits_for_its_rest(book: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    Log(path).write(What.OWED, 0, [(1, 1), (1, 2)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    book.read(path)
    assert book.published == 1
    path.write_bytes(whole)
    book.read(path)
    assert book.published == 2


def test_a_body_says_who_published_it() -> None:
    for size in (0, ledger.LEAST, 500):
        made = ledger.body(70_000, 1 << 40, size)
        assert ledger.parse(made) == (70_000, 1 << 40)
        assert len(made) == max(size, ledger.LEAST)
