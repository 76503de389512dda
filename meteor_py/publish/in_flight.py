"""The in-flight window: batches that the sender has taken but not settled.

The window is a queue, oldest batch first, in three parts: batches that the server has acknowledged,
batches that were sent on this connection and await their replies, and batches to be sent.

    acknowledged | sent, no reply yet | unsent

Replies arrive in the order in which batches were sent. The first two parts are counted from the
left, so ``rewind``, which marks the whole window as unsent, only resets two numbers. The window
also numbers the batches, because (epoch, sequence) must agree with their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from meteor_py.publish.batch import Batch

#: Maximum number of batches in flight. It must not exceed eight: the server remembers each
#: producer's last eight batches, and recognises only these if they are sent again.
WINDOW_BATCHES = 5


class InFlightWindow:
    """Unsettled batches, oldest first. Only the sender's thread changes the window."""

    def __init__(self) -> None:
        #: The producer epoch. Sequence numbers start at 0 in each epoch.
        self.epoch = 0
        #: Number of batches in the window that were sent on this connection, acknowledged or not.
        self.sent = 0
        self.acknowledged = 0
        #: The sequence number of the next batch.
        self.next_sequence = 0
        self._batches: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def has_room(self) -> bool:
        return len(self._batches) < WINDOW_BATCHES

    @property
    def oldest(self) -> Batch:
        return self._batches[0]

    def add(self, batches: Iterable[Batch]) -> None:
        self._batches.extend(batches)

    def number_newest(self) -> None:
        """Give the newest batch the next sequence number."""
        self._batches[-1].sequence = self.next_sequence
        self.next_sequence += 1

    def add_sent(self, batch: Batch) -> None:
        """Add a batch that a publishing thread has numbered and sent. The window must be empty."""
        self._batches.append(batch)
        self.sent = 1

    def pop_newest(self) -> Batch:
        """Remove the newest batch, which has no sequence number yet."""
        return self._batches.pop()

    def pop_oldest(self) -> Batch:
        batch = self._batches.popleft()
        self.sent = max(self.sent - 1, 0)
        self.acknowledged = max(self.acknowledged - 1, 0)
        return batch

    def unsent(self) -> list[Batch]:
        return list(islice(self._batches, self.sent, None))

    @property
    def next_to_reply(self) -> Batch:
        """The batch to which the next reply belongs."""
        return self._batches[self.acknowledged]

    def behind_next_to_reply(self) -> list[Batch]:
        """Return the batches sent after ``next_to_reply``."""
        return list(islice(self._batches, self.acknowledged + 1, self.sent))

    def mark_acknowledged(self, base_offset: int) -> None:
        """Record that the server appended ``next_to_reply`` at ``base_offset``."""
        batch = self.next_to_reply
        batch.base_offset = base_offset
        batch.in_doubt = False
        self.acknowledged += 1

    def rewind(self) -> None:
        """Mark the whole window as unsent, so that the sender sends it again."""
        self.sent = self.acknowledged = 0

    def rewind_to_acknowledged(self) -> None:
        """Mark the unacknowledged batches as unsent."""
        self.sent = self.acknowledged

    def renumber(self) -> None:
        """Renumber the remaining batches in the next producer epoch, and mark them as unsent."""
        self.epoch += 1
        for number, batch in enumerate(self._batches):
            batch.sequence = number
        self.next_sequence = len(self._batches)
        self.rewind()

    def doubt_sent(self) -> None:
        """Mark every sent batch as in doubt: its reply was lost, so it may be in the log."""
        for batch in islice(self._batches, self.sent):
            batch.in_doubt = True

    def doubt_unacknowledged(self) -> None:
        """Mark the sent batches without a reply as in doubt: they may be in the log."""
        for batch in islice(self._batches, self.acknowledged, self.sent):
            batch.in_doubt = True

    def doubt_after_next_to_reply(self) -> None:
        """Mark the batches sent after ``next_to_reply`` as in doubt.

        They may still reach the server.
        """
        for batch in self.behind_next_to_reply():
            batch.in_doubt = True

    def doubt_acknowledged(self) -> None:
        """Mark acknowledged batches as in doubt: another server must acknowledge them again."""
        for batch in self._batches:
            if batch.acknowledged:
                batch.base_offset = -1
                batch.in_doubt = True

    def clear_doubts(self) -> None:
        for batch in self._batches:
            batch.in_doubt = False
