"""What to say when a batch is not taken: the errors that answers of the scripts stand for."""

from __future__ import annotations

from meteor_py.errors import (
    LogTruncated,
    MeteorError,
    OutcomeUnknown,
    PublishError,
    StreamCorrupt,
    StreamFull,
    StreamNotFound,
)


def full(stream: str, archived: int) -> StreamFull:
    return StreamFull(
        f"Stream {stream!r} holds as many unarchived records as it may; only those below "
        f"{archived} are in the store. Is an archiver running?",
        stream=stream,
    )


def gone(stream: str, code: bytes, last: int = -1) -> MeteorError:
    """For the codes NOSTREAM and INCARNATION; ``last`` is the last offset known of the old one."""
    if code == b"NOSTREAM":
        return StreamNotFound(
            f"Stream {stream!r} does not exist any more; open it again to create it.",
            stream=stream,
        )
    return LogTruncated(
        f"Stream {stream!r} was deleted and created anew since it was opened; open it again.",
        stream=stream,
        first=0,
        last=last,
    )


def lost(stream: str, first: int, last: int) -> LogTruncated:
    return LogTruncated(
        f"The server has lost the acknowledged records {first} to {last} of stream {stream!r}: it "
        "failed over to a replica that lagged, or restarted without its last writes. Publish them "
        "again if you still have them.",
        stream=stream,
        first=first,
        last=last,
    )


def foreign(stream: str) -> StreamCorrupt:
    return StreamCorrupt(
        f"Nothing can be appended to stream {stream!r}: an entry that no publisher of ours wrote "
        "lies above its end. Delete the stream, and let only publishers write its log "
        "(docs/acl.md).",
        stream=stream,
    )


def unknown(stream: str, reason: MeteorError | None) -> OutcomeUnknown:
    because = f" The reason: {reason}" if reason else ""
    return OutcomeUnknown(
        f"The record was sent to stream {stream!r}, but whether it arrived could not be learnt; "
        f"publishing it again may double it.{because}",
        stream=stream,
    )


def bug(stream: str, error: BaseException) -> PublishError:
    failure = PublishError(
        f"The publisher of stream {stream!r} failed unexpectedly: {error!r}.", stream=stream
    )
    failure.__cause__ = error
    return failure
