"""Files that let somebody in (tokens, logins, keys) and the audit log: nobody but this user and
root may own them, and others may neither change nor read them.

Files of other users need root.
"""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import other_users
from support.certificates import of_this_host
from support.other_users import GROUP, SERVICE, STRANGER, run
from support.processes import Child, eventually
from support.secrets import write_secret

from shmq import ownership
from shmq.audit_file import AuditFile
from shmq.errors import ShmqError
from shmq.forward.login import NatsLogin, read_login
from shmq.gateway.tls import server_context
from shmq.gateway.tokens import Tokens, tokens_of
from shmq.options import Options

TOKEN = "0123456789abcdef" * 2


def token_file(path: str) -> None:
    tokens_of(Options(http_token_file=path))


def login_file(path: str) -> None:
    read_login(path)


def key_of_kafka(path: str) -> None:
    login = write_secret(Path(f"{path}.login"), f"ssl.key.location = {path}\n")
    read_login(str(login))


#: Functions that read a secret from a path.
READERS = [token_file, login_file, key_of_kafka]
#: Mode, and what the error says. No error: such a file is taken.
MODES = [
    (0o600, ""),
    (0o400, ""),
    (0o640, ""),  # of a group that the administrator has chosen
    (0o440, ""),  # Kubernetes, with fsGroup and defaultMode 0440
    (0o644, "every user of this host may read .*: chmod o-rwx "),
    (0o444, "every user of this host may read .*: chmod o-rwx "),
    (0o660, r"members of group .* may change .*: chmod g-w "),
    (0o620, r"members of group .* may change .*: chmod g-w "),
    (0o666, "every user of this host may change .*: chmod 600 "),
    (0o602, "every user of this host may change .*: chmod 600 "),
]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that serves as each kind of secret."""
    return write_secret(tmp_path / "se cret", f"password={TOKEN}\n")


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("mode", "said"), MODES)
def test_a_secret_that_others_may_change_or_read_is_refused(
    read: Callable[[str], None], secret: Path, mode: int, said: str
) -> None:
    secret.chmod(mode)
    if not said:
        read(str(secret))
        return
    with pytest.raises((OSError, ShmqError), match=f"{said}'{secret}'"):
        read(str(secret))


@other_users.needed
@pytest.mark.parametrize("read", READERS)
def test_a_secret_of_another_user_is_refused(read: Callable[[str], None], secret: Path) -> None:
    os.chown(secret, STRANGER, STRANGER)
    with pytest.raises(
        (OSError, ShmqError), match=f"belongs to uid {STRANGER}.*chown {os.geteuid()}"
    ):
        read(str(secret))


@pytest.mark.parametrize("read", READERS)
def test_a_secret_may_be_a_link_as_in_kubernetes(
    read: Callable[[str], None], secret: Path, tmp_path: Path
) -> None:
    (tmp_path / "..data").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(f"..data/{secret.name}")
    read(str(tmp_path / "link"))
    secret.chmod(0o644)
    with pytest.raises((OSError, ShmqError), match="may read"):
        read(str(tmp_path / "link"))


@other_users.needed
@pytest.mark.parametrize("read", READERS)
def test_a_link_that_another_user_made_is_refused(
    read: Callable[[str], None], secret: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(secret)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises((OSError, ShmqError), match=f"a link that uid {STRANGER} made"):
        read(str(link))


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_file_is_refused_without_waiting(
    read: Callable[[str], None], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "directory").mkdir(0o700)
    for name in ("fifo", "directory"):
        with pytest.raises((OSError, ShmqError), match="no regular file"):
            read(str(tmp_path / name))


def test_a_secret_of_any_size_is_read_up_to_a_bound(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "sparse", "")
    os.truncate(path, 100 << 30)
    with pytest.raises(OSError, match="is longer than"):
        token_file(str(path))


@other_users.needed
def test_root_owned_secrets_serve_a_service_of_their_group(
    path_of_a_user: Callable[[int], Path],
) -> None:
    """As systemd's credentials and Kubernetes' secrets are."""
    secret = write_secret(path_of_a_user(SERVICE) / "token", TOKEN)
    os.chown(secret, 0, GROUP)
    secret.chmod(0o440)
    code = (
        f"{other_users.become(SERVICE, GROUP)}"
        "from shmq import ownership\n"
        "print(ownership.read_secret(sys.argv[1], 'it').decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(secret)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == TOKEN


def test_the_key_of_tls_is_checked(tmp_path: Path) -> None:
    cert, key = of_this_host(tmp_path)
    options = Options(tls_cert=cert, tls_key=key)
    assert server_context(options) is not None
    NatsLogin({"cert": cert, "key": key}).context()
    os.chmod(key, 0o644)
    with pytest.raises(OSError, match="may read the file of --tls-key: chmod o-rwx"):
        server_context(options)
    with pytest.raises(ShmqError, match="may read the key of the login: chmod o-rwx"):
        NatsLogin({"cert": cert, "key": key}).context()


def test_certificates_of_authorities_may_be_read_but_not_changed_by_others(
    tmp_path: Path, serve: Callable[..., Child], instance: str, data_path: Path
) -> None:
    cert, key = of_this_host(tmp_path)
    os.chmod(cert, 0o644)
    words = {"tls_cert": cert, "tls_key": key, "tls_root_ca_file": cert}
    serve(tcp_address=str(tmp_path / "sock"), **words).close()
    login = NatsLogin({"ca": cert})
    login.context()
    os.chmod(cert, 0o666)
    with pytest.raises(ShmqError, match=f"may change the file of ca: chmod o-w {cert}"):
        login.context()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in words.items()]
    done = run("serve", f"--instance={instance}", f"--data-path={data_path}", *flags)
    assert done.returncode == 1
    assert f"may change the file of --tls-root-ca-file: chmod o-w {cert}" in done.stderr


@pytest.mark.parametrize(
    "name", ["ca", "cert", "ssl.ca.location", "ssl.certificate.location", "ssl.crl.location"]
)
def test_what_a_login_trusts_is_checked_when_it_is_read(tmp_path: Path, name: str) -> None:
    """Libraries open these files by themselves, and would say less."""
    trusted, login = tmp_path / "trusted", tmp_path / "login"
    write_secret(login, f"{name} = {trusted}\n")
    with pytest.raises(ShmqError, match=f"read {name} of the login .*: No such file"):
        read_login(str(login))
    trusted.write_text("x")
    trusted.chmod(0o644)
    assert read_login(str(login)) == {name: str(trusted)}
    trusted.chmod(0o664)
    with pytest.raises(ShmqError, match=f"may change {name}: chmod g-w {trusted}"):
        read_login(str(login))


def test_a_directory_of_authorities_is_checked_with_its_files(tmp_path: Path) -> None:
    authorities, login = tmp_path / "authorities", tmp_path / "login"
    authorities.mkdir(mode=0o755)
    file = authorities / "1.pem"
    file.write_text("x")
    file.chmod(0o644)
    write_secret(login, f"ssl.ca.location = {authorities}\n")
    read_login(str(login))
    file.chmod(0o666)
    with pytest.raises(ShmqError, match=f"chmod o-w {file}"):
        read_login(str(login))
    file.chmod(0o644)
    authorities.chmod(0o777)
    with pytest.raises(ShmqError, match=f"chmod o-w {authorities}"):
        read_login(str(login))
    write_secret(login, "ssl.ca.location = probe\n")
    read_login(str(login))


def test_the_key_that_was_checked_is_the_one_that_is_used(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "key", "checked")
    with ownership.secret_path(path, "it") as checked:
        path.rename(tmp_path / "away")
        path.write_text("planted")
        assert Path(checked).read_text() == "checked"


def test_tokens_stay_as_they_were_if_their_file_becomes_unsafe(
    secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = Options(http_token_file=str(secret))
    tokens = Tokens(options)
    before = tokens.accepted
    secret.write_text(TOKEN[::-1])
    secret.chmod(0o666)
    tokens.changed(options)
    assert tokens.accepted == before
    assert "the tokens stay as they were" in caplog.text
    assert f"chmod 600 '{secret}'" in caplog.text


def test_a_start_and_a_reload_refuse_an_unsafe_token_file(
    serve: Callable[..., Child], instance: str, data_path: Path, tmp_path: Path
) -> None:
    tokens = write_secret(tmp_path / "tokens", TOKEN)
    tokens.chmod(0o666)
    words = ("serve", f"--instance={instance}", f"--data-path={data_path}", "--tcp-address=")
    http = f"--http-address={tmp_path / 'http.sock'}"
    done = run(*words, http, f"--http-token-file={tokens}")
    assert done.returncode == 1
    assert f"chmod 600 {tokens}" in done.stderr
    assert "Traceback" not in done.stderr
    tokens.chmod(0o600)
    server = serve(http_address=str(tmp_path / "http.sock"), http_token_file=str(tokens))
    tokens.chmod(0o666)
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: "cannot reload" in server.errors)
    assert f"chmod 600 {tokens}" in server.errors
    assert server.process.poll() is None


# ---- the audit log ----


@pytest.mark.parametrize(
    ("mode", "said"), [(0o600, ""), (0o640, ""), (0o644, ""), (0o666, "chmod o-w"), (0o660, "g-w")]
)
def test_an_audit_log_that_others_may_write_is_refused(
    tmp_path: Path, mode: int, said: str
) -> None:
    path = tmp_path / "audit"
    path.touch()
    path.chmod(mode)
    if not said:
        AuditFile(str(path)).close()
        return
    with pytest.raises(PermissionError, match=f"the audit log.*{said}"):
        AuditFile(str(path))


@other_users.needed
def test_an_audit_log_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    path.touch(0o600)
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=f"belongs to uid {STRANGER}"):
        AuditFile(str(path))


def test_an_audit_log_with_a_second_name_or_a_link_is_refused(tmp_path: Path) -> None:
    (target := tmp_path / "precious").write_text("kept\n")
    os.link(target, tmp_path / "hard")
    (tmp_path / "soft").symlink_to(target)
    for name in ("hard", "soft"):
        with pytest.raises(OSError, match=r"second name|no regular file"):
            AuditFile(str(tmp_path / name))
    assert target.read_text() == "kept\n"


def test_an_audit_log_is_made_private_and_what_comes_in_its_place_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit"
    file = AuditFile(str(path))
    record = logging.LogRecord("shmq.audit", logging.INFO, "", 0, "who did it", None, None)
    file.emit(record)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.rename(tmp_path / "audit.1")
    path.touch()
    path.chmod(0o666)
    file.emit(record)
    assert path.read_text() == ""
    assert "who did it" in caplog.text
    path.unlink()
    file.emit(record)
    file.close()
    assert path.read_text() == "who did it\n"
