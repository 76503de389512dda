"""An event loop for clients that have only an asyncio interface."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class EventLoop:
    """Runs coroutines from synchronous code. The loop runs only during ``run`` calls."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._runner.run(work)

    def close(self) -> None:
        self._runner.close()
