"""The in-flight window: the batches between the accumulator and their outcome.

The window is a queue, oldest batch first, in three parts: batches that the server has acknowledged,
batches that were sent on this connection and await their replies, and batches to be sent.

    acknowledged | sent, no reply yet | unsent

Replies come in the order of sending. The first two parts are counted from the left, so ``rewind``,
which sends all of them again, only resets two numbers. The window also numbers the batches, because
(epoch, sequence) must agree with their order here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from meteor_py.publish.batch import Batch

#: Batches on their way at a time. The server remembers the last eight of a producer.
WINDOW_BATCHES = 5


class InFlightWindow:
    """Batches on their way, oldest first. Only the sender's thread changes it."""

    def __init__(self) -> None:
        #: The producer epoch, under which ``sequence`` counts from 0.
        self.epoch = 0
        self._next_sequence = 0
        self._batches: deque[Batch] = deque()
        self._sent = 0  # on this connection, the acknowledged ones included
        self._acknowledged = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    # -- batches come and go -------------------------------------------------------------------

    def has_room(self) -> bool:
        return len(self._batches) < WINDOW_BATCHES

    @property
    def oldest(self) -> Batch:
        return self._batches[0]

    def add(self, batches: Iterable[Batch]) -> None:
        self._batches.extend(batches)

    def number_newest(self) -> None:
        """Give the newest batch the next sequence."""
        self._batches[-1].sequence = self._next_sequence
        self._next_sequence += 1

    def pop_newest(self) -> Batch:
        """Remove the newest batch, which has no number."""
        return self._batches.pop()

    def pop_oldest(self) -> Batch:
        batch = self._batches.popleft()
        self._sent = max(self._sent - 1, 0)
        self._acknowledged = max(self._acknowledged - 1, 0)
        return batch

    # -- progress on this connection -----------------------------------------------------------

    @property
    def sent(self) -> int:
        """Batches that were sent on this connection, the acknowledged ones included."""
        return self._sent

    @property
    def acknowledged(self) -> int:
        return self._acknowledged

    def unsent(self) -> list[Batch]:
        return list(islice(self._batches, self._sent, None))

    def mark_sent(self) -> None:
        self._sent += 1

    @property
    def next_to_reply(self) -> Batch:
        """The batch that the next reply is about."""
        return self._batches[self._acknowledged]

    def behind_next_to_reply(self) -> list[Batch]:
        """The batches that were sent after it."""
        return list(islice(self._batches, self._acknowledged + 1, self._sent))

    def mark_acknowledged(self, base_offset: int) -> None:
        """The reply said that the batch is in the log, from this offset on."""
        batch = self._batches[self._acknowledged]
        batch.base_offset = base_offset
        batch.in_doubt = False
        self._acknowledged += 1

    def rewind(self) -> None:
        """Send the whole window again."""
        self._sent = self._acknowledged = 0

    def rewind_to_acknowledged(self) -> None:
        """Send again what has no acknowledgement; none of it is in the log."""
        self._sent = self._acknowledged

    def renumber(self) -> None:
        """Begin the next producer epoch with the batches that are left."""
        self.epoch += 1
        for number, batch in enumerate(self._batches):
            batch.sequence = number
        self._next_sequence = len(self._batches)
        self.rewind()

    # -- doubts --------------------------------------------------------------------------------

    def doubt_sent(self) -> None:
        """The replies are lost: any batch that was sent may be in the log."""
        for batch in islice(self._batches, self._sent):
            batch.in_doubt = True

    def doubt_acknowledged(self) -> None:
        """Another server has to acknowledge again what the last one did."""
        for batch in self._batches:
            if batch.acknowledged:
                batch.base_offset = -1
                batch.in_doubt = True

    def clear_doubts(self) -> None:
        for batch in self._batches:
            batch.in_doubt = False
