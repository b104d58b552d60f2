"""The command line, `shmq COMMAND ...`: the group of commands, and `main`, which runs one."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

from shmq import __version__
from shmq.cli.status import ERROR, INTERRUPTED, NOT_RUNNING, OK, USAGE
from shmq.errors import NotRunning, ShmqError
from shmq.printing import clean_tracebacks, printable

#: Command -> the module of this package that defines it, imported when the command is called, and
#: the first sentence of its help, so that `shmq --help` imports none of them.
COMMANDS = {
    "serve": ("serve", "Run the supervisor of an instance until SIGTERM or Ctrl-C."),
    "stat": ("stat", "Show what an instance is doing."),
    "page": ("page", "Show an instance in a browser: what waits, who holds it, what failed."),
    "ls": ("instances", "List the instances of this host, running or left behind."),
    "rm": ("instances", "Remove the shared memory of INSTANCE, which must be dead."),
    "pub": ("messages", "Publish each MESSAGE, or each line of --FILE or stdin, to TOPIC."),
    "tail": ("tail", "Print the messages of TOPIC as they come, until Ctrl-C."),
    "peek": (
        "tail",
        "Show messages of TOPIC's CHANNEL (without CHANNEL: of its backlog) and change nothing.",
    ),
    "topic": ("admin", "Create, delete, pause, unpause, empty, set or show a topic."),
    "channel": (
        "admin",
        "Create, delete, pause, unpause, empty, set or show a channel of a topic.",
    ),
    "message": ("message", "Take a message away from the consumer that holds it."),
    "lease": ("lease", "Show the open leases, or end one."),
    "forward": (
        "forward",
        "Move the messages of TOPIC's CHANNEL to TARGET, until SIGTERM or Ctrl-C.",
    ),
    "results": ("results", "Show results stores and what is in them, or delete one."),
    "dead": ("dead", "Show the dead letters of a channel, send them back to it, or drop them."),
    "deaths": (
        "deaths",
        "Show which processes of an instance died, and what was taken back from each.",
    ),
    "worker": (
        "worker",
        "Run worker processes for the durable pool MODULE:EXECUTOR, a `shmq.Executor`.",
    ),
    "access": ("access", "Ask an access file who may do what, or make the hashes for one."),
    "inspect": ("inspect", "Show the contents of FILE, and its damages with their offsets."),
    "doctor": ("doctor", "Check this host and its instances, and name a remedy for each problem."),
    "bench": ("bench", "Measure throughput and round trips on a private instance."),
}


_STDERR = 2


class _Commands(click.Group):
    """A group that loads only the module of the command that is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _ = COMMANDS[name]
        found = getattr(importlib.import_module(f"shmq.cli.{module}"), name)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List each command with the whole first sentence of its help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


_EPILOG = """\b
Examples:
  shmq serve --instance jobs --data-path /var/lib/jobs    run a broker
  shmq pub resize cat.png --instance jobs                 publish a message
  shmq tail resize workers --instance jobs                take messages
  shmq stat -i 1 --instance jobs                          watch it
  shmq doctor                                             find problems

The instance can also be named by SHMQ_INSTANCE. `shmq COMMAND --help` has all options.

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
    """Run a command and return its exit status. arguments: `sys.argv[1:]` if None."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _fill_closed_streams()
        clean_tracebacks()
    if words[:1] == ["serve"]:
        from shmq.cli.serve import end, two_dashes

        status = _run(two_dashes(words))
        if arguments is None:
            end(status)
        return status
    # The default action of SIGPIPE would end `shmq stat | head` silently, but also a command whose
    # server or client has gone: sockets of OpenSSL and of asyncio raise that signal.
    status = _run(words)
    return _flushed(status) if arguments is None else status


def _fill_closed_streams() -> None:
    """Open the null device where a standard stream is closed, as in `shmq serve 2>&-`. A file of
    messages would take that number otherwise, and what a library prints would go to it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(_STDERR, "w", closefd=False)


def _run(words: list[str]) -> int:
    try:
        color = False if os.environ.get("NO_COLOR") else None
        return int(cli.main(words, prog_name="shmq", standalone_mode=False, color=color) or OK)
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.exceptions.NoArgsIsHelpError as exc:
        _print(exc.format_message())
        return USAGE
    except click.ClickException as exc:
        shown = io.StringIO()
        exc.show(shown)
        _print(shown.getvalue().rstrip("\n"))
        return exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError as exc:
        from shmq.cli.output import forget_output, is_read

        if is_read():
            return _say(exc, ERROR)  # of a socket
        forget_output()
        return ERROR
    except NotRunning as exc:
        return _say(exc, NOT_RUNNING)
    except (ShmqError, OSError, ValueError) as exc:
        return _say(exc, ERROR)


def _flushed(status: int) -> int:
    """Print what is left, which the interpreter would do with a traceback if it fails. Returns the
    exit status of the command that ended with `status`."""
    from shmq.cli.output import forget_output

    try:
        if sys.stdout is not None:  # as in `shmq ls >&-`
            sys.stdout.flush()
    except BrokenPipeError:
        forget_output()
    except OSError as exc:  # a full disk
        forget_output()
        return _say(exc, ERROR)
    return status


def _say(exc: BaseException, status: int) -> int:
    text = str(exc)
    if isinstance(exc, OSError) and exc.strerror:
        text = f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror
    _print(f"shmq: {printable(text)}")
    return status


def _print(text: str) -> None:
    from shmq.cli.output import say  # slow to import

    say(text, err=True)
