"""The place of a worker in a run: its proxy stays, its processes come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tests.chaos.history import Writer
from tests.chaos.orders import Orders
from tests.chaos.process import DIED, Process
from tests.support.proxy import Proxy

Role = Literal["publisher", "member", "archiver", "reader"]


class Slot:
    """One worker at a time; the next gets another name and goes on through the same proxy."""

    def __init__(self, role: Role, orders: Orders, proxy: Proxy, writer: Writer) -> None:
        self.name = orders.name
        self.proxy = proxy
        self._role = role
        self._orders = orders
        self._writer = writer
        self._process: Process | None = None
        self._lives = 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def replace(self) -> None:
        """Start a worker, in place of one that has ended."""
        self.kill()
        self._lives += 1
        name = f"{self.name}.{self._lives}"
        orders = msgspec.structs.replace(
            self._orders, name=name, seed=f"{self._orders.seed} {self._lives}"
        )
        log = Path(orders.directory) / f"{name}.log"
        self._process = Process([self._role, orders.encode()], log)

    @property
    def last_words(self) -> str:
        return "" if self._process is None else self._process.last_words()

    def look_after(self) -> bool:
        """Whether its worker has ended by itself and is to be replaced."""
        if self._process is None or self._process.running:
            return False
        if self._process.exit_code not in (0, DIED):
            self._complain(f"It ended with {self._process.exit_code}:")
        return True

    def pause(self) -> None:
        if self._process is not None:
            self._process.pause()

    def resume(self) -> None:
        if self._process is not None:
            self._process.resume()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def finish(self, timeout_s: float) -> None:
        """Wait for the worker to end by itself; complain if it does not."""
        if self._process is not None and not self._process.wait(timeout_s):
            self._complain(f"It did not end within {timeout_s:g} s:")
        elif self._process is not None and self._process.exit_code not in (0, DIED):
            self._complain(f"It ended with {self._process.exit_code}:")
        self.kill()

    def _complain(self, text: str) -> None:
        assert self._process is not None
        self._writer.add("error", who=self.name, text=f"{text} {self._process.last_words()}")
