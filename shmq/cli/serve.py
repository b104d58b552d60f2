"""`shmq serve`: the supervisor process, in the foreground."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import click

from shmq import __version__, segments
from shmq.cli import ERROR
from shmq.errors import ShmqError
from shmq.gateway import access, listen, tls
from shmq.logs import set_up_logging
from shmq.options import OPTIONS, Kind, Option, OptionError, Options
from shmq.stats import NSQD_VERSION
from shmq.supervisor import descriptors, systemd
from shmq.supervisor.children import Children
from shmq.supervisor.supervisor import Supervisor

#: How long the gateway of a supervisor that was killed may hold its ports: on a busy machine one
#: that has just been started needs seconds until it can notice.
_PREDECESSOR_SECONDS = 10.0

_STACKS_SHOWN = 2  # exit status of a Go program

_OWN_FLAGS = ("config", "drain", "starter-pid", "version")


def two_dashes(words: list[str]) -> list[str]:
    """nsqd's one-dash flags (`-mem-queue-size=5`) and switches without a value, as click wants
    them."""
    known = {option.flag.lstrip("-") for option in OPTIONS.values()} | set(_OWN_FLAGS)
    switches = {option.flag for option in OPTIONS.values() if option.kind is Kind.SWITCH}
    switches.add("--tls-required")  # a word, but also a switch
    done = []
    for word in words:
        if word[:1] == "-" and word[:2] != "--" and word[1:].partition("=")[0] in known:
            word = f"-{word}"
        done.append(f"{word}=true" if word in switches else word)
    return done


def _add_options(command: Any) -> Any:
    """One click option for each of `options.py`, last first as decorators go."""
    for option in reversed(OPTIONS.values()):
        command = click.option(
            option.flag,
            option.name,
            metavar=_metavar(option),
            multiple=option.kind.repeats,
            default=None,
            envvar=option.env,
            help=f"{option.help[0].upper()}{option.help[1:]} [{_show_default(option)}].",
        )(command)
    return command


def _metavar(option: Option) -> str:
    return "|".join(option.choices) if option.choices else option.kind.value.upper()


def _show_default(option: Option) -> str:
    if option.default_words:
        return option.default_words
    if option.name == "instance":
        return "default"
    return option.show(option.default) or "none" if option.kind is not Kind.MODE else "0600"


def _show_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        click.echo(f"nsqd v{NSQD_VERSION} (built w/python{python}, shmq {__version__})")
        context.exit()


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
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Print which nsqd this is, and end.",
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
    try:
        set_up_logging(options)
    except OSError as exc:
        raise click.UsageError(f"--audit-log={options.audit_log}: {_sentence(exc)}") from exc
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr need not be a file
        faulthandler.enable()  # systemd's watchdog sends SIGABRT: where was every loop?
    _take_signals()
    descriptors.raise_limit()
    supervisor = Supervisor(options, starter_pid, notifier, Gateway(options, sockets))
    try:
        return supervisor.drain() if drain else supervisor.run()
    except (ShmqError, OSError, OptionError) as exc:
        logging.critical("%s", _sentence(exc))
        notifier.status(_sentence(exc))
        return ERROR


def _take_signals() -> None:
    """As Go's runtime does for nsqd, beside those that stop the supervisor; children inherit what
    is ignored."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, _show_stacks)


def _show_stacks(number: int, frame: FrameType | None) -> None:
    """End at once with all stacks on stderr; another supervisor takes up what is in memory."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.dump_traceback()
    os._exit(_STACKS_SHOWN)


class Gateway:
    """The gateway's processes, as the supervisor keeps them."""

    def __init__(self, options: Options, sockets: tuple[systemd.PassedSocket, ...]) -> None:
        self._options = options
        self._passed = sockets
        self._listeners: listen.Listeners | None = None
        self._control = ""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open the sockets, close them at the end. OSError, OptionError."""
        passed = [(item.fd, item.name) for item in self._passed]
        tls.server_context(self._options)  # so that a mistake is told now
        access.check(self._options)
        self._listeners = listeners = self._open(passed)
        try:
            if listeners:
                _check_installed()
                for kind, addresses in listeners.addresses.items():
                    for address in addresses:
                        logging.info("%s: listening on %s", kind.upper(), address)
            with tempfile.TemporaryDirectory(prefix="shmq-gateway-") as self._control:
                yield
        finally:
            listeners.close()

    def _open(self, passed: list[tuple[int, str]]) -> listen.Listeners:
        """Wait for the ports if an instance was left: a gateway ends a moment after its killed
        supervisor."""
        deadline = time.monotonic() + _PREDECESSOR_SECONDS
        while True:
            try:
                return listen.open_listeners(self._options, passed)
            except OSError as exc:
                follows = segments.list_objects(self._options.instance)
                late = time.monotonic() > deadline
                if exc.errno != errno.EADDRINUSE or not follows or late:
                    raise
            time.sleep(0.01)

    def children(self, news: Callable[[], dict[str, str]]) -> Children | None:
        """The processes; None without a socket."""
        listeners = self._listeners
        if not listeners:
            return None
        documents = [
            {
                "options": dataclasses.asdict(self._options),
                "sockets": sockets,
                "index": index,
                "workers": len(listeners.workers),
                "ports": listeners.ports,
                "control": self._control,
                "start_time": int(time.time()),
                "argv": sys.argv,
            }
            for index, sockets in enumerate(listeners.workers)
        ]
        argv = [sys.executable, "-m", "shmq.gateway.worker"]
        return Children(argv, documents, listeners.fds, news)


def _check_installed() -> None:
    for name in ("aiohttp", "cramjam"):
        if importlib.util.find_spec(name) is None:
            raise OSError(
                f"the gateway needs {name}: pip install 'shmq[gateway]', or serve shared memory "
                "only: --tcp-address= --http-address="
            )


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
