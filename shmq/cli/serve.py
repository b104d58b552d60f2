"""`shmq serve`: the supervisor process, in the foreground.

Slow imports come late, to keep a start short: the gateway's processes are launched as soon as the
options are known, and load their modules while this process loads its own.
"""

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
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from shmq import __version__, interpreter, ownership, shm
from shmq.cli.output import say
from shmq.cli.status import ERROR
from shmq.errors import ShmqError
from shmq.gateway import tokens
from shmq.logs import set_log_level, set_up_logging
from shmq.nsqd import NSQD_VERSION
from shmq.option_types import Kind, Option, OptionError
from shmq.options import OPTIONS, Options, unknown_keys
from shmq.supervisor import rlimits, systemd

if TYPE_CHECKING:
    from shmq.gateway.listeners import Listeners
    from shmq.supervisor.workers import Launched, Workers

#: How long to wait for ports that the gateway of a killed supervisor still holds. On a busy machine
#: a gateway that has just been started needs seconds until it notices the death.
_PREDECESSOR_SECONDS = 10.0

_log = logging.getLogger(__name__)

_STACKS_SHOWN = 2  # exit status of a Go program

#: The Go version of the nsqd 1.3.0 release. Programs that parse nsqd's version line expect one.
_NSQD_BUILT_WITH = "go1.21.5"

_OWN_FLAGS = (
    "config",
    "config-unknown",
    "drain",
    "dropping",
    "nsqd",
    "owned",
    "parent-pid",
    "version",
)

_WORKER = "shmq.gateway.worker"


def two_dashes(words: list[str]) -> list[str]:
    """The words with nsqd's spellings as click expects them: two dashes (`-mem-queue-size=5`), and
    a value on each switch."""
    known = {option.flag.lstrip("-") for option in OPTIONS.values()} | set(_OWN_FLAGS)
    switches = {option.flag for option in OPTIONS.values() if option.kind is Kind.SWITCH}
    switches.add("--tls-required")  # takes a word, and is also allowed without a value
    done = []
    for word in words:
        if word[:1] == "-" and word[:2] != "--" and word[1:].partition("=")[0] in known:
            word = f"-{word}"
        done.append(f"{word}=true" if word in switches else word)
    return done


def end(status: int) -> None:
    """End this process at once. The interpreter's own end would free object by object what the
    kernel frees as a whole, for 20 ms in which whoever stops a broker waits."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or without reader
            stream.flush()
    os._exit(status)


def _add_options(command: Any) -> Any:
    """Add a click option for each of `OptionFields`, the last first because decorators nest."""
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
        say(f"nsqd v{NSQD_VERSION} (built w/{_NSQD_BUILT_WITH})")
        python = ".".join(map(str, sys.version_info[:3]))
        say(f"shmq {__version__} (Python {python})")
        context.exit()


class _Grouped(click.Command):
    """A command whose help lists its options under the titles that `OptionFields` gives them."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Options that `OptionFields` does not have come first, without a title."""
        sections: dict[str, list[tuple[str, str]]] = {"": []}
        for parameter in self.get_params(context):
            record, known = parameter.get_help_record(context), OPTIONS.get(parameter.name or "")
            if record is not None:
                sections.setdefault(known.group if known else "", []).append(record)
        for title, rows in sections.items():
            with formatter.section(f"Options ({title})" if title else "Options"):
                formatter.write_dl(rows)


@click.command(cls=_Grouped)
@_add_options
@click.option(
    "--nsqd",
    is_flag=True,
    help="Replace nsqd: listen on all addresses and accept TLS 1.0, as it does; without "
    "--instance, name the instance after the data path; --config-unknown=warn.",
)
@click.option("--config", type=click.Path(), help="TOML file with any of these options.")
@click.option(
    "--config-unknown",
    type=click.Choice(["refuse", "warn"]),
    help="What to do if that file has a key that is not an option [refuse; with --nsqd warn].",
)
@click.option(
    "--parent-pid",
    type=click.IntRange(1),
    metavar="PID",
    help="Stop when this process has ended and no client is attached.",
)
@click.option(
    "--owned",
    is_flag=True,
    help="Stop when the process of --parent-pid has ended, also if clients are attached; drop all "
    "messages at the end; make and remove --data-path.",
)
@click.option(
    "--dropping",
    is_flag=True,
    help="At SIGINT, and when the process of --parent-pid has ended, drop all messages and remove "
    "--data-path.",
)
@click.option(
    "--drain",
    is_flag=True,
    help="Write the messages that a supervisor of this release left in shared memory to disk, and "
    "end.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Print the versions of nsqd and shmq, and end.",
)
def serve(
    nsqd: bool,
    config: str | None,
    config_unknown: str | None,
    parent_pid: int | None,
    owned: bool,
    dropping: bool,
    drain: bool,
    **flags: str | None,
) -> int:
    """Run the supervisor of an instance until SIGTERM or Ctrl-C.

    At the end it flushes all messages in memory to --data-path, from where the next start reads
    them. It takes nsqd's flags, with one dash or two, and has nsqd's defaults, except that it
    listens on loopback only and needs TLS 1.2 or newer; --nsqd sets nsqd's own. SIGHUP reads
    certificates, the access file, log level and the gateway's limits again.
    """
    notifier = systemd.Notifier.from_environment()
    if parent_pid is not None:
        notifier = systemd.Notifier()  # systemd's notifications are about the parent process
    if owned and parent_pid is None:
        raise click.UsageError("--owned needs --parent-pid: the process that owns the instance")
    source = _Source(flags, config, config_unknown or ("warn" if nsqd else "refuse"), nsqd)
    try:
        options = source.load()
        options.permissions()
        sockets = systemd.listen_fds()
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    try:
        set_up_logging(options)
    except OSError as exc:
        raise click.UsageError(f"--audit-log={options.audit_log}: {_sentence(exc)}") from exc
    source.say_unknown()
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr may have no descriptor
        # systemd's watchdog sends SIGABRT; the stacks show where each loop was
        faulthandler.enable()
    _take_signals()
    rlimits.raise_limit()
    gateway = Gateway(options, sockets, source)
    try:
        if not drain:
            gateway.launch()
        from shmq.supervisor.supervisor import Supervisor  # slow to import

        supervisor = Supervisor(options, parent_pid, notifier, gateway, owned, dropping)
        return supervisor.drain() if drain else supervisor.run()
    except (ShmqError, OSError, OptionError) as exc:
        _log.critical("%s", _sentence(exc))
        notifier.status(_sentence(exc))
        return ERROR
    finally:
        gateway.dismiss()


@dataclasses.dataclass(frozen=True)
class _Source:
    """Flags and configuration file. Each reload reads them again."""

    flags: dict[str, str | None]
    config: str | None
    unknown: str
    nsqd: bool

    def load(self) -> Options:
        """Read the options. Raises ValueError."""
        config = _read_config(self.config)
        if config is not None and self.unknown == "refuse" and (wrong := unknown_keys(config)):
            raise OptionError(f"{self.config}: {'; '.join(wrong)} (or --config-unknown=warn)")
        return Options.load(self.flags, config, nsqd=self.nsqd)

    def names_gateway(self) -> bool:
        """Whether a flag, the file or --nsqd says anything of the gateway. Raises ValueError."""
        config = _read_config(self.config) or {}
        return self.nsqd or any(
            bool(text := self.flags.get(option.name)) or text == "" or option.key in config
            for option in OPTIONS.values()
            if option.group == "gateway"
        )

    def say_unknown(self) -> None:
        """Log a warning for each key of the file that is not an option."""
        with contextlib.suppress(ValueError):
            for wrong in unknown_keys(_read_config(self.config) or {}):
                _log.warning("%s: %s; ignored", self.config, wrong)


def _take_signals() -> None:
    """Treat signals as Go's runtime does for nsqd, except those that stop the supervisor. Children
    inherit the ignored ones. A program that waits for its signals has blocked them, and the broker
    that it embeds would never end."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, _show_stacks)


def _show_stacks(number: int, frame: FrameType | None) -> None:
    """Print all stacks on stderr and exit at once. Another supervisor adopts the memory."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.dump_traceback()
    os._exit(_STACKS_SHOWN)


class Gateway:
    """The gateway's processes and sockets, as the supervisor sees them."""

    def __init__(
        self, options: Options, sockets: tuple[systemd.PassedSocket, ...], source: _Source
    ) -> None:
        self._options = options
        self._passed = sockets
        self._source = source
        self._listeners: Listeners | None = None
        self._control = ""
        self._absent = ""
        """Why there is no gateway, if nobody has asked for one and it is not installed."""
        self._launched: list[Launched] = []
        self._reloads = 0
        self._changed: dict[str, Any] = {}

    def launch(self) -> None:
        """Start the processes early, so that they have loaded their modules when the sockets are
        open. Raises OSError."""
        options = self._options
        asked = options.tcp_address or options.http_address
        if asked or (options.https_address and options.tls_cert) or self._passed:
            if missing := _missing():
                how = f"{missing} is not installed: pip install 'shmq[gateway]'"
                if self._passed or self._source.names_gateway():
                    raise OSError(
                        f"the gateway cannot serve: {how}, or serve shared memory only: "
                        "--tcp-address= --http-address="
                    )
                self._absent = how
                return
            from shmq.supervisor.workers import launch  # slow to import

            for _ in range(options.gateway_workers):
                self._launched.append(launch(interpreter.run_main(_WORKER)))

    def dismiss(self) -> None:
        """End the processes that `children` has not taken over."""
        while self._launched:
            self._launched.pop().dismiss()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open the sockets, and close them after the block. Raises OSError, OptionError."""
        _check_tls(self._options)  # reports a mistake before the instance starts
        _check_access(self._options)
        if not self._launched:
            self._say({})
            if self._absent:
                _log.info("no gateway, shared memory only: %s to serve TCP and HTTP", self._absent)
            yield
            return
        from shmq.gateway.listeners import (
            control_directory,
        )  # slow to import, as is all of the gateway

        passed = [(item.fd, item.name) for item in self._passed]
        self._listeners = listeners = self._open(passed)
        try:
            self._say(listeners.addresses)
            self._warn(listeners)
            with control_directory() as self._control:
                yield
        finally:
            listeners.close()

    def _say(self, addresses: dict[str, list[str]]) -> None:
        """Log the addresses, by kind, and the options that differ from the defaults."""
        options = self._options
        data_path = os.path.realpath(options.data_path or ".")
        said = [f"shmq {__version__}", f"instance {options.instance}", f"data path {data_path}"]
        said += [
            f"{kind.upper()} {address}" for kind, found in addresses.items() for address in found
        ]
        named = ("instance=", "data_path=", "tcp_address=", "http_address=", "https_address=")
        differing = options.differing(self._source.nsqd)
        said += [item for item in differing if not item.startswith(named)]
        _log.info("%s", ", ".join(said))
        for kind, found in addresses.items():
            for address in found:
                _log.info("%s: listening on %s", kind.upper(), address)

    def _warn(self, listeners: Listeners) -> None:
        """Log a warning if other hosts can connect and nothing protects what they reach, or if
        HTTP goes around AUTH."""
        from shmq.gateway.listeners import beside_auth, open_to_others

        if beside := beside_auth(listeners, self._options):
            _log.warning(
                "%s: AUTH is asked for on TCP only, so everybody who can connect here may publish "
                "and create without it. Say who may (--access-file, --http-token-file), or switch "
                "it off (--http-writes=false, --http-address=)",
                ", ".join(beside),
            )
        if reachable := open_to_others(listeners, self._options):
            _log.warning(
                "%s: other hosts can connect, without TLS or AUTH, and so read, publish and delete "
                "everything. Listen on loopback (--tcp-address=127.0.0.1:4150 --http-address="
                "127.0.0.1:4151), or say who may do what (--access-file), or ask for TLS "
                "(--tls-required=true with --tls-cert, --tls-key) or AUTH (--auth-http-address; "
                "TCP only), or let a firewall close these ports",
                ", ".join(reachable),
            )

    def _open(self, passed: list[tuple[int, str]]) -> Listeners:
        """Open the sockets. If shared memory of this instance exists, wait for the ports: a gateway
        ends a moment after its supervisor was killed."""
        from shmq.gateway.listeners import open_listeners

        deadline = time.monotonic() + _PREDECESSOR_SECONDS
        while True:
            try:
                return open_listeners(self._options, passed)
            except OSError as exc:
                follows = shm.list_objects(self._options.instance)
                late = time.monotonic() > deadline
                if exc.errno != errno.EADDRINUSE or not follows or late:
                    raise
            time.sleep(0.01)

    def workers(self, news: Callable[[], dict[str, Any]]) -> Workers | None:
        """The processes for the supervisor to keep running; None if there is no socket."""
        listeners = self._listeners
        if not listeners:
            return None
        documents = [
            {
                "options": dataclasses.asdict(self._options),
                "fds": sorted(fd for fds in sockets.values() for fd in fds),
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
        from shmq.supervisor.workers import Workers

        launched, self._launched = self._launched, []
        argv = interpreter.run_main(_WORKER)
        return Workers(argv, documents, lambda: {**news(), **self._wish()}, launched)

    def _wish(self) -> dict[str, Any]:
        """The request to reload that goes to the processes; empty before the first reload."""
        if not self._reloads:
            return {}
        return {"reload": {"number": self._reloads, "options": self._changed}}

    def reload(self) -> None:
        """Read the configuration file, the certificates and the access file again. An error is
        logged, and then nothing changes."""
        try:
            wanted = self._source.load()
            changes, others = self._options.changes(wanted)
            options = self._options.replace(**changes)
            _check_tls(options)
            _check_access(options)
        except (OSError, ValueError) as exc:
            _log.error("cannot reload: %s; everything stays as it was", _sentence(exc))
            return
        if others:
            _log.warning("not before the next start: %s", ", ".join(others))
        self._options, self._reloads = options, self._reloads + 1
        self._changed |= changes
        set_log_level(options)
        shown = [f"{name}={OPTIONS[name].show_safely(value)}" for name, value in changes.items()]
        _log.info("reload: certificates, %s", ", ".join(shown) or "no other option")


def _check_tls(options: Options) -> None:
    """Load the certificates. Raises OptionError, OSError."""
    if options.tls_root_ca_file:
        ownership.check_trusted(options.tls_root_ca_file, "the file of --tls-root-ca-file")
    if (
        options.tls_cert
        or options.tls_key
        or options.tls_required != "false"
        or (options.tls_client_auth_policy)
    ):
        from shmq.gateway import tls  # OpenSSL is slow to load

        tls.server_context(options)


def _check_access(options: Options) -> None:
    """Read the tokens and the access file. Raises OptionError, OSError."""
    tokens.tokens_of(options)
    if options.access_file:
        from shmq.gateway import rights  # slow to import, and few need it

        rights.check(options)


def _missing() -> str:
    """The name of a module that the gateway needs and that is not installed, or an empty text."""
    wanted = ("aiohttp", "cramjam", "re2")
    return next((name for name in wanted if importlib.util.find_spec(name) is None), "")


def _read_config(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    import tomllib  # slow to import

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as exc:
        raise ValueError(f"cannot read the configuration file {path}: {exc}") from exc


def _sentence(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        from shmq.storage import remedies  # for a mistake only

        return remedies.sentence(exc)
    return str(exc)
