"""`shmq serve` with its defaults: which hosts reach it, its name, its log.

A file of options is refused if it cannot be meant so; `--nsqd` takes nsqd's.
"""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.processes import WATCHDOG, Child, eventually

from shmq import shm
from shmq.gateway.listeners import Listeners, open_to_others
from shmq.host_defaults import instance_of
from shmq.options import OPTIONS, Options, unknown_keys

#: nsqd's own, contrib/nsqd.cfg.example of nsq 1.3.0, with the lines that it only proposes.
SAMPLE = """
log_level = "info"
id = 515
tcp_address = "0.0.0.0:0"
http_address = "127.0.0.1:0"
https_address = "127.0.0.1:0"
broadcast_address = ""
nsqlookupd_tcp_addresses = [ "127.0.0.1:4160" ]
http_client_connect_timeout = "2s"
http_client_request_timeout = "5s"
data_path = "."
mem_queue_size = 10000
max_bytes_per_file = 104857600
sync_every = 2500
sync_timeout = "2s"
msg_timeout = "60s"
max_msg_timeout = "15m"
max_msg_size = 1024768
max_req_timeout = "1h"
max_body_size = 5123840
max_heartbeat_interval = "60s"
max_rdy_count = 2500
max_output_buffer_size = 65536
max_output_buffer_timeout = "1s"
statsd_address = "127.0.0.1:8125"
statsd_prefix = "nsq.%s"
statsd_interval = "60s"
statsd_mem_stats = true
statsd_udp_packet_size = 508
e2e_processing_latency_percentiles = [ 1.0, 0.99, 0.95 ]
e2e_processing_latency_window_time = "10m"
tls_cert = ""
tls_key = ""
tls_client_auth_policy = ""
tls_root_ca_file = ""
tls_required = false
tls_min_version = "tls1.0"
deflate = true
max_deflate_level = 6
snappy = true
"""

Serve = Callable[..., Child]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve(*words)`: `shmq serve` in a directory of its own, on ports of its own."""
    made: list[Child] = []
    ports = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")

    def start(
        *words: str,
        ports: tuple[str, ...] = ports,
        env: dict[str, str] | None = None,
        directory: Path = tmp_path,
    ) -> Child:
        run = f"import os, sys; os.chdir({str(directory)!r}); from shmq.cli import main; "
        argv = [sys.executable, "-c", f"{run}sys.exit(main(sys.argv[1:]))", "serve"]
        made.append(Child([*argv, *ports, *words], env))
        return made[-1]

    yield start
    for child in made:
        names = re.findall(r" instance (\S+?),", child.errors)
        child.close()
        for name in names:
            processes.remove_instance(name)


def running(child: Child) -> str:
    """Wait until it runs; its name."""
    eventually(lambda: ": running, pid" in child.errors or child.process.poll() is not None)
    assert child.process.poll() is None, child.errors
    found = re.search(r"instance (\S+): running", child.errors)
    assert found is not None
    return found[1]


# ---- who can reach it ----


def test_what_is_not_safe_is_asked_for() -> None:
    """The defaults are for this host only, with --nsqd they are nsqd's."""
    safe, nsqd = Options.load({}), Options.load({}, nsqd=True)
    for kind, port in (("tcp", 4150), ("http", 4151), ("https", 4152)):
        assert getattr(safe, f"{kind}_address") == f"127.0.0.1:{port}"
        assert getattr(nsqd, f"{kind}_address") == f"0.0.0.0:{port}"
    assert (safe.tls_min_version, nsqd.tls_min_version) == ("tls1.2", "tls1.0")
    differ = {name for name in OPTIONS if getattr(safe, name) != getattr(nsqd, name)}
    assert differ == {"instance"} | {
        option.name for option in OPTIONS.values() if option.nsqd_default is not None
    }
    told = Options.load({"tcp_address": "1.2.3.4:5"}, {"https_address": "1.2.3.4:6"}, nsqd=True)
    assert (told.tcp_address, told.https_address) == ("1.2.3.4:5", "1.2.3.4:6")


@pytest.mark.parametrize(
    ("addresses", "options", "open_ones"),
    [
        ({"tcp": ["127.0.0.1:1"], "http": ["[::1]:2", "[::ffff:127.0.0.1]:2"]}, {}, []),
        ({"tcp": ["/run/tcp.sock"]}, {}, []),
        ({"tcp": ["0.0.0.0:1"], "http": ["[::]:2"]}, {}, ["TCP 0.0.0.0:1", "HTTP [::]:2"]),
        ({"tcp": ["10.0.0.1:1"], "https": ["10.0.0.1:3"]}, {}, ["TCP 10.0.0.1:1"]),
        ({"tcp": ["[::]:1"], "http": ["[::]:2"]}, {"auth_http_address": ["a:1"]}, ["HTTP [::]:2"]),
        ({"tcp": ["[::]:1"], "http": ["[::]:2"]}, {"tls_required": "tcp-https"}, ["HTTP [::]:2"]),
        ({"tcp": ["[::]:1"], "http": ["[::]:2"]}, {"tls_required": "true"}, []),
    ],
)
def test_what_others_can_reach_unguarded(
    addresses: dict[str, list[str]], options: dict[str, Any], open_ones: list[str]
) -> None:
    listeners = Listeners([], addresses)
    assert open_to_others(listeners, Options.from_keywords(**options)) == open_ones


def test_an_open_door_is_said_once(serve: Serve) -> None:
    child = serve(ports=("--tcp-address=0.0.0.0:0", "--http-address=127.0.0.1:0"))
    running(child)
    warnings = [line for line in child.errors.splitlines() if " WARNING: " in line]
    assert len(warnings) == 1
    assert re.search(r"WARNING: TCP 0\.0\.0\.0:\d+: other hosts can connect", warnings[0])
    assert all(word in warnings[0] for word in ("127.0.0.1:4150", "--tls-required", "--auth-http"))


def test_on_loopback_nothing_is_warned_of(serve: Serve) -> None:
    child = serve("--instance=quiet-defaults")
    running(child)
    assert "WARNING" not in child.errors


@pytest.mark.parametrize(
    ("words", "speaks"), [((), False), (("--tls-min-version=tls1.0",), True), (("--nsqd",), True)]
)
def test_old_tls_is_only_for_who_asks(
    serve: Serve, certificate: tuple[str, str], words: tuple[str, ...], speaks: bool
) -> None:
    cert, key = certificate
    child = serve(f"--tls-cert={cert}", f"--tls-key={key}", "--https-address=127.0.0.1:0", *words)
    running(child)
    found = re.search(r"HTTPS: listening on 127\.0\.0\.1:(\d+)", child.errors)
    assert found is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_2):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            context.load_verify_locations(cert)
            context.minimum_version = context.maximum_version = version
            agreed = speaks or version == ssl.TLSVersion.TLSv1_2
            assert _handshake(context, int(found[1])) == agreed, version


def _handshake(context: ssl.SSLContext, port: int) -> bool:
    import socket

    with socket.create_connection(("127.0.0.1", port), WATCHDOG) as sock:
        try:
            with context.wrap_socket(sock, server_hostname="127.0.0.1") as secure:
                assert secure.version() is not None
        except (ssl.SSLError, ConnectionError):
            return False
    return True


# ---- what it is called ----


def test_two_drop_ins_do_not_collide(serve: Serve, tmp_path: Path) -> None:
    """Each data path has an instance of its own, the same one after a restart."""
    names = []
    for number in (1, 2, 1):
        directory = tmp_path / f"data{number}"
        directory.mkdir(exist_ok=True)
        child = serve("--nsqd", directory=directory)
        name = running(child)
        assert name == instance_of(str(directory))
        assert shm.list_objects(name)
        names.append(name)
        if len(names) == 1:
            assert child.kill(processes.signal.SIGTERM) == 0
    assert names[0] == names[2] != names[1]
    assert all(re.fullmatch("nsqd-[0-9a-f]{8}", name) for name in names)


def test_who_names_the_instance_decides(serve: Serve, tmp_path: Path) -> None:
    name = f"named-{os.getpid()}"
    child = serve("--nsqd", env={"SHMQ_INSTANCE": name})
    assert running(child) == name
    (tmp_path / "link").symlink_to(tmp_path)
    assert instance_of(str(tmp_path / "link")) == instance_of(str(tmp_path))
    assert Options.load({"instance": "x"}, nsqd=True).instance == "x"
    assert Options.load({}, {"instance": "y"}, nsqd=True).instance == "y"


# ---- what it says ----


def test_the_log_begins_with_what_was_started(serve: Serve, tmp_path: Path) -> None:
    secret = "http://user:hunter2@127.0.0.1:1/auth?key=hunter3"
    child = serve("--nsqd", "--mem-queue-size=77", f"--auth-http-address={secret}")
    name = running(child)
    first = child.errors.splitlines()[0]
    assert first.startswith("[nsqd] ")
    assert f"instance {name}, data path {tmp_path}, TCP 127.0.0.1:" in first
    assert "mem_queue_size=77" in first
    assert "auth_http_address=http://***@127.0.0.1:1/auth?***" in first
    assert "max_msg_size" not in first
    assert "hunter" not in child.errors


# ---- the configuration file ----


def test_a_misspelt_key_is_refused(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "shmq.toml"
    file.write_text("mem_queue_sise = 5\n")
    child = serve(f"--config={file}")
    assert child.wait() == 2
    assert "there is no option 'mem_queue_sise': did you mean mem_queue_size" in child.errors
    assert "--config-unknown=warn" in child.errors


@pytest.mark.parametrize("word", ["--config-unknown=warn", "--nsqd"])
def test_a_misspelt_key_is_warned_of_if_asked(serve: Serve, tmp_path: Path, word: str) -> None:
    file = tmp_path / "shmq.toml"
    file.write_text("mem_queue_sise = 5\n")
    child = serve(f"--config={file}", f"--instance=warned-{os.getpid()}", word)
    running(child)
    assert re.search("WARNING: .*'mem_queue_sise': did you mean mem_queue_size", child.errors)
    assert child.kill(processes.signal.SIGTERM) == 0


def test_the_keys_of_nsqd_are_known(serve: Serve, tmp_path: Path) -> None:
    assert unknown_keys({"node_id": 5}) == ["there is no option 'node_id': did you mean id?"]
    file = tmp_path / "nsqd.cfg"
    file.write_text(SAMPLE)
    child = serve(f"--config={file}", f"--instance=sample-{os.getpid()}")
    running(child)
    assert "there is no option" not in child.errors


# ---- how it starts ----


def test_the_gateway_is_launched_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    """The gateway processes and the supervisor load their modules side by side."""
    code = """
import sys
import shmq.supervisor.workers as workers
heavy = {"numpy", "aiohttp", "ssl", "psutil", "asyncio", "importlib.metadata", "email"}
def launch(argv):
    print(",".join(sorted(heavy & sys.modules.keys())))
    raise OSError("enough")
workers.launch = launch
sys.argv[1:] = ["serve", "--instance=light"]
from shmq.cli import main
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=WATCHDOG
    )
    assert (done.returncode, done.stdout) == (1, "\n"), done.stderr


def test_a_gateway_process_serves_tcp_before_it_has_loaded_aiohttp() -> None:
    code = "import sys, shmq.gateway.worker; print('aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
