"""What a gateway process runs beside the TCP protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmq.gateway.worker import Worker


async def start_services(worker: Worker) -> list[Callable[[], Awaitable[None]]]:
    """Start them; how to end each."""
    return []
