"""A worker slot in a run: its proxies, and one worker process after another."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tests.chaos.backend import Proxies
from tests.chaos.history import Writer
from tests.chaos.process import DIED, Process
from tests.chaos.worker_config import WorkerConfig

Role = Literal["publisher", "member", "archiver", "reader"]


class Slot:
    """Runs one worker at a time. Each successor gets a new name and the same proxies."""

    def __init__(self, role: Role, config: WorkerConfig, proxies: Proxies, writer: Writer) -> None:
        self.name = config.name
        self.proxies = proxies
        self._role = role
        self._config = config
        self._writer = writer
        self._process: Process | None = None
        self._incarnation = 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def replace(self) -> None:
        """Start a worker, killing the previous one."""
        self.kill()
        self._incarnation += 1
        name = f"{self.name}.{self._incarnation}"
        config = msgspec.structs.replace(
            self._config, name=name, seed=f"{self._config.seed} {self._incarnation}"
        )
        log = Path(config.directory) / f"{name}.log"
        self._process = Process([self._role, config.encode()], log)

    @property
    def log_tail(self) -> str:
        return "" if self._process is None else self._process.log_tail()

    def needs_replacement(self) -> bool:
        """Return whether the worker has ended by itself; record an error if it failed."""
        if self._process is None or self._process.running:
            return False
        if self._process.exit_code not in (0, DIED):
            self._record_error(f"The worker exited with {self._process.exit_code}:")
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
        """Wait for the worker to end by itself; record an error if it does not."""
        if self._process is not None and not self._process.wait(timeout_s):
            self._record_error(f"The worker did not end within {timeout_s:g} s:")
        elif self._process is not None and self._process.exit_code not in (0, DIED):
            self._record_error(f"The worker exited with {self._process.exit_code}:")
        self.kill()

    def _record_error(self, text: str) -> None:
        assert self._process is not None
        self._writer.add("error", who=self.name, text=f"{text} {self._process.log_tail()}")
