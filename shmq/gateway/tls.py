"""The server's TLS settings from its options (nsqio/nsq nsqd/nsqd.go, buildTLSConfig)."""

from __future__ import annotations

import ssl
import warnings

from shmq import ownership
from shmq.option_types import OptionError
from shmq.options import Options

_VERSIONS = {
    "tls1.0": ssl.TLSVersion.TLSv1,
    "tls1.1": ssl.TLSVersion.TLSv1_1,
    "tls1.2": ssl.TLSVersion.TLSv1_2,
    "tls1.3": ssl.TLSVersion.TLSv1_3,
}

_OLD = ("tls1.0", "tls1.1")


def server_context(options: Options) -> ssl.SSLContext | None:
    """Return the TLS settings for clients' connections; None if there is no certificate.

    Raises OptionError, OSError; also if others than its owner may change or read the key."""
    if bool(options.tls_cert) != bool(options.tls_key):
        raise OptionError("both --tls-cert and --tls-key must be given")
    if not options.tls_cert:
        if is_required(options):
            raise OptionError("cannot require TLS client connections without TLS key and cert")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if options.tls_min_version in _OLD:
        # OpenSSL needs this level for these versions; it then also accepts old and SHA-1 signed
        # certificates, as nsqd does
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TLS 1.0 and 1.1 are deprecated
        context.minimum_version = _VERSIONS[options.tls_min_version]
    try:
        with ownership.secret_path(options.tls_key, "the file of --tls-key") as key:
            context.load_cert_chain(options.tls_cert, key)
    except OSError as exc:
        what = f"--tls-cert={options.tls_cert} --tls-key={options.tls_key}"
        raise OSError(exc.errno, f"cannot use {what}: {exc.strerror or exc}") from exc
    if options.tls_root_ca_file:
        context.load_verify_locations(options.tls_root_ca_file)
    elif options.tls_client_auth_policy == "require":
        # nsqd accepts any certificate; OpenSSL could, but Python's ssl always verifies them
        raise OptionError(
            "--tls-client-auth-policy=require: clients' certificates are always verified; say with "
            "which ones (--tls-root-ca-file), or require-verify for the system's"
        )
    elif options.tls_client_auth_policy == "require-verify":
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
    if options.tls_client_auth_policy in ("require", "require-verify"):
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def is_required(options: Options) -> bool:
    """Returns true if clients of the TCP protocol must use TLS; a policy for clients' certificates
    implies it."""
    return options.tls_required != "false" or options.tls_client_auth_policy != ""
