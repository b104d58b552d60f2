"""Passwords, keys and certificates of `shmq forward`, from a file; and its metrics."""

from __future__ import annotations

import base64
import binascii
import json
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client.parser import text_string_to_metric_families
from support.external_programs import peer
from support.forwarding import publish, summary, taken
from support.processes import WATCHDOG, Child, eventually
from support.real_kafka import KafkaServer
from support.real_nats import NatsServer, free_port
from support.secrets import write_secret

import shmq
from shmq.errors import ShmqError
from shmq.forward.login import read_login

Forward = Callable[..., Child]
Keep = Callable[[Any], Any]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """Of 127.0.0.1, signed by itself, and its key."""
    return tls_files(tmp_path, "cert")


def tls_files(directory: Path, called: str) -> tuple[str, str]:
    cert, key = str(directory / f"{called}-cert.pem"), str(directory / f"{called}-key.pem")
    name = ("-subj", "/CN=nats", "-addext", "subjectAltName=IP:127.0.0.1")
    words = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    subprocess.run(
        [peer("openssl"), *words, "-keyout", key, "-out", cert, *name],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture
def filled(serve: Callable[..., Child], attach: Callable[[], shmq.Broker]) -> shmq.Broker:
    """A broker with one message."""
    serve()
    broker = attach()
    publish(broker, 1)
    return broker


def encoded(prefix: bytes, raw: bytes) -> str:
    """A key as NATS writes it."""
    data = prefix + raw
    data += binascii.crc_hqx(data, 0).to_bytes(2, "little")
    return base64.b32encode(data).rstrip(b"=").decode()


class Key:
    """A key of NATS. kind: O of an operator, A of an account, U of a user."""

    def __init__(self, kind: str) -> None:
        self._key = Ed25519PrivateKey.generate()
        first = {"O": 14, "A": 0, "U": 20}[kind] << 3
        self.public = encoded(bytes([first]), self._key.public_key().public_bytes_raw())
        seed = bytes([18 << 3 | first >> 5, (first & 31) << 3])
        self.seed = encoded(seed, self._key.private_bytes_raw())

    def jwt(self, subject: str, nats: dict[str, Any]) -> str:
        """A statement about a subject that this key signs."""
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        claims = {"jti": "x", "iat": 1, "iss": self.public, "name": "n", "sub": subject}
        parts = [
            base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")
            for part in (head, {**claims, "nats": {**nats, "version": 2}})
        ]
        signed = base64.urlsafe_b64encode(self._key.sign(b".".join(parts))).rstrip(b"=")
        return b".".join((*parts, signed)).decode()


def forwarded(forward: Forward, url: str, tmp_path: Path, login: str) -> None:
    """Forward the one message with this login."""
    write_secret(tmp_path / "login", login)
    child = forward(f"{url}/S", "--create", "--until-empty", f"--login={tmp_path / 'login'}")
    assert summary(child)["messages"] == 1


def test_tls_and_a_password(
    filled: shmq.Broker,
    forward: Forward,
    tmp_path: Path,
    certificate: tuple[str, str],
    keep: Keep,
) -> None:
    cert, key = certificate
    words = ("--user=me", "--pass=secret", f"--tlscert={cert}", f"--tlskey={key}", "--tls")
    server = keep(NatsServer(tmp_path / "nats", *words))
    unknown = forward(f"{server.url}/S", "--until-empty")
    assert unknown.wait() == 1
    assert "certificate verify failed" in unknown.errors
    url = server.url.replace("nats:", "tls:")
    forwarded(forward, url, tmp_path, f"# mine\nuser = me\npassword=secret\nca = {cert}\n")


def test_a_certificate_may_change_while_it_runs(
    filled: shmq.Broker, forward: Forward, tmp_path: Path, keep: Keep
) -> None:
    """The server is started again with a certificate of another authority. The file of the login
    names the new one by then; a server that it does not know gets nothing."""
    made = [tls_files(tmp_path, name) for name in ("first", "second")]
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))

    def use(files: tuple[str, str], known: tuple[str, str]) -> None:
        for source, target in ((files[0], cert), (files[1], key), (known[0], ca)):
            write_secret(target, Path(source).read_text())

    use(made[0], made[0])
    words = ("--user=me", "--pass=secret", f"--tlscert={cert}", f"--tlskey={key}", "--tls")
    server = keep(NatsServer(tmp_path / "nats", *words))
    write_secret(tmp_path / "login", f"user = me\npassword=secret\nca = {ca}\n")
    login = f"--login={tmp_path / 'login'}"
    url = server.url.replace("nats:", "tls:")
    running = forward(f"{url}/S", "--create", login)
    eventually(lambda: filled.stats().channel("t", "c").finished == 1)
    server.kill()
    use(made[1], made[1])
    server.start_again()
    publish(filled, 10, 1)
    eventually(lambda: filled.stats().channel("t", "c").finished == 11, what=running.errors)
    assert running.process.poll() is None
    server.kill()
    use(made[0], made[1])
    server.start_again()
    publish(filled, 10, 11)
    assert running.wait() == 1
    assert "certificate verify failed" in running.errors
    assert filled.stats().channel("t", "c").finished == 11
    use(made[0], made[0])
    summary(forward(f"{url}/S", "--until-empty", login))
    assert filled.stats().channel("t", "c").finished == 21


def test_a_server_without_tls_is_refused_if_it_was_asked_for(
    filled: shmq.Broker, forward: Forward, nats: NatsServer
) -> None:
    child = forward(f"{nats.url}/S?subject=s".replace("nats:", "tls:"), "--until-empty")
    assert child.wait() == 1
    assert "with TLS" in child.errors


def test_a_token(filled: shmq.Broker, forward: Forward, tmp_path: Path, keep: Keep) -> None:
    server = keep(NatsServer(tmp_path / "nats", "--auth=secret"))
    forwarded(forward, server.url, tmp_path, "token = secret\n")


def test_an_nkey(filled: shmq.Broker, forward: Forward, tmp_path: Path, keep: Keep) -> None:
    user = Key("U")
    (tmp_path / "conf").write_text(f"authorization {{ users [ {{ nkey: {user.public} }} ] }}")
    server = keep(NatsServer(tmp_path / "nats", "-c", str(tmp_path / "conf")))
    forwarded(forward, server.url, tmp_path, f"nkey = {user.seed}\n")


def test_a_credentials_file(
    filled: shmq.Broker, forward: Forward, tmp_path: Path, keep: Keep
) -> None:
    operator, account, system, user = Key("O"), Key("A"), Key("A"), Key("U")
    plain = {"conn": -1, "subs": -1, "data": -1, "payload": -1, "leaf": -1, "wildcards": True}
    stores = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    about = {
        key.public: operator.jwt(key.public, {"type": "account", "limits": limits})
        for key, limits in ((account, plain | stores), (system, plain))
    }
    conf = f"operator: {operator.jwt(operator.public, {'type': 'operator'})}\nresolver: MEMORY\n"
    conf += f"system_account: {system.public}\nresolver_preload {json.dumps(about)}\n"
    (tmp_path / "conf").write_text(conf)
    server = keep(NatsServer(tmp_path / "nats", "-c", str(tmp_path / "conf")))
    more = {"type": "user", "subs": -1, "data": -1, "payload": -1}
    jwt = account.jwt(user.public, more)
    forwarded(
        forward,
        server.url,
        tmp_path,
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n",
    )


def test_a_login_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "login"
    for text, words in (
        ("user\n", "line 1 is not NAME = VALUE"),
        ("-----BEGIN NATS USER JWT-----\nx\n------END NATS USER JWT------\n", "lacks"),
    ):
        write_secret(path, text)
        with pytest.raises(ShmqError, match=words):
            read_login(str(path))


def test_metrics_are_answered(filled: shmq.Broker, forward: Forward, nats: NatsServer) -> None:
    port = free_port()
    running = forward(f"{nats.url}/S?subject=s", f"--metrics-address=127.0.0.1:{port}")
    eventually(lambda: nats.last("S") == 2)
    url = f"http://127.0.0.1:{port}/metrics"

    def values() -> dict[str, float]:
        with urllib.request.urlopen(url, timeout=WATCHDOG) as answer:
            text = answer.read().decode()
        samples = [
            each for family in text_string_to_metric_families(text) for each in family.samples
        ]
        assert {each.labels["topic"] for each in samples} == {"t"}
        return {each.name: each.value for each in samples}

    eventually(lambda: values()["shmq_forward_messages_total"] == 1)
    assert values()["shmq_forward_connected"] == 1
    assert values()["shmq_forward_last_stored_timestamp_seconds"] > 1e9
    nats.kill()
    eventually(lambda: values()["shmq_forward_connected"] == 0)
    assert values()["shmq_forward_away_total"] >= 1
    running.close()


_SASL = """
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
listener.name.clients.plain.sasl.jaas.config=\\
    org.apache.kafka.common.security.plain.PlainLoginModule \\
    required username="me" password="secret" user_me="secret";
"""


_SASL_LOGIN = "sasl.mechanism = PLAIN\nsasl.username = me\n"

#: Of the broker, which connects to itself too: it proves who it is and asks everybody to do so.
_TLS = """
ssl.keystore.type=PEM
ssl.keystore.location={keystore}
ssl.truststore.type=PEM
ssl.truststore.location={certificate}
ssl.client.auth=required
"""


@pytest.mark.deep
def test_kafka_asks_for_a_password(
    filled: shmq.Broker, forward: Forward, tmp_path: Path, keep: Keep
) -> None:
    server = keep(KafkaServer(tmp_path / "kafka", "SASL_PLAINTEXT", _SASL))
    login = f"security.protocol = SASL_PLAINTEXT\n{_SASL_LOGIN}"
    write_secret(tmp_path / "wrong", login + "sasl.password = wrong\n")
    child = forward(f"{server.url}/S", "--until-empty", f"--login={tmp_path / 'wrong'}")
    assert child.wait() == 1
    assert "Kafka refused" in child.errors
    forwarded(forward, server.url, tmp_path, login + "sasl.password = secret\n")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("security", "missing"),
    [("SSL", ("ssl.certificate", "ssl.key")), ("SASL_SSL", ("ssl.ca",))],
)
def test_kafka_over_tls_with_certificates_on_both_sides(
    filled: shmq.Broker,
    forward: Forward,
    back: Callable[..., Child],
    tmp_path: Path,
    certificate: tuple[str, str],
    keep: Keep,
    security: str,
    missing: tuple[str, ...],
) -> None:
    """There and back. Without one of its certificates a forwarder ends and says so."""
    cert, key = certificate
    (keystore := tmp_path / "keystore.pem").write_text(
        Path(key).read_text() + Path(cert).read_text()
    )
    settings = _TLS.format(keystore=keystore, certificate=cert)
    login = f"security.protocol = {security}\n"
    if security == "SASL_SSL":
        settings += _SASL
        login += f"{_SASL_LOGIN}sasl.password = secret\n"
    server = keep(KafkaServer(tmp_path / "kafka", security, settings))
    login += f"ssl.key.location = {key}\nssl.certificate.location = {cert}\n"
    login += f"ssl.ca.location = {cert}\n"
    wrong = [line for line in login.splitlines() if not line.startswith(missing)]
    write_secret(tmp_path / "wrong", "\n".join(wrong))
    child = forward(f"{server.url}/S", "--until-empty", f"--login={tmp_path / 'wrong'}")
    assert child.wait(4 * WATCHDOG) == 1
    assert "Kafka refused" in child.errors
    assert "certificate" in child.errors
    forwarded(forward, server.url, tmp_path, login)
    assert filled.channel_depth("t", "c") == 0
    child = back(f"{server.url}/S", "--until-empty", f"--login={tmp_path / 'login'}")
    assert summary(child)["messages"] == 1
    assert taken(filled) == [b"000000"]
