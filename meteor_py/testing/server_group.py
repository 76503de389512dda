"""Servers that a test starts and stops together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from meteor_py.errors import ServerStartFailed
from meteor_py.testing.server import Server
from meteor_py.testing.waiting import eventually

#: Number of attempts to start the servers. An attempt fails if another process has taken a port.
START_TRIES = 3

#: Time limit in seconds for all servers to become stable after they have started, and the default
#: time limit for changes.
STABLE_S = 40.0


class ServerGroup(ABC):
    """Base class for servers that belong together, such as the nodes of a cluster."""

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Start all servers, and wait until they know each other and accept writes.

        Raises:
            RuntimeError: The servers have already been started.
            ServerStartFailed: A server did not start. The message ends with the server's log.
            AssertionError: The servers started, but did not become stable in time.
        """
        if self._all_servers():
            raise RuntimeError(f"{self} has already been started. Create another.")
        for tries_left in reversed(range(START_TRIES)):
            try:
                self._start_servers()
                break
            except ServerStartFailed:
                if not tries_left:
                    raise
                self.close()
                self._forget_servers()
        self.wait_until_stable()
        return self

    def close(self) -> None:
        """Kill all servers and remove their directories. Idempotent."""
        for server in self._all_servers():
            server.close()

    @property
    def stable(self) -> bool:
        """Whether all servers run and agree on their roles, and replicas reach their primaries."""
        return not self._obstacle()

    def wait_until_stable(self, timeout_s: float = STABLE_S) -> None:
        """Wait until ``stable`` is true.

        Raises:
            AssertionError: The timeout expired. The message gives the reason.
        """
        try:
            eventually(lambda: self.stable, timeout_s)
        except AssertionError:
            raise AssertionError(
                f"{self} is not stable after {timeout_s:g} s: {self._obstacle()}."
            ) from None

    # -- for subclasses ------------------------------------------------------------------------

    @abstractmethod
    def _all_servers(self) -> Sequence[Server]: ...

    @abstractmethod
    def _start_servers(self) -> None:
        """Create and start all servers."""

    @abstractmethod
    def _forget_servers(self) -> None:
        """Forget the servers after a failed start."""

    @abstractmethod
    def _obstacle(self) -> str:
        """Return the reason why the servers are not stable, or an empty string if they are."""
