"""SIGHUP: certificates, log level and limits are read again; with a terminal that goes, it ends
with a flush."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import ssl
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import processes
from support.certificates import write_certificate
from support.external_programs import peer
from support.nsq_client import ERROR, OK, Server, mpub
from support.processes import WATCHDOG, eventually

import shmq

WORKERS = 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """With a certificate and a configuration file."""
    instance = f"reload-{os.getpid()}"
    write_certificate(tmp_path / "cert.pem", tmp_path / "key.pem", "first")
    config = tmp_path / "shmq.toml"
    config.write_text('max_rdy_count = 10\nmem_queue_size = 500\nlog_level = "info"\n')
    server = Server(
        "shmq",
        tmp_path,
        instance,
        f"--config={config}",
        f"--tls-cert={tmp_path / 'cert.pem'}",
        f"--tls-key={tmp_path / 'key.pem'}",
        f"--gateway-workers={WORKERS}",
    )
    # A process that begins later would read what a test has written meanwhile.
    eventually(lambda: server.log.count(": serving") == WORKERS)
    yield server
    server.close()
    processes.remove_instance(instance)


def reload(server: Server) -> None:
    """Signal it and wait for both processes."""

    def counts() -> list[int]:
        return [server.log.count(f"gateway {number}: reloaded") for number in (0, 1)]

    before = counts()
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: counts() == [number + 1 for number in before])


def shown_https(server: Server) -> str:
    """The name in the certificate that a new HTTPS connection sees."""
    return _name(ssl.get_server_certificate(("127.0.0.1", server.port("https")), timeout=WATCHDOG))


def shown_tcp(server: Server) -> str:
    """The name in the certificate that a new connection of the TCP protocol sees."""
    client = server.connect()
    assert client.identify(feature_negotiation=True, tls_v1=True)["tls_v1"] is True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(client.sock.dup()) as secure:
        certificate = secure.getpeercert(binary_form=True)
    assert certificate is not None
    return _name(ssl.DER_cert_to_PEM_cert(certificate))


def _name(certificate: str) -> str:
    done = subprocess.run(
        [peer("openssl"), "x509", "-noout", "-subject"],
        input=certificate,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip().rpartition("=")[2].strip()


def test_certificates_are_read_again(server: Server, tmp_path: Path) -> None:
    """Those of old connections stay; so do the connections."""
    assert (shown_https(server), shown_tcp(server)) == ("first", "first")
    old = server.connect()
    old.sub("t", "c", 1)
    write_certificate(tmp_path / "cert.pem", tmp_path / "key.pem", "second")
    reload(server)
    for _ in range(8):  # of both processes
        assert (shown_https(server), shown_tcp(server)) == ("second", "second")
    server.connect().pub("t", b"x")
    old.finish(old.delivery())
    assert server.stop() == 0


def test_a_certificate_that_cannot_be_used_changes_nothing(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate\n")
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: "cannot reload: cannot use --tls-cert=" in server.log)
    assert (shown_https(server), shown_tcp(server)) == ("first", "first")


def test_limits_and_the_log_level_are_read_again(server: Server, tmp_path: Path) -> None:
    """Flags go before the file then, too; what only a start can change is named."""
    config = tmp_path / "shmq.toml"
    config.write_text('max_rdy_count = 20\nmem_queue_size = 600\nlog_level = "debug"\n')
    reload(server)
    for _ in range(8):
        assert server.http("GET", "/config/max_rdy_count").body == b"20"
        assert server.http("GET", "/config/log_level").body == b"1"
        assert server.http("GET", "/config/mem_queue_size").body == b"500"
    assert "not before the next start: mem_queue_size" in server.log
    assert server.connect().identify(feature_negotiation=True)["max_rdy_count"] == 20
    config.write_text("max_rdy_count = many\n")
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: "cannot reload: cannot read the configuration file" in server.log)
    assert server.http("GET", "/config/max_rdy_count").body == b"20"


def test_a_gateway_that_is_started_later_has_them_too(server: Server, tmp_path: Path) -> None:
    (tmp_path / "shmq.toml").write_text("max_rdy_count = 30\n")
    reload(server)
    pid = server.process.pid
    workers = [
        int(word)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for word in path.read_text().split()
    ]
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    eventually(lambda: server.log.count(": serving") == 2 + len(workers))
    for _ in range(4):
        assert server.http("GET", "/config/max_rdy_count").body == b"30"


@pytest.mark.parametrize("foreground", [True, False])
def test_a_terminal_that_goes_does_not_cost_a_message(tmp_path: Path, foreground: bool) -> None:
    """Started in the foreground it ends with a flush; with another stdin it stays."""
    instance = f"terminal-{os.getpid()}"
    log = tmp_path / "log"
    argv = [
        sys.executable,
        "-m",
        "shmq",
        "serve",
        f"--instance={instance}",
        f"--data-path={tmp_path}",
        "--tcp-address=",
        "--http-address=",
    ]
    main, terminal = pty.openpty()

    def be_a_shell() -> None:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    # a shell that waits for it, and dies of the hang-up as shells do
    script = 'exec 3>&1; "$@" 2>"$0" & echo $! >&3; wait'
    if foreground:
        script = script.replace(' 2>"$0" &', ' <&4 2>"$0" &').replace("3>&1;", "3>&1 4<&0;")
    shell = subprocess.Popen(
        ["sh", "-c", script, str(log), *argv],
        stdin=terminal,
        stdout=subprocess.PIPE,
        preexec_fn=be_a_shell,
        text=True,
    )
    os.close(terminal)
    try:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        eventually(lambda: processes.answers(instance, pid))
        with shmq.attach(instance) as broker:
            broker.producer("t").publish(b"kept")
        os.close(main)
        shell.wait(WATCHDOG)
        if not foreground:
            os.kill(pid, signal.SIGHUP)  # as a shell that sends it to all its jobs
            eventually(lambda: "no other option" in log.read_text())
            assert processes.answers(instance, pid)
            os.kill(pid, signal.SIGTERM)
        processes.wait_ended(pid)
        kept = b"".join(path.read_bytes() for path in tmp_path.glob("t.diskqueue.0*.dat"))
        assert kept.endswith(b"kept")
        assert "bye" in log.read_text()
        assert ("the terminal has gone" in log.read_text()) == foreground
    finally:
        shell.kill()
        shell.wait()
        assert shell.stdout is not None
        shell.stdout.close()
        processes.remove_instance(instance)


def test_a_limit_reaches_a_client_that_only_publishes(server: Server, tmp_path: Path) -> None:
    client, batch = server.connect(), mpub(b"t", [b"x" * 100] * 3)
    for _ in range(5):
        assert client.ask(batch) == OK
    (tmp_path / "shmq.toml").write_text("max_body_size = 200\n")
    reload(server)
    assert client.ask(batch) == (ERROR, b"E_BAD_BODY MPUB body too big 316 > 200")
