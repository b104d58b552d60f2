"""Spark gives a Python process ten or fifteen seconds to start, which a busy machine may need."""

from __future__ import annotations

NOT_STARTED = ("failed to connect back", "CANNOT_OPEN_SOCKET")


def was_too_slow(error: object) -> bool:
    """Whether a query ended with this error because its Python process did not start in time."""
    return any(words in str(error) for words in NOT_STARTED)
