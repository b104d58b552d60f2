"""Files that hold secrets, as shmq takes them: nobody but their owner may read them."""

from __future__ import annotations

from pathlib import Path


def write_secret(path: Path, text: str) -> Path:
    """Write a file of mode 0600. Returns its path."""
    path.touch(0o600)
    path.chmod(0o600)
    path.write_text(text)
    return path
