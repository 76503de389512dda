"""Runs an asyncio client from plain code, for clients that have no other interface."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class EventLoop:
    """One event loop that runs only during ``run`` calls."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._runner.run(work)

    def close(self) -> None:
        self._runner.close()
