"""The configuration of a worker, and the signals that a run sends to its workers."""

from __future__ import annotations

from pathlib import Path

import msgspec

STREAM = "chaos"


class WorkerConfig(msgspec.Struct, frozen=True):
    """The configuration of one worker, passed on its command line as JSON."""

    name: str  # name of this process; unique in a run
    url: str
    directory: str  # directory of the run's histories and signals
    seed: str
    groups: tuple[str, ...] = ()  # a member worker has one member in each
    lease_ttl_s: float = 1.0
    batch_pause_s: float = 0.06  # average seconds between a publisher's batches
    hang: float = 0.003  # probability, per batch, that a member hangs before it confirms
    mutant: str = ""
    store: str = ""  # directory of the store, for archivers; empty if there is none
    die: float = 0.01  # probability that an archiver dies before an append, or before a commit
    remap: dict[int, int] = {}  # maps each cluster node's port to its proxy's port
    compact_pause_s: float = 1.0  # average seconds between merges; 0: no merges

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> WorkerConfig:
        return msgspec.json.decode(text, type=cls)


class RunSignals:
    """Signals to workers, stored as files so that paused and newly started workers see them too."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._calm = directory / "calm"
        self._end = directory / "end"

    def calm(self) -> bool:
        """Return whether publishers must stop, and other workers must no longer cause faults."""
        return self._calm.exists()

    def end(self) -> bool:
        """Return whether all workers must exit."""
        return self._end.exists()

    def stop(self, slot: str) -> bool:
        """Return whether an archiver must stop at its next commit, and clear the signal."""
        try:
            self._stop(slot).unlink()
        except FileNotFoundError:
            return False
        return True

    def make_calm(self) -> None:
        self._calm.touch()

    def make_end(self) -> None:
        self._end.touch()

    def make_stop(self, slot: str) -> None:
        self._stop(slot).touch()

    def _stop(self, slot: str) -> Path:
        return self._directory / f"stop-{slot}"
