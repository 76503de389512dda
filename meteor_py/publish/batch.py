"""A batch: records that are sent as one frame and share one outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from meteor_py.records.frame import Columns
from meteor_py.runtime.completion import Completion, forbid_waiting

if TYPE_CHECKING:
    from meteor_py.publish.direct_line import DirectLine


class Batch(Completion):
    """Records to be appended to the log. ``base_offset`` is the offset of the first one.

    Args:
        created_at: When the first record was published, on the monotonic clock.
        deadline: When the batch fails if it is not settled, on the same clock.
        columns: The records, until the batch is settled.
    """

    __slots__ = (
        "columns", "count", "created_at", "deadline", "encoded", "in_doubt", "index", "line",
        "nbytes", "sequence", "stream_epoch",
    )  # fmt: skip

    def __init__(self, created_at: float, deadline: float, columns: Columns | None = None) -> None:
        super().__init__()
        self.columns = columns
        #: (name of the frame format, payload), set before the batch is sent.
        self.encoded: tuple[str, Any] | None = None
        #: The entries for the ordering index, two strings each; empty if the stream has no index.
        self.index: Sequence[bytes] = ()
        self.count = 0
        self.nbytes = 0
        self.created_at = created_at
        self.deadline = deadline
        self.sequence = -1
        #: Whether the batch was sent and its reply was lost, so that it may be in the log.
        self.in_doubt = False
        #: The stream epoch named in the last attempt. A reply that is a bare offset refers to it.
        self.stream_epoch = 0
        #: The publisher's direct line; None after the batch is settled.
        self.line: DirectLine | None = None

    @property
    def acknowledged(self) -> bool:
        """Whether the server has replied that the batch is in the log."""
        return self.base_offset >= 0

    def settle_quietly(self, error: Exception | None = None) -> None:
        self.columns = None  # free the records' memory
        self.encoded = None
        self.index = ()
        self.line = None
        super().settle_quietly(error)

    def poll(self) -> bool:
        line = self.line  # read it once: a thread that settles the batch clears it
        if line is not None:
            line.look_for_reply(self)
        return self.settled

    def wait(self, timeout: float | None) -> bool:
        line = self.line
        if line is not None:
            forbid_waiting()
            timeout = line.read_reply(self, timeout)
        return self.settled or super().wait(timeout)

    def on_settled(self, callback: Callable[[], None]) -> None:
        line = self.line
        super().on_settled(callback)
        if line is not None:
            line.leave_to_sender(self)
