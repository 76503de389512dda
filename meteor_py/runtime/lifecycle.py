"""What everything that is used in a ``with`` block has in common."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closeable:
    """Closed at the end of a ``with`` block; an error of the block comes before one of closing."""

    def close(self) -> None:
        raise NotImplementedError  # pragma: no cover

    def _end_block(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end_block()
        except Exception as failure:
            if error is None:
                raise
            if failure is not error:
                error.add_note(f"While closing the {type(self).__name__.lower()}: {failure}")
