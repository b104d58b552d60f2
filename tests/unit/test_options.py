"""shmq.options: notations, bounds, precedence, what reaches `shmq serve` and the extension."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
import zlib
from pathlib import Path

import pytest

from shmq.option_types import Kind, OptionError, format_duration, parse_duration
from shmq.options import OPTIONS, Options, arena_size_for


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60),
        ("100ms", 0.1),
        ("1h15m30.5s", 4530.5),
        ("0", 0),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("250us", 0.00025),
        ("250µs", 0.00025),
        ("7ns", 7e-9),
        ("-2s", -2),
    ],
)
def test_durations_in_the_notation_of_go(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["60", "", "s", "1 s", "1d", "1s2", "1,5s", "infs"])
def test_a_duration_needs_a_unit(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)
    with pytest.raises(OptionError, match="--msg-timeout"):
        OPTIONS["msg_timeout"].parse(text)


@pytest.mark.parametrize("seconds", [0, 0.1, 60, 90, 900, 3600, 0.00025, 7e-9, 1.5, 86400])
def test_a_duration_that_is_written_reads_the_same(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


def test_durations_read_well() -> None:
    assert [format_duration(s) for s in (60, 0.1, 900, 3600)] == ["60s", "100ms", "15m", "1h"]


def test_defaults_are_those_of_nsqd() -> None:
    options = Options()
    assert options.mem_queue_size == 10000
    assert options.max_msg_size == 1048576
    assert options.max_body_size == 5242880
    assert (options.msg_timeout, options.max_msg_timeout) == (60, 900)
    assert options.max_req_timeout == 3600
    assert options.max_bytes_per_file == 104857600
    assert (options.sync_every, options.sync_timeout) == (2500, 2)
    assert (options.queue_scan_worker_pool_max, options.queue_scan_selection_count) == (4, 20)
    assert (options.log_level, options.log_prefix) == ("info", "[nsqd] ")


def test_the_node_id_is_that_of_nsqd() -> None:
    digest = hashlib.md5(socket.gethostname().encode()).digest()
    assert Options().node_id == zlib.crc32(digest) % 1024
    assert zlib.crc32(hashlib.md5(b"vm").digest()) % 1024 == 617  # observed on a running nsqd


def test_an_unknown_keyword_names_what_comes_close() -> None:
    with pytest.raises(TypeError, match="mem_queue_size"):
        Options.from_keywords(mem_queue_sise=1)


def test_keywords_take_seconds_text_and_paths() -> None:
    options = Options.from_keywords(
        msg_timeout=5, queue_scan_interval="20ms", data_path=Path("/x"), mode="0660", group=None
    )
    assert options.msg_timeout == 5.0
    assert options.queue_scan_interval == 0.02
    assert options.data_path == "/x"
    assert options.mode == 0o660
    assert options.group == ""


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("node_id", 1024, "from 0 to 1023"),
        ("msg_timeout", 0, "from 1ms"),
        ("msg_timeout", float("nan"), "seconds"),
        ("msg_timeout", True, "seconds"),
        ("mem_queue_size", -1, "from 0"),
        ("mem_queue_size", 1.5, "whole number"),
        ("mem_queue_size", True, "whole number"),
        ("mem_queue_size", "many", "whole number"),
        ("log_level", "warning", "debug, info, warn"),
        ("data_path", 5, "text"),
        ("data_path", "a\0b", "zero byte"),
        ("mode", 0o777, "to 0666"),
        ("on_stop", "explode", "flush, keep"),
        ("queue_scan_dirty_percent", 101, "to 100"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_the_bounds(
    name: str, value: object, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Options.from_keywords(**{name: value})


def test_a_message_must_fit_three_quarters_of_the_arena() -> None:
    with pytest.raises(OptionError, match="arena_size to 2097152"):
        Options(arena_size=1 << 20)
    for size in (1, 1 << 20, (1 << 20) + 1, 50_000_000):
        Options(arena_size=max(arena_size_for(size), 64 << 10), max_msg_size=size)


def test_the_arena_grows_with_the_largest_message_unless_it_was_given() -> None:
    large = 100 << 20
    assert Options.from_keywords(max_msg_size=large).arena_size == arena_size_for(large)
    assert Options.load({"max_msg_size": str(large)}).arena_size == arena_size_for(large)
    assert Options.from_keywords(max_msg_size=5).arena_size == 64 << 20
    with pytest.raises(OptionError, match="does not fit"):
        Options.from_keywords(max_msg_size=large, arena_size=64 << 20)


def test_slots_together_are_bounded() -> None:
    with pytest.raises(OptionError, match="together"):
        Options(mem_queue_size=1 << 24, in_flight_slots=(1 << 24) + 1)


def test_an_instance_must_have_a_name_that_can_be_one() -> None:
    with pytest.raises(ValueError, match="instance name"):
        Options(instance="a/b")


def test_flags_go_before_the_file_and_the_file_before_defaults() -> None:
    config = {
        "mem_queue_size": "77",
        "msg_timeout": 1500,
        "max_req_timeout": "2h",
        "id": 9,
        "no_such_key": 1,
    }
    flags = {"mem_queue_size": "5", "msg_timeout": None}
    options = Options.load(flags, config)
    assert options.mem_queue_size == 5
    assert options.msg_timeout == 1.5  # a bare number in the file is milliseconds
    assert options.max_req_timeout == 7200
    assert options.node_id == 9
    assert options.sync_every == 2500


def test_argv_says_all_that_is_not_default_and_reads_back_the_same() -> None:
    options = Options.from_keywords(
        instance="x",
        data_path="/a b",
        mem_queue_size=0,
        msg_timeout=0.25,
        mode=0o660,
        log_prefix="",
        max_msg_size=1000,
    )
    argv = options.to_argv()
    assert "--instance=x" in argv
    assert "--msg-timeout=250ms" in argv
    assert not any(word.startswith("--sync") for word in argv)
    by_flag = {option.flag: option.name for option in OPTIONS.values()}
    flags = {by_flag[flag]: text for flag, _, text in (word.partition("=") for word in argv)}
    assert Options.load(flags) == options


def test_every_option_can_be_written_and_read() -> None:
    options = Options()
    for option in OPTIONS.values():
        value = getattr(options, option.name)
        assert option.parse(option.show(value)) == value
        assert option.help
        assert option.flag == "--" + option.name.replace("_", "-")
    assert list(OPTIONS) == [field.name for field in dataclasses.fields(Options)]


def test_limits_are_nanoseconds_and_bytes() -> None:
    limits = Options(msg_timeout=0.1, node_id=3).limits()
    assert limits["msg_timeout"] == 100_000_000
    assert limits["max_req_timeout"] == 3600 * 10**9
    assert limits["node_id"] == 3
    assert set(limits) == {
        "msg_timeout",
        "max_msg_timeout",
        "max_req_timeout",
        "max_msg_size",
        "arena_size",
        "node_id",
        "mem_queue_size",
        "in_flight_slots",
    }
    assert all(type(value) is int for value in limits.values())


def test_json_has_durations_in_nanoseconds_under_the_keys_of_the_file() -> None:
    document = Options(node_id=3).to_json()
    assert document["msg_timeout"] == 60 * 10**9
    assert document["id"] == 3


def test_permissions_follow_the_group() -> None:
    assert Options().permissions() == (0o600, -1)
    assert Options(group=str(os.getgid())).permissions() == (0o660, os.getgid())
    assert Options(mode=0o640).permissions() == (0o640, -1)
    with pytest.raises(OptionError, match="no-such-group"):
        Options(group="no-such-group").permissions()


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().node_id = 5  # type: ignore[misc]
    assert Options(node_id=4).replace(node_id=5).node_id == 5


def test_kinds_cover_every_option() -> None:
    assert {option.kind for option in OPTIONS.values()} == set(Kind)
