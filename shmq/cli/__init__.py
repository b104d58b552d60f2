"""The command line: `shmq COMMAND ...`. Exit status: see EXIT_CODES."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from stat import S_ISREG  # `stat` is the command's module here
from typing import Any, TypeVar

import click

from shmq import __version__, segments
from shmq.errors import NotRunning, ShmqError
from shmq.ownership import OWNER_VARIABLE, uid_of

OK, ERROR, USAGE, NOT_RUNNING, DEGRADED, INTERRUPTED = 0, 1, 2, 3, 4, 130

#: What a command's exit status means.
EXIT_CODES = {
    OK: "done",
    ERROR: "error, one sentence on stderr",
    USAGE: "usage",
    NOT_RUNNING: "the instance is not running",
    DEGRADED: "degraded: its supervisor is dead, its disk or /dev/shm is full or broken, or "
    "`doctor` or `inspect` found something",
    INTERRUPTED: "Ctrl-C",
}

_Command = TypeVar("_Command", bound=Callable[..., Any])


def complete_instance(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """For the shell: instances of this host."""
    return [name for name in segments.list_instances() if name.startswith(incomplete)]


def complete_topic(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """For the shell: topics of the instance that was named before."""
    return _complete(context, incomplete, None)


def complete_channel(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """For the shell: channels of the topic that was named before, else of all."""
    return _complete(context, incomplete, context.params.get("topic") or "")


def _complete(context: click.Context, incomplete: str, topic: str | None) -> list[str]:
    """Names in an instance's directory; none where it cannot be read. Nothing waits here, and
    nothing is said: a shell would show it amid what is being typed."""
    from shmq import layout

    instance = context.params.get("instance") or segments.default_instance()
    found: set[str] = set()
    with contextlib.suppress(Exception):
        if S_ISREG(os.lstat(segments.directory_path(instance)).st_mode):
            with layout.open_readonly(instance) as source:
                names = {entry.index: entry.name for entry in source.directory.live_topics()}
                if topic is None:
                    found = {*names.values()}
                else:
                    found = {
                        entry.channel
                        for entry in source.directory.live_queues()
                        if entry.channel is not None and topic in ("", names.get(entry.topic))
                    }
    return sorted(name for name in found if name.startswith(incomplete))


#: What completes an argument or an option of this name.
COMPLETIONS = {"instance": complete_instance, "topic": complete_topic, "channel": complete_channel}


def instance_option(command: _Command) -> _Command:
    """`--instance`, on every command, and `--owner`, whose it may be."""
    return click.option(
        "--instance",
        envvar="SHMQ_INSTANCE",
        default=segments.default_instance,
        show_default="default",
        show_envvar=True,
        metavar="NAME",
        shell_complete=complete_instance,
        help="Name of the broker on this host.",
    )(owner_option(command))


def owner_option(command: _Command) -> _Command:
    """`--owner`. Everything that opens shared memory looks for it in the environment."""
    return click.option(
        "--owner",
        envvar=OWNER_VARIABLE,
        show_envvar=True,
        metavar="USER",
        expose_value=False,
        callback=_name_owner,
        help="Whose broker it may be, beside your own and root's.",
    )(command)


def _name_owner(context: click.Context, parameter: click.Parameter, owner: str | None) -> None:
    if not owner:
        return
    try:
        uid_of(owner)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc
    before = os.environ.get(OWNER_VARIABLE)

    def restore() -> None:
        os.environ.pop(OWNER_VARIABLE, None)
        if before is not None:
            os.environ[OWNER_VARIABLE] = before

    os.environ[OWNER_VARIABLE] = owner
    context.call_on_close(restore)


def json_option(command: _Command) -> _Command:
    """`--json`, on everything that prints a table."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")(
        command
    )


#: Command -> module of this package that has it; imported when it is asked for.
_MODULES = {
    "serve": "serve",
    "stat": "stat",
    "ls": "instances",
    "rm": "instances",
    "pub": "messages",
    "tail": "tail",
    "peek": "tail",
    "topic": "admin",
    "channel": "admin",
    "lease": "lease",
    "inspect": "inspect",
    "doctor": "doctor",
    "bench": "bench",
}


class _Commands(click.Group):
    """So that a command's start does not load the others."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        module = _MODULES.get(name)
        if module is None:
            return None
        found = getattr(importlib.import_module(f"shmq.cli.{module}"), name)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Each with its first sentence, whole."""
        rows = []
        for name in self.list_commands(context):
            command = self.get_command(context, name)
            assert command is not None
            rows.append((name, command.get_short_help_str(limit=sys.maxsize)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Grouped(click.Command):
    """A command with so many options that its help has them under titles, as `options.py` has
    them."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Its own options first."""
        from shmq.options import OPTIONS

        sections: dict[str, list[tuple[str, str]]] = {"": []}
        for parameter in self.get_params(context):
            record, known = parameter.get_help_record(context), OPTIONS.get(parameter.name or "")
            if record is not None:
                sections.setdefault(known.group if known else "", []).append(record)
        for title, rows in sections.items():
            with formatter.section(f"Options ({title})" if title else "Options"):
                formatter.write_dl(rows)


_EPILOG = """\b
Examples:
  shmq serve --instance jobs --data-path /var/lib/jobs    run a broker
  shmq pub resize cat.png --instance jobs                 publish a message
  shmq tail resize workers --instance jobs                take messages
  shmq stat -i 1 --instance jobs                          watch it
  shmq doctor                                             look for what is wrong

The instance can also be named by SHMQ_INSTANCE. `shmq COMMAND --help` tells more.

\b
Completion of commands, instances, topics and channels, in ~/.bashrc:
  eval "$(_SHMQ_COMPLETE=bash_source shmq)"    (others: zsh_source, fish_source)
"""


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG
)
@click.version_option(__version__, prog_name="shmq")
def cli() -> None:
    """A message broker for one host, with the data path in shared memory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["serve"]:
        from shmq.cli.serve import two_dashes

        words = two_dashes(words)
    elif arguments is None:
        # `shmq stat | head`: end without a word when the reader has gone
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        color = False if os.environ.get("NO_COLOR") else None
        return int(cli.main(words, prog_name="shmq", standalone_mode=False, color=color) or OK)
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.format_message(), err=True)
        return USAGE
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        from shmq.cli.output import forget_output

        forget_output()
        return ERROR
    except NotRunning as exc:
        return _say(exc, NOT_RUNNING)
    except (ShmqError, OSError, ValueError) as exc:
        return _say(exc, ERROR)


def _say(exc: BaseException, status: int) -> int:
    text = str(exc)
    if isinstance(exc, OSError) and exc.strerror:
        text = f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror
    click.echo(f"shmq: {text}", err=True)
    return status
