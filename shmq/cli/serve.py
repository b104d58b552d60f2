"""`shmq serve`: the supervisor process, in the foreground."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import logging
import os
import sys
import time
import tomllib
from typing import Any

import click

from shmq.cli import ERROR
from shmq.errors import ShmqError
from shmq.options import OPTIONS, Kind, Option, Options
from shmq.supervisor import systemd
from shmq.supervisor.supervisor import Supervisor

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

_OWN_FLAGS = ("config", "drain", "starter-pid")


class _NsqdFormatter(logging.Formatter):
    """nsqd's lines: `[nsqd] 2026/01/31 12:00:00.000000 INFO: text`."""

    def __init__(self, prefix: str) -> None:
        super().__init__("%(message)s")
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(record.created))
        micros = int(record.created % 1 * 1e6)
        return f"{self._prefix}{when}.{micros:06d} {_level(record)}: {super().format(record)}"


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; a traceback is in `exception`, so no record has two lines."""

    def __init__(self, instance: str) -> None:
        super().__init__("%(message)s")
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        document = {
            "time": when.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": _level(record).lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "instance": self._instance,
            "pid": os.getpid(),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


def _level(record: logging.LogRecord) -> str:
    """As nsqd spells it."""
    if record.levelno >= logging.CRITICAL:
        return "FATAL"
    return record.levelname


def set_up_logging(options: Options) -> None:
    """Send the log of this process to stderr, as nsqd does or as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    if options.log_format == "json":
        handler.setFormatter(_JsonFormatter(options.instance))
    else:
        handler.setFormatter(_NsqdFormatter(options.log_prefix))
    logging.raiseExceptions = False  # a closed stderr must not end a broker
    logging.basicConfig(level=_LEVELS[options.log_level], handlers=[handler], force=True)


def two_dashes(words: list[str]) -> list[str]:
    """nsqd's one-dash flags (`-mem-queue-size=5`) as click wants them."""
    known = {option.flag.lstrip("-") for option in OPTIONS.values()} | set(_OWN_FLAGS)
    return [
        f"-{word}"
        if word.startswith("-") and not word.startswith("--") and word[1:].split("=")[0] in known
        else word
        for word in words
    ]


def _add_options(command: Any) -> Any:
    """One click option for each of `options.py`, last first as decorators go."""
    for option in reversed(OPTIONS.values()):
        command = click.option(
            option.flag,
            option.name,
            metavar=_metavar(option),
            default=None,
            envvar=option.env,
            help=f"{option.help[0].upper()}{option.help[1:]} [{_show_default(option)}].",
        )(command)
    return command


def _metavar(option: Option) -> str:
    return "|".join(option.choices) if option.choices else option.kind.value.upper()


def _show_default(option: Option) -> str:
    if option.name == "node_id":
        return "from the host name"
    if option.name == "instance":
        return "default"
    return option.show(option.default) or "none" if option.kind is not Kind.MODE else "0600"


@click.command()
@_add_options
@click.option("--config", type=click.Path(), help="TOML file with any of these options.")
@click.option(
    "--starter-pid",
    type=click.IntRange(1),
    metavar="PID",
    help="Stop when this process has ended and no client is attached.",
)
@click.option(
    "--drain",
    is_flag=True,
    help="Write what a supervisor of this release left in shared memory to disk, and end.",
)
def serve(config: str | None, starter_pid: int | None, drain: bool, **flags: str | None) -> int:
    """Run the supervisor of an instance until SIGTERM or Ctrl-C.

    Then everything in memory is flushed to --data-path, from where the next start takes it up.
    All flags are nsqd's, with one dash or two, and its defaults.
    """
    notifier = systemd.Notifier.from_environment()
    if starter_pid is not None:
        notifier = systemd.Notifier()  # the manager's messages are about our starter
    try:
        options = Options.load(flags, _read_config(config))
        options.permissions()
        sockets = systemd.listen_fds()
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    set_up_logging(options)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr need not be a file
        faulthandler.enable()  # systemd's watchdog sends SIGABRT: where was every loop?
    supervisor = Supervisor(options, starter_pid, notifier, sockets)
    try:
        return supervisor.drain() if drain else supervisor.run()
    except (ShmqError, OSError) as exc:
        logging.critical("%s", _sentence(exc))
        notifier.status(_sentence(exc))
        return ERROR


def _read_config(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as exc:
        raise ValueError(f"cannot read the configuration file {path}: {exc}") from exc


def _sentence(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror
    return str(exc)
