"""The pages say what there is: every command, option and exit status, and no others.

The tables of docs/reference.md are made here from the command line itself and from the options.
After a change:

    tools/dev tables      writes them anew
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import shmq
from shmq import cli, errors, names, settings, shm, stats
from shmq.cli.status import (
    DEGRADED,
    ERROR,
    EXIT_CODES,
    INTERRUPTED,
    NOT_RUNNING,
    OK,
    REFUSED,
    USAGE,
)
from shmq.option_types import Kind
from shmq.options import OPTIONS

ROOT = Path(__file__).parents[2]
README, REFERENCE = ROOT / "README.md", ROOT / "docs" / "reference.md"
PAGES = [
    README,
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs" / "monitoring" / "README.md",
]

#: Options of other programs that the pages name: of tools/dev, of containers, of systemctl.
FOREIGN = {
    "--modules",
    "--share",
    "--all",
    "--core",
    "--streaming",
    "--spark",
    "--spark-jobs",
    "--round-kills",
    "--fleet",
    "--write",
    "--no-write",
    "--tls",
    "--no-tls",
    "--only",
    "--ipc",
    "--create",
    "--now",
    "--kills",
    "--load",
    "--mutants",
    "--accept",
    "--plant",
    "--programs",
    "--seed",
    "--shm-size",
    "--hours",
    "--operation",
    # of nsqadmin
    "--lookupd-http-address",
    # of `manage.py shmq_worker`
    *("--queues", "--backend", "--max-tasks", "--burst", "--reload", "--no-reload", "--verbosity"),
}


def commands() -> dict[str, click.Command]:
    """All of them by their words, those of groups too: `topic create`."""
    found: dict[str, click.Command] = {}

    def enter(prefix: str, group: click.Group) -> None:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            found[f"{prefix}{name}"] = command
            if isinstance(command, click.Group):
                enter(f"{prefix}{name} ", command)

    enter("", cli.cli)
    return found


def options(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def flags() -> set[str]:
    """Every option of every command, and those of all."""
    own = {
        flag
        for command in commands().values()
        for option in options(command)
        for flag in option.opts
    }
    return own | {"--help", "-h", "--version"}


# ---- the tables ----


def command_table() -> Iterator[str]:
    yield "| command | what it does | options |"
    yield "|---|---|---|"
    found = commands()
    for words, command in found.items():
        group, verb_of_group, _ = words.partition(" ")
        if verb_of_group and f"{group} create" in found:
            continue  # its group's line has it
        if isinstance(command, click.Group) and f"{words} create" not in found:
            continue  # each of its commands has a line
        context = click.Context(command, info_name=words)
        usage, own = command.collect_usage_pieces(context)[1:], options(command)
        if isinstance(command, click.Group):
            verb = command.get_command(context, "create")
            assert verb is not None
            usage, own = ["VERB", *verb.collect_usage_pieces(context)[1:]], options(verb)
        does = (command.help or "").partition("\n\n")[0].replace("\n", " ").strip()
        if words == "serve":
            own = [option for option in own if option.name not in OPTIONS]
        shown = ", ".join(_flag(option) for option in own)
        if words == "serve":
            shown += ", and those below"
        yield f"| `{' '.join(['shmq', words, *usage])}` | {does} | {shown} |"


def _flag(option: click.Option) -> str:
    if option.is_flag:
        return f"`{option.opts[0]}`"
    metavar = option.make_metavar(click.Context(cli.cli)).replace("|", "\\|")
    return f"`{option.opts[0]} {metavar}`"


def status_table() -> Iterator[str]:
    yield "| exit status | |"
    yield "|---|---|"
    for status, meaning in EXIT_CODES.items():
        yield f"| {status} | {meaning} |"


def option_table() -> Iterator[str]:
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for option in OPTIONS.values():
        mark = "" if option.nsqd else " *"
        choices = f" ({', '.join(option.choices)})" if option.choices else ""
        yield f"| `{option.flag}`{mark} | {_default(option.name)} | {option.help}{choices} |"


def _default(name: str) -> str:
    option = OPTIONS[name]
    if option.default_words:
        return option.default_words
    if name == "instance":
        return "`default`"
    if option.kind is Kind.MODE:
        return "`0600`"
    if option.kind is Kind.BYTES and option.default % 1024 == 0:
        mebibytes = option.default / (1 << 20)
        return f"{mebibytes:g} MiB"
    text = option.show(option.default)
    return f"`{text}`" if text else ""


TABLES = {"commands": command_table, "status": status_table, "options": option_table}


def written_anew(text: str) -> str:
    """The reference with its tables as they should be."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        assert text.count(begin) == text.count(end) == 1, f"the reference lost its mark {begin}"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = "\n".join([before + begin, *table(), end + after])
    return text


# ---- the tests ----


def test_the_tables_of_the_reference_are_what_there_is() -> None:
    text = REFERENCE.read_text()
    assert text == written_anew(text), "the tables are out of date: run tools/dev tables"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", page.read_text()))
    assert named - FOREIGN <= flags()


def test_every_command_that_a_page_names_exists() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"(?:`|    |\$ )shmq ([a-z]+)", text))
    assert named == {words for words in commands() if " " not in words}


def test_the_readme_is_read_in_one_go() -> None:
    assert len(README.read_text().splitlines()) <= 170


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    folders = "docs|native|shmq|systemd|tests|tools"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()))
    missing = [path for path in sorted(named) if not (ROOT / path).exists()]
    assert not missing, f"{page.name} names what does not exist: {missing}"


def test_every_option_of_the_broker_is_one_of_serve() -> None:
    names = {option.name for option in options(commands()["serve"])}
    assert set(OPTIONS) <= names


@pytest.mark.parametrize("words", commands())
def test_every_command_and_option_has_a_help(words: str) -> None:
    command = commands()[words]
    assert command.help
    assert command.help.splitlines()[0].endswith((".", ","))
    for option in options(command):
        assert option.help, f"{words} {option.opts}"
        assert option.help.endswith(".") or option.help.endswith("]")


def test_every_table_has_json() -> None:
    # groups of commands, and those that print a log or nothing
    groups = {"topic", "channel", "message", "lease", "dead", "results", "access"}
    without = groups | {"serve", "pub", "worker", "page"}
    for words, command in commands().items():
        if words not in without:
            assert "--json" in {flag for option in options(command) for flag in option.opts}, words


def test_exit_statuses_are_those_of_the_module() -> None:
    numbers = {OK, ERROR, USAGE, NOT_RUNNING, DEGRADED, REFUSED, INTERRUPTED}
    assert set(EXIT_CODES) == numbers


def test_every_error_is_named() -> None:
    text = REFERENCE.read_text()
    listed = text[text.index("Errors in Python:") :]
    assert set(re.findall(r"`([A-Z][A-Za-z]+)`", listed)) == set(errors.__all__)


def test_limits_of_the_pages_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert f"1 to {names.MAX_NAME_BYTES} of" in text
    assert shm.SHM_DIRECTORY == "/dev/shm"


@pytest.mark.parametrize("name", settings.KEYS)
def test_every_setting_is_on_its_page_and_in_the_help(name: str) -> None:
    page = (ROOT / "docs" / "policies.md").read_text()
    has_row = re.search(rf"^\| (?:`\w+`, )*`{name}`", page, re.MULTILINE)
    assert has_row, f"{name} has no row in docs/policies.md"
    for words in ("topic set", "channel set"):
        is_shown = f"{name}=" in (commands()[words].help or "")
        assert is_shown, f"name {name} in _SET of shmq/cli/admin.py"


def their_words() -> list[tuple[str, str]]:
    """(words of another broker, ours) of each row of the tables of docs/policies.md."""
    text = (ROOT / "docs" / "policies.md").read_text()
    tables = text[text.index("## From RabbitMQ, SQS and Celery") :]
    rows = [line.strip("|").split("|") for line in tables.splitlines() if line.startswith("| ")]
    assert all(len(row) == 3 for row in rows)
    return [(row[0].strip(), row[1].strip()) for row in rows if row[1].strip() != "shmq"]


@pytest.mark.parametrize(("theirs", "ours"), their_words())
def test_our_word_for_that_of_another_broker_exists(theirs: str, ours: str) -> None:
    owners = (shmq.Broker, shmq.Producer, shmq.Consumer, shmq.Message, shmq.DeadLetters)
    known = {field.name for field in dataclasses.fields(stats.ChannelStats)}
    known |= {*settings.KEYS, *settings.OVERFLOWS}
    for name, member in itertools.chain(*map(inspect.getmembers, owners)):
        known.add(name)
        with contextlib.suppress(TypeError, ValueError):  # no function, or one without a signature
            known |= set(inspect.signature(member).parameters)
    for words in re.findall(r"`([^`]+)`", ours):
        if words.startswith("--"):
            assert words.removeprefix("--") in OPTIONS
        elif words.startswith("dead-"):
            assert f'"{words}"' in (ROOT / "native" / "core" / "publish" / "dead.c").read_text()
        elif words[0] not in '#"':
            for word in re.findall(r"(?<![\w\".])([a-z_-]{2,})(?=\(|=|$)", words):
                assert word in known, (theirs, word)


if __name__ == "__main__":
    REFERENCE.write_text(written_anew(REFERENCE.read_text()))
    sys.exit(0)
