"""nsqd's flags, configuration file and signals, given to a real nsqd and to shmq."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.external_programs import peer
from support.nsq_client import Server, drop_in
from support.processes import WATCHDOG, eventually

Start = Callable[..., Server]

#: flag -> key of /config, and what that shows
FLAGS = {
    "--auth-http-address=127.0.0.1:1": ("auth_http_addresses", '["127.0.0.1:1"]'),
    "--broadcast-address=1.2.3.4": ("broadcast_address", "1.2.3.4"),
    "--broadcast-http-port=81": ("broadcast_http_port", "81"),
    "--broadcast-tcp-port=80": ("broadcast_tcp_port", "80"),
    "--deflate=false": ("deflate", "false"),
    "--e2e-processing-latency-percentile=0.5,1.0": (
        "e2e_processing_latency_percentiles",
        "[1,0.5]",
    ),
    "--e2e-processing-latency-window-time=5m": (
        "e2e_processing_latency_window_time",
        "300000000000",
    ),
    "--http-client-connect-timeout=3s": ("http_client_connect_timeout", "3000000000"),
    "--http-client-request-timeout=4s": ("http_client_request_timeout", "4000000000"),
    "--log-level=DEBUG": ("log_level", "1"),
    "--log-prefix=[here] ": ("log_prefix", "[here] "),
    "--lookupd-tcp-address=127.0.0.1:2": ("nsqlookupd_tcp_addresses", '["127.0.0.1:2"]'),
    "--max-body-size=4000000": ("max_body_size", "4000000"),
    "--max-bytes-per-file=1000000": ("max_bytes_per_file", "1000000"),
    "--max-channel-consumers=9": ("max_channel_consumers", "9"),
    "--max-deflate-level=9": ("max_deflate_level", "9"),
    "--max-heartbeat-interval=90s": ("max_heartbeat_interval", "90000000000"),
    "--max-msg-size=500000": ("max_msg_size", "500000"),
    "--max-msg-timeout=20m": ("max_msg_timeout", "1200000000000"),
    "--max-output-buffer-size=70000": ("max_output_buffer_size", "70000"),
    "--max-output-buffer-timeout=31s": ("max_output_buffer_timeout", "31000000000"),
    "--max-rdy-count=2600": ("max_rdy_count", "2600"),
    "--max-req-timeout=2h": ("max_req_timeout", "7200000000000"),
    "--mem-queue-size=500": ("mem_queue_size", "500"),
    "--min-output-buffer-timeout=26ms": ("min_output_buffer_timeout", "26000000"),
    "--msg-timeout=1m1.5s": ("msg_timeout", "61500000000"),
    "--node-id=7": ("id", "7"),
    "--output-buffer-timeout=251ms": ("output_buffer_timeout", "251000000"),
    "--queue-scan-selection-count=21": ("queue_scan_selection_count", "21"),
    "--queue-scan-worker-pool-max=5": ("queue_scan_worker_pool_max", "5"),
    "--snappy=F": ("snappy", "false"),
    "--statsd-address=127.0.0.1:9": ("statsd_address", "127.0.0.1:9"),
    "--statsd-exclude-ephemeral": ("statsd_exclude_ephemeral", "true"),
    "--statsd-interval=2m": ("statsd_interval", "120000000000"),
    "--statsd-mem-stats=false": ("statsd_mem_stats", "false"),
    "--statsd-prefix=mine": ("statsd_prefix", "mine."),
    "--statsd-udp-packet-size=509": ("statsd_udp_packet_size", "509"),
    "--sync-every=2501": ("sync_every", "2501"),
    "--sync-timeout=3s": ("sync_timeout", "3000000000"),
    "--tls-client-auth-policy=none": ("tls_client_auth_policy", "none"),
    "--tls-min-version=TLS1.2": ("tls_min_version", "771"),
    "--tls-required=TCP-HTTPS": ("tls_required", "1"),
    "--verbose": ("verbose", '{"message":"INVALID_OPTION"}'),
    "--worker-id": ("worker_id", '{"message":"INVALID_OPTION"}'),
}

#: flags that every server of these tests has, or a test of their own
ELSEWHERE = {
    "config",
    "data-path",
    "http-address",
    "https-address",
    "tcp-address",
    "tls-cert",
    "tls-key",
    "tls-root-ca-file",
    "version",
}


def program(kind: str, directory: Path) -> str:
    return peer("nsqd") if kind == "nsqd" else drop_in(directory)


def test_no_flag_of_nsqd_is_left_out() -> None:
    done = subprocess.run([peer("nsqd"), "--help"], capture_output=True, text=True)
    known = set(re.findall(r"^  -([a-z0-9-]+)", done.stderr, re.MULTILINE))
    assert len(known) > 50
    assert known == ELSEWHERE | {flag.lstrip("-").partition("=")[0] for flag in FLAGS}


@pytest.mark.parametrize("notation", ["--flag=value", "-flag=value", "-flag value"])
def test_flags(start: Start, certificate: tuple[str, str], notation: str) -> None:
    words = [
        f"--tls-cert={certificate[0]}",
        f"--tls-key={certificate[1]}",
        f"--tls-root-ca-file={certificate[0]}",
        *FLAGS,
    ]
    if notation != "--flag=value":
        words = [word[1:] for word in words]
    if notation == "-flag value":
        words = [part for word in words for part in _apart(word)]
    server = start(*words)
    shown = {key: server.http("GET", f"/config/{key}").body.decode() for key, _ in FLAGS.values()}
    assert shown == dict(FLAGS.values())
    assert server.log.startswith("[here] ")


def _apart(word: str) -> list[str]:
    """The flag and its value; a switch has its value only behind a `=`."""
    flag, _, value = word.partition("=")
    switch = not value or flag == "-tls-required" or value in ("false", "F")
    return [word] if switch else [flag, value]


def test_a_configuration_file(start: Start, tmp_path: Path) -> None:
    config = tmp_path / "nsqd.cfg"
    config.write_text(
        'mem_queue_size = "77"\nmsg_timeout = 5000\nmax_rdy_count = 10\nid = 3\nunknown = 1\n'
        'snappy = false\ne2e_processing_latency_percentiles = [1.0, 0.5]\ntls_required = "false"\n'
        'log_level = "warn"\nmax_msg_timeout = "20m"\nauth_http_addresses = ["127.0.0.1:1"]\n'
        'tls_min_version = "tls1.1"\n'
    )
    server = start(f"--config={config}", "-max-rdy-count=20", "--log-level=info")
    for key, value in {
        "mem_queue_size": b"77",
        "msg_timeout": b"5000000000",
        "max_rdy_count": b"20",
        "id": b"3",
        "snappy": b"false",
        "log_level": b"2",
        "max_msg_timeout": b"1200000000000",
        "auth_http_addresses": b'["127.0.0.1:1"]',
        "tls_min_version": b"770",
        "e2e_processing_latency_percentiles": b"[1,0.5]",
    }.items():
        assert server.http("GET", f"/config/{key}").body == value, key
    assert server.connect().identify(feature_negotiation=True, snappy=True)["snappy"] is False


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("--no-such-flag",), 2),
        (("--msg-timeout=60",), 2),
        (("--worker-id=5",), 2),
        (("--log-level=warning",), 2),
        (("--tls-min-version=ssl3.0",), 2),
        (("--tls-required=perhaps",), 2),
        (("--data-path=/nonexistent",), 1),
        (("--tls-required=true",), 1),
        (("--tls-client-auth-policy=any",), 1),
        (("--tls-cert=/nonexistent",), 1),
        (("--tcp-address=127.0.0.1:99999",), 1),
    ],
)
def test_what_cannot_start_says_so(
    kind: str, words: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    argv = [program(kind, tmp_path), f"--data-path={tmp_path}"]
    argv += ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", *words]
    done = subprocess.run(argv, capture_output=True, timeout=WATCHDOG, cwd=tmp_path)
    assert done.returncode == status
    assert done.stderr
    assert status == 2 or b" FATAL: " in done.stderr


def test_a_port_in_use_is_told(kind: str, tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        where = f"127.0.0.1:{sock.getsockname()[1]}"
        argv = [
            program(kind, tmp_path),
            f"--data-path={tmp_path}",
            f"--tcp-address={where}",
            "--http-address=127.0.0.1:0",
        ]
        done = subprocess.run(argv, capture_output=True, timeout=WATCHDOG)
    assert done.returncode == 1
    text = f"listen ({where}) failed - listen tcp {where}: bind: address already in use"
    assert text in done.stderr.decode()


def test_a_data_path_in_use_is_told(start: Start, kind: str, tmp_path: Path) -> None:
    server = start()
    argv = [program(kind, tmp_path), f"--data-path={server.data_path}"]
    argv += ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    done = subprocess.run(argv, capture_output=True, timeout=WATCHDOG)
    assert done.returncode == 1
    assert b"failed to lock data" in done.stderr
    assert str(server.data_path).encode() in done.stderr


def test_version(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [program(kind, tmp_path), "-version"], capture_output=True, timeout=WATCHDOG
    )
    assert done.returncode == 0
    first, *others = done.stdout.decode().splitlines()
    assert re.fullmatch(r"nsqd v1\.3\.0 \(built w/go1\.[0-9.]+\)", first)
    assert others == ([] if kind == "nsqd" else [others[0]])
    assert kind == "nsqd" or re.fullmatch(r"shmq \S+ \(Python [0-9.]+\)", others[0])


def test_unix_sockets(start: Start) -> None:
    """Of both kinds; a clean end removes them."""
    with tempfile.TemporaryDirectory() as directory:
        server = start(f"--tcp-address={directory}/tcp", f"--http-address={directory}/http")
        client = server.connect()
        client.sub("t", "c", 1)
        client.pub("t", b"x")
        client.finish(client.delivery())
        assert server.channel("t", "c")["clients"][0]["remote_address"] == "@"
        info = server.json("/info")
        assert (info["tcp_port"], info["http_port"]) == (-1, -1)
        assert server.stop() == 0
        assert list(Path(directory).iterdir()) == []


# ---- signals ----


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGQUIT, 2)],
)
def test_signals(start: Start, number: signal.Signals, status: int) -> None:
    server = start()
    client = server.connect()
    client.sub("t", "c")
    client.pub("t", b"x")
    eventually(lambda: server.channel("t", "c")["depth"] == 1)
    assert server.stop(number) == status
    assert client.ended()
    flushed = b"".join(path.read_bytes() for path in server.data_path.glob("t:c.diskqueue.0*.dat"))
    assert flushed[30:] == (b"" if status else b"x")
    if number == signal.SIGQUIT:  # what a Go program and Python call it
        assert "goroutine" in server.log or "Current thread" in server.log


def test_signals_that_say_nothing(start: Start) -> None:
    server = start()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        server.process.send_signal(number)
    server.connect().pub("t", b"x")
    assert server.stop() == 0
