"""Every option and setting with bounds, beyond them, by each way that there is to give it."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from support.processes import eventually

import shmq
from limits.machine import Sheet
from limits.site import CHANNEL, GONE, Site
from shmq.cli import cli, main
from shmq.cli.parameters import duration
from shmq.option_types import Kind, Option
from shmq.options import OPTIONS, Options
from shmq.settings import KEYS

BOUNDED = {name: option for name, option in OPTIONS.items() if option.low is not None}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("site")
    made = Site(path, f"limits-{path.parent.name[-20:]}-options")
    yield made
    made.close()


def run(*words: str) -> str:
    """Return the output of `shmq WORDS`. Raises ValueError with its one sentence if it fails."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(list(words))
    said = errors.getvalue()
    assert "Traceback" not in said, said
    if status in (1, 2):
        raise ValueError(said)
    return out.getvalue()


def beyond(option: Option) -> list[Any]:
    """Values that an option does not take: by one, and by far."""
    low, high = option.low, option.high
    assert low is not None
    assert high is not None
    step = 0.0005 if option.kind is Kind.DURATION else 1
    far = [-(1 << 63), 1 << 63, 10**30, 10**400, math.nan, math.inf, -math.inf]
    return [low - step, high * 2 + step if option.kind is Kind.DURATION else high + 1, *far]


def text(option: Option, value: Any) -> str:
    if option.kind is Kind.MODE and isinstance(value, int):
        return f"{value:o}"
    if option.kind is not Kind.DURATION:
        return str(value)
    return f"{value:.4f}s" if abs(value) < 1e12 else f"{value}s"


def by_keyword(option: Option, value: Any, directory: Path) -> None:
    shmq.Broker(directory, **{option.name: value}).close()


def by_flag(option: Option, value: Any, directory: Path) -> None:
    run("serve", f"--data-path={directory}", f"{option.flag}={text(option, value)}")


def by_file(option: Option, value: Any, directory: Path) -> None:
    config = directory / "config.toml"
    number = isinstance(value, float) or abs(value) < 1 << 63
    shown = f"{value:f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    if option.kind is Kind.DURATION and math.isfinite(float(value) if number else math.nan):
        shown = f'"{text(option, value)}"'
    config.write_text(f"{option.key} = {shown}\n")
    run("serve", f"--data-path={directory}", f"--config={config}")


WAYS: dict[str, Callable[[Option, Any, Path], None]] = {
    "keyword": by_keyword,
    "flag": by_flag,
    "file": by_file,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_bounded_option_is_refused_beyond_its_bounds(tmp_path: Path, way: str) -> None:
    sheet = Sheet()
    for name, option in BOUNDED.items():
        for value in beyond(option):
            sheet.cell(
                f"{name}={value!r:.40} by {way}",
                lambda option=option, value=value: WAYS[way](option, value, tmp_path),
                rf"{option.name}|{option.flag}|\b{option.key}\b",
                Options,
            )
    assert len(BOUNDED) > 30
    sheet.verdict()


def test_a_number_of_thousands_of_digits_is_refused_by_name(tmp_path: Path) -> None:
    """Python itself refuses it, and names nothing."""
    sheet = Sheet()
    digits = "9" * 5000
    for name, option in BOUNDED.items():
        unit = "s" if option.kind is Kind.DURATION else ""
        words = ("serve", f"--data-path={tmp_path}", f"{option.flag}={digits}{unit}")
        sheet.cell(
            f"{name} of {len(digits)} digits",
            lambda words=words: run(*words),
            rf"{option.name}|{option.flag}",
            Options,
        )
    sheet.verdict()


SETTINGS: dict[str, tuple[Any, ...]] = {
    "max_messages": (0, -1, 1 << 63, 1 << 64, 10**30, 1.5, math.nan, "x", b"1"),
    "max_bytes": (0, -1, 1 << 63, 1 << 64, 10**30, 1.5, math.nan, "x", b"1"),
    "message_ttl": (0, -1, 1e-4, 1e10, 1e300, 10**400, math.nan, math.inf, "x", b"1"),
    "max_attempts": (-1, 65536, 1 << 31, 1 << 63, 1.5, math.nan, "x", b"1"),
    "retry_delay": (0, -1, 1e-4, 1e10, 10**400, math.nan, math.inf, (2, 1), (1,), "x", b"1"),
    "dead_letter": ("x" * 65, "a/b", "é", b"x"),
    "overflow": ("", "x", 5, None),
    "expired_to_dead": (5, "x", None),
    "overflow_to_dead": (5, "x", None),
    "sealed": (5, "x", None),
}


def configure(site: Site, key: str, value: Any) -> None:
    words: dict[str, Any] = {"overflow": "block"} if key.startswith("max_b") else {}
    words |= {"overflow": "block"} if key == "max_messages" else {}
    site.broker.configure(GONE, CHANNEL, **(words | {key: value}))


def set_by_command(site: Site, key: str, value: Any) -> None:
    shown = "..".join(map(str, value)) if isinstance(value, tuple) else value
    more = ["overflow=block"] if key in ("max_messages", "max_bytes") else []
    words = [f"{key}={shown}", *more, f"--instance={site.instance}"]
    run("channel", "set", GONE, CHANNEL, *words)


def by_pattern(site: Site, key: str, value: Any) -> None:
    more = {"overflow": "block"} if key in ("max_messages", "max_bytes") else {}
    value = "..".join(map(str, value)) if isinstance(value, tuple) else value
    Options(channels={GONE: {key: value, **more}})  # type: ignore[arg-type]


@pytest.mark.parametrize("key", KEYS)
def test_a_setting_is_refused_by_name(site: Site, key: str) -> None:
    site.broker.create_channel(GONE, CHANNEL)
    before = site.broker.settings(GONE, CHANNEL)
    sheet = Sheet()
    for way in (configure, set_by_command, by_pattern):
        for value in SETTINGS[key]:
            sheet.cell(
                f"{key}={value!r:.40} by {way.__name__}",
                lambda way=way, value=value: way(site, key, value),
                key,
                lambda: site.broker.settings(GONE, CHANNEL),
                may_return=way is not configure and not isinstance(value, int | float),
            )
            if way is configure and site.broker.settings(GONE, CHANNEL) != before:
                sheet.fault(f"{key}={value!r:.40}", "a setting that was refused holds")
        site.broker.configure(GONE, CHANNEL, **{k: getattr(before, k) for k in KEYS})
    site.check()
    sheet.verdict()


# ---- the command line ----

#: The words of each command that takes a number, without that number.
COMMANDS: dict[str, tuple[str, ...]] = {
    "stat": (),
    "page": (),
    "pub": (GONE, "x"),
    "tail": (GONE, CHANNEL),
    "peek": (GONE, CHANNEL),
    "message finish": (GONE, CHANNEL, "0657d68ceb979a69"),
    "message requeue": (GONE, CHANNEL, "0657d68ceb979a69"),
    "lease finish": (GONE, CHANNEL),
    "lease return": (GONE, CHANNEL),
    "forward": (GONE, CHANNEL, "nsq://127.0.0.1:1"),
    "results ls": (),
    "dead drop": (GONE, CHANNEL),
    "dead peek": (GONE, CHANNEL),
    "dead redrive": (GONE, CHANNEL),
    "worker": ("limits:POOL",),
    "inspect": ("{data}/nsqd.dat",),
    "bench": (),
}
#: They go on until they are ended, or begin much: what is refused alone is tried.
LASTING = ("stat", "page", "tail", "forward", "worker", "bench")
DIGITS = ("9" * 400, "9" * 5000)
NUMBERS = ("-1", "0", "nan", "inf", "x", "1.5", f"{1 << 31}", f"{1 << 63}", f"{1 << 64}", *DIGITS)
TIMES = ("-1s", "1", "nan", "x", "9" * 400 + "s", "9" * 5000 + "h", f"{1 << 63}h")


def numbers_of_commands() -> Iterator[tuple[str, click.Parameter]]:
    """Each option and argument of a command that is a number or a duration."""

    def walk(command: click.Command, words: tuple[str, ...]) -> Iterator[Any]:
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                found = command.get_command(click.Context(command), name)
                assert found is not None
                yield from walk(found, (*words, name))
        elif words != ("serve",):
            for one in command.params:
                if _is_number(one) or _is_duration(one):
                    yield " ".join(words), one

    return walk(cli, ())


def _is_number(one: click.Parameter) -> bool:
    return isinstance(one.type, click.types.IntParamType | click.types.FloatParamType)


def _is_duration(one: click.Parameter) -> bool:
    return one.callback is duration


def test_each_command_with_a_number_has_its_words() -> None:
    assert {command for command, _ in numbers_of_commands()} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_number_of_a_command_is_taken_or_refused_by_name(site: Site, command: str) -> None:
    sheet = Sheet()
    site.broker.create_channel(GONE, CHANNEL)
    eventually((site.directory / "data" / "nsqd.dat").exists)
    for _, one in (found for found in numbers_of_commands() if found[0] == command):
        for value in TIMES if _is_duration(one) else NUMBERS:
            option = isinstance(one, click.Option)
            words = [word.format(data=site.directory / "data") for word in COMMANDS[command]]
            words = [*command.split(), *words]
            name = next((word for word in one.opts if word.startswith("--")), one.opts[-1])
            words += [f"{name}{'=' * name.startswith('--')}{value}"] if option else []
            if command not in ("inspect", "bench", "worker"):
                words += [f"--instance={site.instance}"]
            words += [] if option else ["--", value]
            try:
                one.type.convert(value, one, None)
            except click.BadParameter:
                pass
            else:
                if command in LASTING or _is_number(one) is _is_duration(one):
                    continue
            sheet.cell(
                f"{command} {name} {value:.40}",
                lambda words=words: run(*words),
                rf"(?i){name.strip('-')}|{one.metavar}|deferred|lease \d|hold|No such option",
                lambda: None,
                may_return=True,
            )
    site.check()
    sheet.verdict()
