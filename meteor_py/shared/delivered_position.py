"""The position up to which records were delivered, to detect a failover that lost some of them.

A failover to a lagging replica loses the newest records together with the newest changes to the
group's state. The server then no longer knows that it granted these records, and only the consumers
that received them can tell that they existed. Each consumer therefore remembers the end of the
records that it has delivered, and the epoch in which these records exist.
"""

from __future__ import annotations

from meteor_py.records.position import Position, diverged_at, newest_epoch, path_of


class DeliveredPosition:
    """The position after the highest offset that a consumer has delivered to the application.

    ``Deliveries`` guards it with its lock.
    """

    def __init__(self, incarnation: str, epochs: str) -> None:
        """Start with no records delivered.

        Args:
            incarnation: The stream's incarnation.
            epochs: The stream's epoch table at the time the consumer opened it.
        """
        self._position = Position(incarnation, newest_epoch(epochs), 0, path_of(epochs))

    def advance(self, offset: int) -> None:
        """Note that the record at ``offset``, which exists in this epoch, is being delivered."""
        if offset >= self._position.offset:
            self._position = self._position._replace(offset=offset + 1)

    def is_valid(self, epoch: int, end: int) -> bool:
        """Whether the server certainly still has all delivered records.

        If false, the server may have lost some of them; call ``loss`` to find out.
        """
        return epoch == self._position.epoch and end >= self._position.offset

    def loss(self, epochs: str, end: int) -> tuple[int, int] | None:
        """Compare with the server's stream.

        Args:
            epochs: The stream's epoch table on the server.
            end: The end of the stream on the server.

        Returns:
            The first offset that the server has lost, and the highest offset that this consumer has
            delivered. None if the server still has all delivered records.
        """
        first = diverged_at(self._position, epochs, end)
        return None if first is None else (first, self._position.offset - 1)

    def enter(self, epochs: str, end: int) -> None:
        """Move to the server's epoch. After a loss, continue at the first lost offset.

        The loss can then no longer be found, so note it before; see ``loss`` for the arguments.
        """
        before, lost = self._position, self.loss(epochs, end)
        kept = before.offset if lost is None else lost[0]
        self._position = Position(before.incarnation, newest_epoch(epochs), kept, path_of(epochs))
