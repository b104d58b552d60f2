"""The tokens of the HTTP interface: where the options have them, and what they may be."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Final

from shmq import ownership
from shmq.option_types import OptionError
from shmq.options import Options

#: Environment variable with the tokens, if no file has them.
TOKEN_VARIABLE: Final = "SHMQ_HTTP_TOKEN"
_SHORTEST_TOKEN: Final = 16

_log = logging.getLogger(__name__)


def tokens_of(options: Options, environ: Mapping[str, str] = os.environ) -> tuple[bytes, ...]:
    """Read the accepted tokens: one per line of the token file, or else the environment's.

    Raises OptionError if they are unusable, OSError if the file cannot be read, or others than its
    owner may change it or read it (`ownership.read_secret`)."""
    path = options.http_token_file
    if path:
        where, text = f"--http-token-file={path}", _text_of(path)
    elif TOKEN_VARIABLE in environ:
        where, text = TOKEN_VARIABLE, environ[TOKEN_VARIABLE]
    else:
        return ()
    tokens = [line.strip() for line in text.splitlines() if line.strip()]
    if not tokens:  # an operator who configures an empty file does not mean to admit everybody
        raise OptionError(f"{where}: there is no token in it")
    for token in tokens:
        if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
            raise OptionError(
                f"{where}: a token must be at least {_SHORTEST_TOKEN} printable ASCII characters; "
                "`openssl rand -hex 32` makes one"
            )
        if " " in token:
            raise OptionError(f"{where}: a token must not hold a space")
    return tuple(token.encode() for token in tokens)


class Tokens:
    """The accepted tokens of one gateway process."""

    def __init__(self, options: Options) -> None:
        """Raises as `tokens_of`."""
        self.accepted = tokens_of(options)

    def changed(self, options: Options) -> None:
        """Read them again. If the token file cannot be read, the old tokens stay valid, so a
        mistake does not open the interface."""
        try:
            self.accepted = tokens_of(options)
        except (OptionError, OSError) as exc:
            _log.error("the tokens stay as they were: %s", exc)


def _text_of(path: str) -> str:
    try:
        return ownership.read_secret(path, "the file of --http-token-file").decode()
    except UnicodeDecodeError:
        raise OptionError(f"--http-token-file={path}: it is not text") from None
