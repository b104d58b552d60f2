"""Settings: their texts, their checks, and the defaults by pattern."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from shmq import _native
from shmq.errors import BadArgument, BadName
from shmq.options import OptionError, Options
from shmq.settings import (
    KEYS,
    NONE,
    OVERFLOWS,
    Patterns,
    Settings,
    SettingWords,
    dead_topic,
    parse_words,
)
from shmq.storage import metadata
from shmq.storage.metadata import MetadataError
from shmq.supervisor.book import SettingsBook, from_document, to_document

FULL = Settings(
    max_messages=5,
    max_bytes=1 << 20,
    overflow="drop-oldest",
    message_ttl=1.5,
    max_attempts=7,
    retry_delay=(1, 300),
    dead_letter="dead",
    expired_to_dead=True,
    overflow_to_dead=True,
    sealed=True,
)


def test_every_setting_is_a_field_a_keyword_and_in_these_tests() -> None:
    assert tuple(field.name for field in dataclasses.fields(Settings)) == KEYS
    assert tuple(SettingWords.__annotations__) == KEYS
    assert tuple(FULL.differing()) == KEYS, "give FULL another value than the default of each"


def test_the_words_of_overflow_have_the_numbers_of_the_core() -> None:
    for number, word in enumerate(OVERFLOWS):
        name = f"OVERFLOW_{word.upper().replace('-', '_')}"
        assert _native.CONSTANTS[name] == number
    flags = Settings(expired_to_dead=True).to_native()[7], FULL.to_native()[7]
    every = _native.CONSTANTS["EXPIRED_TO_DEAD"] | _native.CONSTANTS["OVERFLOW_TO_DEAD"]
    every |= _native.CONSTANTS["SEALED_ONLY"]
    assert flags == (_native.CONSTANTS["EXPIRED_TO_DEAD"], every)


@pytest.mark.parametrize("settings", [NONE, FULL, Settings(retry_delay=(2.5, 2.5))])
def test_every_form_gives_the_same_settings(settings: Settings) -> None:
    assert Settings.from_native(settings.to_native()) == settings
    assert NONE.changed(settings.texts()) == settings
    assert NONE.changed(settings.differing()) == settings
    assert NONE.changed(parse_words(str(settings).split())) == settings
    assert tuple(settings.to_json()) == KEYS


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("max_bytes=64KiB", 65536),
        ("max_bytes=64k", 64000),
        ("max_bytes=1GiB", 1 << 30),
        ("max_bytes=7B", 7),
        ("max_bytes=7", 7),
        ("message_ttl=1h15m", 4500.0),
        ("retry_delay=1s..5m", (1.0, 300.0)),
        ("retry_delay=250ms", (0.25, 0.25)),
        ("retry_delay=none", None),
        ("dead_letter=none", None),
        ("max_attempts=0", None),
        ("expired_to_dead=true", True),
    ],
)
def test_a_text_is_read(text: str, value: Any) -> None:
    words = parse_words([text])
    base = FULL if value is None else Settings(overflow="block")
    assert getattr(base.changed(words), next(iter(words))) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"max_messages": 0}, "None for no limit"),
        ({"max_messages": -1}, "None for no limit"),
        ({"max_messages": True}, "whole number"),
        ({"max_messages": 1.5}, "whole number"),
        ({"max_messages": "many"}, "whole number or none"),
        ({"max_messages": 5}, "no effect while overflow is disk"),
        ({"max_bytes": "5"}, "no effect while overflow is disk"),
        ({"max_bytes": "64QB"}, "64KiB"),
        ({"overflow": "drop"}, "drop-oldest"),
        ({"overflow": "drop-oldest"}, "needs a limit"),
        ({"overflow": "drop-newest"}, "needs a limit"),
        ({"message_ttl": 0}, "from 0.001"),
        ({"message_ttl": -1}, "from 0.001"),
        ({"message_ttl": float("nan")}, "from 0.001"),
        ({"message_ttl": 10**400}, "from 0.001"),
        ({"message_ttl": "9" * 400 + "h"}, "too long"),
        ({"max_messages": "9" * 5000}, "whole number"),
        ({"max_bytes": "9" * 5000 + "kB"}, "64KiB"),
        ({"message_ttl": "5"}, "unit"),
        ({"message_ttl": "never"}, "none"),
        ({"max_attempts": 65536}, "65535"),
        ({"retry_delay": (5, 1)}, "longer"),
        ({"retry_delay": (1, 2, 3)}, "first, longest"),
        ({"retry_delay": "none..5m"}, "seconds"),
        ({"dead_letter": 5}, "name of a topic"),
        ({"expired_to_dead": "yes"}, "true or false"),
        ({"overflow_to_dead": True}, "drop-oldest"),
        ({"max_mesages": 5}, "did you mean max_messages"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_way_out(words: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        NONE.changed(words)


def test_a_bad_name_is_refused() -> None:
    with pytest.raises(BadName, match="dead_letter"):
        NONE.changed({"dead_letter": "no good"})
    with pytest.raises(BadName, match="itself"):
        Settings(dead_letter="t").check_names("t", "c")
    with pytest.raises(BadName, match="dead_letter=TOPIC"):
        Settings(max_attempts=1).check_names("t" * 40, "c" * 30)
    assert Settings().check_names("t" * 40, "c" * 30) == NONE
    assert dead_topic("t#ephemeral", "c#ephemeral") == "t.c.dead"


@pytest.mark.parametrize("text", ["max_messages", "max_mesages=1"])
def test_a_word_that_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(BadArgument):
        parse_words([text])
    with pytest.raises(BadArgument, match="twice"):
        parse_words(["max_bytes=1", "max_bytes=2"])


def test_patterns_apply_in_their_order() -> None:
    patterns = Patterns(
        ["jobs.*: max_messages=5 overflow=block", "jobs.x/w: max_messages=7 overflow=reject"]
    )
    assert patterns.apply(NONE, "jobs.x", "jobs.x/w") == Settings(max_messages=7, overflow="reject")
    assert patterns.apply(NONE, "jobs.y", "jobs.y/w") == Settings(max_messages=5, overflow="block")
    assert patterns.apply(NONE, "other", "other/w") == NONE


def test_options_take_patterns_from_a_table_and_from_flags() -> None:
    table = {"jobs.*": {"max_messages": 5, "overflow": "block", "expired_to_dead": True}}
    options = Options.load({}, {"channels": table})
    assert options.channels == ("jobs.*: max_messages=5 overflow=block expired_to_dead=true",)
    assert Options.load({"channels": list(options.channels)}) == options
    assert Options.from_keywords(channels=table) == options
    assert f"--channels={options.channels[0]}" in options.to_argv()
    for wrong in ({"jobs.*": {"max_messages": 0}}, {"jobs.*": 5}, ["jobs"], {"a": {"b": 1}}):
        with pytest.raises(OptionError, match="channels"):
            Options.load({}, {"channels": wrong})


def test_the_book_saves_what_the_defaults_do_not_give(tmp_path: Path) -> None:
    book = SettingsBook(
        Patterns(["t*: message_ttl=5s"]), Patterns(["t*: overflow=reject max_messages=5"])
    )
    own = Settings(message_ttl=5)
    default = Settings(message_ttl=5, max_messages=5, overflow="reject")
    assert (book.topic("t1"), book.channel("t1", own, "c")) == (own, default)
    held = {
        "t1": (own, {"c": default, "d": NONE, "e#ephemeral": FULL}),
        "t2": (own, {"c": default}),
        "u": (FULL, {"c": FULL}),
        "v#ephemeral": (FULL, {"c": FULL}),
    }
    saved = book.to_save(held)
    assert saved == {"t1": (None, {"d": NONE}), "u": (FULL, {})}
    metadata.store_reserve(tmp_path, 7, to_document(saved))
    assert metadata.load_reserve(tmp_path) == 7
    assert from_document(tmp_path, metadata.load_settings(tmp_path)) == saved
    again = SettingsBook(Patterns(()), Patterns(()), saved)
    assert again.channel("t1", FULL, "d") == NONE
    again.forget("t1", "d")
    assert again.channel("t1", FULL, "d") == FULL
    assert again.topic("u") == FULL
    again.forget("u")
    assert again.topic("u") == NONE


def test_shmq_dat_is_as_before_without_settings(tmp_path: Path) -> None:
    metadata.store_reserve(tmp_path, 7, {})
    assert (tmp_path / metadata.RESERVE_NAME).read_bytes() == b'{"id_clock":7}'
    metadata.store_reserve(tmp_path, 7, {"t": {"settings": {}, "channels": {}}})
    text = (tmp_path / metadata.RESERVE_NAME).read_text()
    # an older release demands a number here, and shows what it found
    assert text.startswith('{"id_clock":{"clock":7,"needs":')


@pytest.mark.parametrize(
    "document",
    [
        {"t": 5},
        {"t": {"settings": {"max_messages": "0"}, "channels": {}}},
        {"t": {"settings": {"new_setting": "1"}, "channels": {}}},
        {"t": {"channels": {"c": 5}}},
        {"t": {"channels": {"c": {"message_ttl": 10**400}}}},
        {"t": {}},
    ],
)
def test_settings_that_make_no_sense_are_refused_at_a_start(
    document: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(MetadataError, match="its settings make no sense"):
        from_document(tmp_path, document)
