"""nsqd.dat byte for byte, the reserve of the id clock, and atomic writing."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmq.storage.metadata import (
    ChannelMeta,
    MetadataError,
    TopicMeta,
    atomic_write,
    load,
    load_reserve,
    load_settings,
    store,
    store_reserve,
    valid_name,
)
from shmq.storage.own_files import ForeignFile

# written by nsqd 1.3.0
NSQD_FILE = (
    b'{"topics":[{"name":"mc","paused":false,"channels":[{"name":"ch","paused":false}]},'
    b'{"name":"mc2","paused":false,"channels":null}],"version":"1.3.0"}'
)
NSQD_TOPICS = [TopicMeta("mc", False, (ChannelMeta("ch"),)), TopicMeta("mc2")]

names = st.from_regex(r"[.a-zA-Z0-9_-]{1,54}", fullmatch=True)


def test_stored_file_is_nsqds_byte_for_byte(tmp_path: Path) -> None:
    store(tmp_path, NSQD_TOPICS)
    assert (tmp_path / "nsqd.dat").read_bytes() == NSQD_FILE
    assert (tmp_path / "nsqd.dat").stat().st_mode & 0o7777 == 0o600
    assert os.listdir(tmp_path) == ["nsqd.dat"]


def test_file_of_nsqd_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "nsqd.dat").write_bytes(NSQD_FILE)
    assert load(tmp_path) == NSQD_TOPICS


def test_no_topics_are_null(tmp_path: Path) -> None:
    store(tmp_path, [])
    assert (tmp_path / "nsqd.dat").read_bytes() == b'{"topics":null,"version":"1.3.0"}'
    assert load(tmp_path) == []


def test_missing_file_is_a_fresh_start(tmp_path: Path) -> None:
    assert load(tmp_path) == []


def test_ephemeral_topics_and_channels_are_left_out(tmp_path: Path) -> None:
    channels = (ChannelMeta("c#ephemeral"), ChannelMeta("d", paused=True))
    store(
        tmp_path,
        [
            TopicMeta("gone#ephemeral", channels=channels),
            TopicMeta("t", True, channels),
            TopicMeta("u", channels=channels[:1]),
        ],
    )
    assert (tmp_path / "nsqd.dat").read_bytes() == (
        b'{"topics":[{"name":"t","paused":true,"channels":[{"name":"d","paused":true}]},'
        b'{"name":"u","paused":false,"channels":null}],"version":"1.3.0"}'
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(
            TopicMeta,
            names,
            st.booleans(),
            st.lists(st.builds(ChannelMeta, names, st.booleans()), unique_by=lambda c: c.name).map(
                tuple
            ),
        ),
        unique_by=lambda t: t.name,
    )
)
def test_what_is_stored_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, topics: list[TopicMeta]
) -> None:
    path = tmp_path_factory.mktemp("meta")
    store(path, topics)
    assert load(path) == topics


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"  \n",
        b"{",
        NSQD_FILE[:-1],
        NSQD_FILE + b"x",
        b"\xff\xfe",
        b"[]",
        b"7",
        b'{"topics":{}}',
        b'{"topics":["a"]}',
        b'{"topics":[{"name":1}]}',
        b'{"topics":[{"name":"t","paused":1}]}',
        b'{"topics":[{"name":"t","channels":"c"}]}',
        b'{"topics":[{"name":"t","channels":[{"name":[]}]}]}',
    ],
)
def test_nonsense_is_a_typed_error_that_names_the_file(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "nsqd.dat").write_bytes(text)
    with pytest.raises(MetadataError, match="failed to parse metadata") as caught:
        load(tmp_path)
    assert caught.value.filename == str(tmp_path / "nsqd.dat")
    assert "restore it from a copy" in str(caught.value)


def test_unreadable_file_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "nsqd.dat").mkdir()
    with pytest.raises(ForeignFile, match=f"mv -T {tmp_path / 'nsqd.dat'} "):
        load(tmp_path)


def test_invalid_names_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = {
        "topics": [
            {"name": "bad name", "channels": [{"name": "c"}]},
            {"channels": None},
            {"name": "good", "channels": [{"name": "x:y"}, {"name": "c", "paused": True}]},
        ]
    }
    (tmp_path / "nsqd.dat").write_text(json.dumps(document))
    assert load(tmp_path) == [TopicMeta("good", channels=(ChannelMeta("c", True),))]
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "skipping topic with invalid name 'bad name'",
        "skipping topic with invalid name ''",
        "skipping channel with invalid name 'x:y'",
    ]


def test_unknown_keys_null_and_repeated_names_are_taken_as_nsqd_takes_them(tmp_path: Path) -> None:
    (tmp_path / "nsqd.dat").write_text(
        ' {"version":9,"new":[1],"topics":[{"name":"t","paused":true,"x":1},'
        '{"name":"t","paused":null,"channels":[{"name":"c"},{"name":"c","paused":true}]}]}\n'
    )
    assert load(tmp_path) == [TopicMeta("t", True, (ChannelMeta("c", True),))]
    (tmp_path / "nsqd.dat").write_text("null")
    assert load(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("a", True),
        ("A-z_0.9", True),
        ("a" * 64, True),
        ("a" * 54 + "#ephemeral", True),
        ("a" * 65, False),
        ("a" * 55 + "#ephemeral", False),
        ("#ephemeral", False),
        ("x#Ephemeral", False),
        ("x#ephemeral#ephemeral", False),
        ("a:b", False),
        ("a/b", False),
        ("a\n", False),
        ("é", False),
        ("", False),
    ],
)
def test_names_follow_nsqds_rule(name: str, valid: bool) -> None:
    assert valid_name(name) is valid


def test_reserve_of_the_id_clock_comes_back(tmp_path: Path) -> None:
    assert load_reserve(tmp_path) == 0
    store_reserve(tmp_path, (1 << 54) - 1)
    assert (tmp_path / "shmq.dat").read_bytes() == b'{"id_clock":18014398509481983}'
    assert load_reserve(tmp_path) == (1 << 54) - 1
    store_reserve(tmp_path, 5)
    assert load_reserve(tmp_path) == 5
    (tmp_path / "shmq.dat").write_text('{"id_clock":7,"later":1}')
    assert load_reserve(tmp_path) == 7


@pytest.mark.parametrize(
    "text", ["", "x", "[]", '{"id_clock":-1}', '{"id_clock":"1"}', '{"id_clock":true}']
)
def test_nonsense_reserve_is_a_typed_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "shmq.dat").write_text(text)
    with pytest.raises(MetadataError, match="failed to parse"):
        load_reserve(tmp_path)
    with pytest.raises(ValueError):
        store_reserve(tmp_path, -1)


def test_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, NSQD_TOPICS)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        store(tmp_path, [])
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "nsqd.dat")
    assert "->" not in str(caught.value)
    assert os.listdir(tmp_path) == ["nsqd.dat"]
    assert load(tmp_path) == NSQD_TOPICS


def test_atomic_write_survives_short_writes_and_sets_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    old = os.umask(0o077)
    try:
        atomic_write(tmp_path / "shmq.dat", b"0123456789", 0o640)
    finally:
        os.umask(old)
    assert (tmp_path / "shmq.dat").read_bytes() == b"0123456789"
    assert (tmp_path / "shmq.dat").stat().st_mode & 0o7777 == 0o640
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "none" / "shmq.dat", b"")


SETTINGS = {"t": {"channels": {"c": {"max_attempts": 3}}}}
FOR_TWO = '{"id_clock":{"clock":9,"needs":"x"}}'  # of which the settings are gone


@pytest.mark.parametrize("name", ["shmq.dat", "shmq.copy.dat"])
@pytest.mark.parametrize("text", [None, "", "{", "null", "{}", '{"settings":{}}', FOR_TWO])
def test_one_damaged_file_of_the_two_with_the_settings_costs_nothing(
    tmp_path: Path, name: str, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    store_reserve(tmp_path, 9, SETTINGS)
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    assert (load_reserve(tmp_path), load_settings(tmp_path)) == (9, SETTINGS)
    assert (f"{tmp_path / 'shmq.dat'}: " in caplog.text) is (name == "shmq.dat")


@pytest.mark.parametrize("other", ["shmq.dat", "shmq.copy.dat"])
@pytest.mark.parametrize("there", [True, False])
def test_the_remedy_for_both_damaged_is_the_one_that_works(
    tmp_path: Path, other: str, there: bool
) -> None:
    store_reserve(tmp_path, 9, SETTINGS)
    for path in tmp_path.iterdir():
        path.write_text("{")
    if not there:
        (tmp_path / other).unlink()
    with pytest.raises(MetadataError, match="settings of topics and channels") as refusal:
        load_settings(tmp_path)
    remedy = re.search(r"Or (rm -f .*?):", str(refusal.value))
    assert remedy is not None
    subprocess.run(shlex.split(remedy[1]), check=True)
    assert (load_reserve(tmp_path), load_settings(tmp_path)) == (0, {})
    assert list(tmp_path.iterdir()) == []


def test_a_death_between_the_two_files_leaves_settings_and_ids_that_rise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_reserve(tmp_path, 9, SETTINGS)
    newer = {"t": {"channels": {"c": {"max_attempts": 4}}}}
    rename, steps = os.rename, 0

    def dying(source: Path, target: Path) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", dying)
        with pytest.raises(KeyboardInterrupt):
            store_reserve(tmp_path, 20, newer)
    assert (load_reserve(tmp_path), load_settings(tmp_path)) == (9, SETTINGS)
    (tmp_path / "shmq.dat").write_text("")
    assert (load_reserve(tmp_path), load_settings(tmp_path)) == (20, newer)
