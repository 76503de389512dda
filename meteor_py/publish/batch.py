"""A batch: records that are sent as one frame and share one outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meteor_py.records.frame import Columns
from meteor_py.runtime.completion import Completion


class Batch(Completion):
    """Records to be appended to the log. ``base_offset`` is the offset of the first one.

    Args:
        created_at: When the first record was published, in seconds of the monotonic clock.
        deadline: When the batch fails unless it is settled, in seconds of the same clock.
    """

    __slots__ = (
        "columns", "count", "created_at", "deadline", "encoded", "in_doubt", "index", "nbytes",
        "sequence",
    )  # fmt: skip

    def __init__(self, created_at: float, deadline: float) -> None:
        super().__init__()
        self.columns: Columns | None = Columns([])
        #: (name of the frame format, payload), set when the batch enters the in-flight window.
        self.encoded: tuple[str, Any] | None = None
        #: The entry for the ordering index, if the stream has one.
        self.index: Sequence[bytes] = ()
        self.count = 0
        self.nbytes = 0
        self.created_at = created_at
        self.deadline = deadline
        self.sequence = -1
        #: Whether the batch was sent and its reply lost, so that it may be in the log.
        self.in_doubt = False

    @property
    def acknowledged(self) -> bool:
        """Whether the server has replied that the batch is in the log."""
        return self.base_offset >= 0

    def settle(self, error: Exception | None = None) -> None:
        """Set the outcome, and free the memory of the records."""
        self.columns = None
        self.encoded = None
        self.index = ()
        super().settle(error)
