"""The chronicle: its rings wrap, and nothing that is in it can harm a reader or the next writer."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmq import chronicle, deaths, history, shm
from shmq.chronicle import COLUMNS, COUNTERS, Chronicle, Plan
from shmq.deaths import Held, How, Lock, Report
from shmq.errors import Gone, LayoutMismatch, NotRunning
from shmq.layout import ClientKind
from shmq.options import OptionError, Options
from shmq.ownership import NotTrusted

BUDGET = 4 << 20
NOW = 1_800_000_000 * 10**9 + 5 * 10**8
SECOND = 10**9


@pytest.fixture
def instance() -> Iterator[str]:
    name = f"test-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    shm.unlink_instance(name)
    assert not os.path.lexists(shm.path_of(shm.history_name(name)))


@pytest.fixture
def source(instance: str) -> Iterator[Chronicle]:
    with chronicle.open_or_make(instance, BUDGET, 0o600, shm.NO_GROUP) as made:
        yield made


@pytest.fixture(autouse=True)
def _at_now(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, NOW)


def set_clock(monkeypatch: pytest.MonkeyPatch, now: int) -> None:
    monkeypatch.setattr(history.time, "time_ns", lambda: now)


def path(instance: str) -> str:
    return shm.path_of(shm.history_name(instance))


def record(source: Chronicle, when: int, published: int, region: str = "seconds") -> None:
    """One second or minute that ends at `when`, with a channel of serial 7."""
    length = 10**9 if region == "seconds" else 60 * 10**9
    row = source.blank(region)
    row["time"], row["span"], row["queues"] = when, length / 1e9, 1
    row["totals"][0, COLUMNS.index("published")] = published
    row["serials"][0, 0] = 7
    numbers = np.zeros((1, len(COLUMNS)), np.int64)
    numbers[0, COLUMNS.index("published")] = published
    row["rows"][0, :1] = chronicle.shorten(numbers)
    source.write(region, when // length, row)


def name(source: Chronicle, place: int, serial: int, topic: str, channel: str | None) -> None:
    row = source.blank("names")
    row["serial"], row["is_channel"] = serial, channel is not None
    row["topic"], row["channel"] = topic.encode(), (channel or "").encode()
    source.write("names", place, row)


# ---- room ----


@pytest.mark.parametrize("budget", [shm.LEAST_HISTORY, BUDGET, 10 << 20, 64 << 20, 1 << 30])
def test_a_plan_keeps_its_budget(budget: int) -> None:
    plan = Plan.of(budget)
    assert 0.75 * budget < plan.size <= budget or plan.second_rows == 16384
    assert plan.minute_rows >= plan.second_rows
    assert plan.names >= 4 * (plan.second_rows + plan.minute_rows) or plan.names >= 512


def test_the_default_budget_has_room_for_single_channels() -> None:
    plan = Plan.of(Options().history_bytes)
    assert plan.second_rows >= 8
    assert plan.minute_rows >= 30


@pytest.mark.parametrize("budget", [-1, 1, shm.LEAST_HISTORY - 1, (1 << 30) + 1])
def test_an_impossible_budget_is_refused(budget: int) -> None:
    with pytest.raises(OptionError, match="history"):
        Options(history_bytes=budget)


@given(st.lists(st.integers(0, (1 << 42) - 1), min_size=1))
def test_a_short_number_is_almost_exact(numbers: list[int]) -> None:
    wide = np.array(numbers)
    found = chronicle.lengthen(chronicle.shorten(wide))
    assert (found <= wide).all()
    assert ((wide - found) * 1000 <= wide).all()
    assert (found[wide < 2048] == wide[wide < 2048]).all()


# ---- the rings ----


@pytest.mark.parametrize(("period", "most"), [("second", 3600), ("minute", 1440)])
def test_a_ring_keeps_the_last_ones(
    source: Chronicle, period: history.Period, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = SECOND if period == "second" else 60 * SECOND
    name(source, 3, 7, "t", "c")
    ends = [NOW // length * length - 1 - back * length for back in reversed(range(most + 400))]
    for number, when in enumerate(ends):
        record(source, when, number % 2000, f"{period}s")
    found = history.read_from(source, period)
    kept = most - 1  # the running one is not written yet
    assert found.totals.time.tolist() == ends[-kept:]
    assert found.totals.published.tolist() == [number % 2000 for number in range(len(ends))][-kept:]
    assert found.channels["t", "c"].time.tolist() == ends[-kept:]
    assert len(found.channels) == 1

    new = history.read_from(source, period, since=ends[-3])
    assert new.totals.time.tolist() == ends[-2:]
    assert new.channels["t", "c"].published.tolist() == new.totals.published.tolist()

    set_clock(monkeypatch, NOW + 2 * most * length)  # nobody recorded meanwhile
    assert len(history.read_from(source, period).totals) == 0


def test_rates_are_of_the_records_own_span(source: Chronicle) -> None:
    record(source, NOW - 3 * SECOND, 50)
    row = source.blank("seconds")
    row["time"], row["span"] = NOW - SECOND, 2.0
    row["totals"][0, COLUMNS.index("published")] = 50
    source.write("seconds", (NOW - SECOND) // SECOND, row)
    totals = history.read_from(source).totals
    assert totals.rate("published").tolist() == [50, 25]
    assert np.isnan(totals.oldest).all()
    with pytest.raises(KeyError):
        totals.rate("ready")


def test_a_step_of_the_clock_back_hides_what_is_not_yet(
    source: Chronicle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for back in range(20, 0, -1):
        record(source, NOW - back * SECOND, back)
    set_clock(monkeypatch, NOW - 10 * SECOND)
    assert history.read_from(source).totals.published.tolist() == list(range(20, 9, -1))
    record(source, NOW - 10 * SECOND, 77)  # its place had one of before the step
    assert history.read_from(source).totals.published.tolist() == [*range(20, 10, -1), 77]


def test_a_step_of_the_clock_forward_leaves_a_gap(
    source: Chronicle, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(source, NOW - SECOND, 1)
    set_clock(monkeypatch, NOW + 1000 * SECOND)
    record(source, NOW + 999 * SECOND, 2)
    times = history.read_from(source).totals.time
    assert times.tolist() == [NOW - SECOND, NOW + 999 * SECOND]
    set_clock(monkeypatch, 0)
    assert len(history.read_from(source).totals) == 0


def test_a_channel_that_was_made_again_goes_on(source: Chronicle) -> None:
    name(source, 0, 7, "t", "c")
    name(source, 1, 8, "t", "c")
    name(source, 2, 9, "t", None)
    record(source, NOW - 2 * SECOND, 5)
    row = source.blank("seconds")
    row["time"] = NOW - SECOND
    row["serials"][0, :3] = 9, 8, 10  # 10: its name was forgotten
    row["rows"][0, 1, COLUMNS.index("published")] = 6
    source.write("seconds", (NOW - SECOND) // SECOND, row)
    channels = history.read_from(source).channels
    assert set(channels) == {("t", "c"), ("t", None)}
    assert channels["t", "c"].published.tolist() == [5, 6]


# ---- damage ----


def test_a_torn_record_is_left_out(instance: str, source: Chronicle) -> None:
    for back in (3, 2, 1):
        record(source, NOW - back * SECOND, back)
    at, _, kind = source.plan.regions["seconds"]
    place = at + (NOW - 2 * SECOND) // SECOND % 3600 * kind.itemsize
    with open(path(instance), "r+b") as file:
        whole = os.pread(file.fileno(), kind.itemsize, place)
        record(source, NOW - 2 * SECOND, 99)
        new = os.pread(file.fileno(), kind.itemsize, place)
        os.pwrite(file.fileno(), whole, place)
        for cut in range(8, kind.itemsize, 8):
            torn = new[:cut] + whole[cut:]
            os.pwrite(file.fileno(), torn, place)
            found = history.read_from(source).totals.published.tolist()
            assert found == [3, 2, 1] if torn == whole else [3, 99, 1] if torn == new else [3, 1]
    record(source, NOW - 2 * SECOND, 42)
    assert history.read_from(source).totals.published.tolist() == [3, 42, 1]


@pytest.mark.parametrize("region", ["seconds", "deaths", "names"])
def test_garbage_in_any_word_of_a_record_takes_it_away(
    instance: str, source: Chronicle, region: str
) -> None:
    name(source, 0, 7, "t", "c")
    record(source, NOW - SECOND, 1)
    deaths.write(source, 1, Report(NOW, 5, ClientKind.CLIENT, held=[Held("t", "c", 2)]))
    at, count, kind = source.plan.regions[region]
    place = {"seconds": (NOW - SECOND) // SECOND % count, "deaths": 1, "names": 0}[region]
    begin = at + place * kind.itemsize
    readers = {
        "seconds": lambda: len(history.read_from(source).totals),
        "deaths": lambda: len(deaths.read_from(source)),
        "names": lambda: len(chronicle.read_names(source)),
    }
    assert readers[region]() == 1
    with open(path(instance), "r+b") as file:
        for word in range(begin, begin + kind.itemsize, 8):
            before = os.pread(file.fileno(), 8, word)
            os.pwrite(file.fileno(), bytes(255 - byte for byte in before), word)
            assert readers[region]() == 0, word - begin
            os.pwrite(file.fileno(), before, word)
    assert readers[region]() == 1


@settings(max_examples=60)
@given(st.integers(0, BUDGET), st.binary(min_size=1, max_size=4096))
def test_garbage_anywhere_harms_no_reader(at: int, garbage: bytes) -> None:
    instance = f"test-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with chronicle.open_or_make(instance, BUDGET, 0o600, shm.NO_GROUP) as source:
            record(source, time.time_ns() - SECOND, 1)
            deaths.write(source, 1, Report(NOW, 5, 0))
            with open(path(instance), "r+b") as file:
                os.pwrite(file.fileno(), garbage, at)
            history.read_from(source)
            history.read_from(source, "minute")
            deaths.read_from(source)
        chronicle.open_or_make(instance, BUDGET, 0o600, shm.NO_GROUP).close()
        deaths.read(instance)
    finally:
        shm.unlink_instance(instance)


@pytest.mark.parametrize("size", [0, 1, 39, 4096, 100_000, 1 << 20, BUDGET * 2])
def test_another_size_harms_nobody(instance: str, source: Chronicle, size: int) -> None:
    record(source, NOW - SECOND, 1)
    os.truncate(path(instance), size)
    history.read_from(source)
    record(source, NOW - 2 * SECOND, 2)  # the writer does not know of it
    assert 2 in history.read_from(source).totals.published
    if size < 40:
        with pytest.raises(LayoutMismatch, match="history"):
            history.read(instance)
    else:
        history.read(instance)
    with chronicle.open_or_make(instance, BUDGET, 0o600, shm.NO_GROUP) as again:
        assert os.stat(path(instance)).st_size == again.plan.size
        record(again, NOW - SECOND, 3)
        assert history.read(instance).totals.published[-1] == 3


def test_a_foreign_file_is_replaced(instance: str) -> None:
    with open(path(instance), "wb") as file:
        file.write(b"a letter to Sarah" * 1000)
    with pytest.raises(LayoutMismatch):
        deaths.read(instance)
    chronicle.open_or_make(instance, BUDGET, 0o600, shm.NO_GROUP).close()
    assert deaths.read(instance) == []


def test_one_of_another_budget_is_replaced(instance: str, source: Chronicle) -> None:
    record(source, NOW - SECOND, 1)
    chronicle.open_or_make(instance, 2 * BUDGET, 0o600, shm.NO_GROUP).close()
    assert os.stat(path(instance)).st_size > BUDGET
    assert len(history.read(instance).totals) == 0


def test_a_second_name_is_not_trusted(instance: str, source: Chronicle) -> None:
    record(source, NOW - SECOND, 1)
    link = f"{path(instance)}.link"
    os.link(path(instance), link)
    try:
        with pytest.raises(NotTrusted):
            history.read(instance)
        chronicle.open_or_make(instance, BUDGET, 0o600, shm.NO_GROUP).close()  # a new one
        assert len(history.read(instance).totals) == 0
    finally:
        os.unlink(link)


def test_a_link_is_replaced_and_not_followed(instance: str) -> None:
    os.symlink("/etc/hostname", path(instance))
    with pytest.raises(NotTrusted):
        history.read(instance)
    chronicle.open_or_make(instance, BUDGET, 0o600, shm.NO_GROUP).close()
    assert not os.path.islink(path(instance))


@pytest.mark.parametrize(("asked", "given_mode"), [(0o600, 0o600), (0o660, 0o640), (0o666, 0o644)])
def test_only_the_owner_may_write(instance: str, asked: int, given_mode: int) -> None:
    for _ in range(2):  # made, taken up
        chronicle.open_or_make(instance, BUDGET, asked, os.getgid()).close()
        assert os.stat(path(instance)).st_mode & 0o777 == given_mode
        os.chmod(path(instance), 0o666)


def test_no_history_is_a_clear_error(instance: str) -> None:
    with pytest.raises(NotRunning):
        history.read(instance)
    os.close(shm.create_directory(instance, 0o600))
    with pytest.raises(Gone, match="history-bytes"):
        history.read(instance)


def test_the_columns_of_a_series_are_those_of_a_record() -> None:
    fields = set(history.Series.__dataclass_fields__)
    assert fields == {*COLUMNS, "time", "span"}
    assert set(COUNTERS) < fields


# ---- deaths ----


def test_the_log_keeps_the_last_deaths(source: Chronicle) -> None:
    count = source.plan.deaths
    for number in range(1, count + 51):
        deaths.write(source, number, Report(number, 100 + number, ClientKind.GATEWAY))
    found = deaths.read_from(source)
    assert [death.number for death in found] == list(range(51, count + 51))
    assert found[0].pid == 151
    assert deaths.last_number(source) == count + 50
    assert [death.number for death in deaths.read_from(source, after=count + 48)] == [
        count + 49,
        count + 50,
    ]


def test_a_death_is_read_as_it_was_written(source: Chronicle) -> None:
    held = [Held("t" * 64, "c" * 64, 3), Held("a", None, 9), Held("b.#ephemeral", "c", 1)]
    report = Report(
        time=NOW,
        pid=12,
        kind=ClientKind.CLIENT,
        program="python Jürgen.py",
        how=How.KILLED,
        status=9,
        uid=1000,
        messages=13,
        held=held,
        locks=Lock.PUBLISH | Lock.DELIVER,
        rebuilt=2,
        repair=0.0125,
    )
    deaths.write(source, 1, report)
    (death,) = deaths.read_from(source)
    assert death.held == (held[1], held[0], held[2])
    assert death.repair == pytest.approx(0.0125)
    assert (death.program, death.kind, death.how) == ("python Jürgen.py", "client", How.KILLED)
    document = death.to_json()
    assert document["locks"] == ["publish", "deliver"]
    assert document["how"] == "killed"
    assert document["repair_ms"] == 12.5
    assert document["held"][0] == {"topic": "a", "channel": None, "message_count": 9}


def test_a_death_with_too_many_channels_names_the_fullest(source: Chronicle) -> None:
    held = [Held("t" * 64, f"{number:064d}", number + 1) for number in range(100)]
    deaths.write(source, 1, Report(NOW, 1, 0, program="x" * 500, held=held))
    (death,) = deaths.read_from(source)
    assert [item.messages for item in death.held] == [100, 99, 98, 97, 96, 95]
    assert death.program == "x" * 104
