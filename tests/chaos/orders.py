"""What a worker is told when it is started, and the signs by which a run speaks to all of them."""

from __future__ import annotations

from pathlib import Path

import msgspec

STREAM = "chaos"


class Orders(msgspec.Struct, frozen=True):
    """The command line of a worker, as JSON."""

    name: str  # of this process; never used twice in a run
    url: str
    directory: str  # of the run: histories and signs
    seed: str
    groups: tuple[str, ...] = ()  # in each of them it is a member
    lease_ttl_s: float = 1.0
    batch_pause_s: float = 0.06  # of a publisher, on average
    hang: float = 0.003  # how often a member hangs before it confirms, of the batches handled
    mutant: str = ""
    store: str = ""  # the directory of the store, for archivers
    die: float = 0.01  # how often an archiver dies before it appends, or before it tells
    compact_pause_s: float = 1.0  # of one that merges files, on average; 0: never

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Orders:
        return msgspec.json.decode(text, type=cls)


class Signs:
    """Files whose existence is the message: they reach paused and newly started workers too."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._calm = directory / "calm"
        self._end = directory / "end"

    def calm(self) -> bool:
        """Publishers stop; members drain, and do nothing rash any more."""
        return self._calm.exists()

    def end(self) -> bool:
        """Members close and end."""
        return self._end.exists()

    def stop(self, slot: str) -> bool:
        """Whether an archiver is to stop at its next commit; asked for once, and told once."""
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
