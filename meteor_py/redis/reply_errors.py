"""The errors that script replies stand for, and other errors that several packages raise."""

from __future__ import annotations

from collections.abc import Sequence

from meteor_py.errors import (
    ConnectionFailed,
    CorruptSegment,
    CorruptStream,
    Fenced,
    GroupActive,
    GroupConfigMismatch,
    GroupNotFound,
    LeaseLost,
    LogTruncated,
    MeteorError,
    OutcomeUnknown,
    PublishError,
    RecordsLost,
    StoreMismatch,
    StoreUnavailable,
    StreamFull,
    StreamNotFound,
)
from meteor_py.redis.address import mask


def stream_full(stream: str, archived: int) -> StreamFull:
    return StreamFull(
        f"Stream {stream!r} holds as many unarchived records as it may; only those below "
        f"{archived} are in the store.",
        stream=stream,
        hint="Is an archiver running?",
    )


def stream_gone(stream: str, code: bytes, last: int = -1) -> MeteorError:
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


def check_incarnation(stream: str, incarnation: str, found: bytes | None, last: int = -1) -> None:
    """Raise unless the incarnation that is in meta is the one that is meant.

    Raises:
        StreamNotFound, LogTruncated: As ``stream_gone``.
    """
    if found is None:
        raise stream_gone(stream, b"NOSTREAM")
    if found.decode() != incarnation:
        raise stream_gone(stream, b"INCARNATION", last)


def acknowledged_records_lost(stream: str, first: int, last: int) -> LogTruncated:
    return LogTruncated(
        f"The server has lost the acknowledged records {first} to {last} of stream {stream!r}: it "
        "failed over to a replica that lagged, or restarted without its last writes. Publish them "
        "again if you still have them.",
        stream=stream,
        first=first,
        last=last,
    )


def log_truncated(stream: str, first: int, last: int) -> LogTruncated:
    return LogTruncated(
        f"The server has lost records {first} to {last} of stream {stream!r}, which this reader "
        "had passed: it failed over to a replica that lagged, or restarted without its last "
        "writes. skip_gap() goes on with what is there now.",
        stream=stream,
        first=first,
        last=last,
    )


def records_lost(stream: str, first: int, last: int) -> RecordsLost:
    return RecordsLost(
        f"Records {first} to {last} of stream {stream!r} are neither in the ring nor in its store: "
        f"they have expired, or a file was removed. A subscriber goes on behind them with "
        f"skip_gap(); else start at {last + 1}.",
        stream=stream,
        first=first,
        last=last,
    )


def corrupt_segment(stream: str, first: int, last: int, place: str, problem: str) -> CorruptSegment:
    return CorruptSegment(
        f"Records {first} to {last} of stream {stream!r} are damaged in the store: "
        f"{problem.rstrip('.')}. Put the file {place} back from a copy; or a subscriber goes on "
        f"behind them with skip_gap(), and read() from {last + 1}.",
        stream=stream,
        first=first,
        last=last,
    )


def opened_before_fork(stream: str) -> MeteorError:
    return MeteorError(
        f"This shared subscriber of stream {stream!r} belongs to the parent process; open another "
        "here with stream.shared_subscriber()."
    )


def store_unavailable(stream: str, store: str, done: str, error: BaseException) -> StoreUnavailable:
    return StoreUnavailable(
        f"The store of stream {stream!r} at {store} cannot be {done} now: "
        f"{mask(str(error)).rstrip('.')}.",
        stream=stream,
    )


def not_archived(
    stream: str, archived: int, end: int, timeout: float, error: Exception | None
) -> StoreUnavailable:
    why = "" if error is None else f" {error}"
    return StoreUnavailable(
        f"Only the records below {archived} of {end} of stream {stream!r} were archived within "
        f"{timeout:g} seconds.{why}",
        stream=stream,
        hint="" if error else "Does an archiver run, and can it write to the store?",
    )


def no_store(stream: str) -> StoreMismatch:
    return StoreMismatch(
        f"Stream {stream!r} was created without a store, so its history is what the ring holds.",
        stream=stream,
        hint="Give a stream its store when you create it: client.stream(name, store=...).",
        missing="store",
    )


def store_mismatch(stream: str, store: str, found: str | None) -> StoreMismatch:
    lies = "nothing is" if found is None else "the history of another is"
    return StoreMismatch(
        f"The store at {store} is not the one of stream {stream!r}: {lies} there. Is the same disk "
        "mounted here, and is the address right? Nothing was read or written.",
        stream=stream,
    )


def store_continued_elsewhere(stream: str) -> StoreMismatch:
    return StoreMismatch(
        f"Another archiver has continued the history of stream {stream!r}, after a fail-over "
        "that this server does not know of. Is this server still the one in charge?",
        stream=stream,
    )


def store_address_unknown(stream: str) -> StoreMismatch:
    return StoreMismatch(
        f"Older records of stream {stream!r} are in a store that cannot be found by its address.",
        stream=stream,
        hint="Open the stream with client.stream(name, store=...).",
        missing="address",
    )


def lease_lost(stream: str, group: str, term: int) -> LeaseLost:
    return LeaseLost(
        f"The lease of group {group!r} of stream {stream!r} was lost: another member has taken it, "
        f"or seek_group() has moved the group (term {term}). What was not confirmed will be read "
        "again; poll() waits for the next turn.",
        stream=stream,
        group=group,
    )


def records_fenced(stream: str, group: str, offsets: Sequence[int]) -> Fenced:
    shown = ", ".join(map(str, offsets[:5])) + (", ..." if len(offsets) > 5 else "")
    return Fenced(
        f"Of stream {stream!r}, this consumer of the shared group {group!r} does not hold {shown} "
        "any more: it was silent for longer than lease_ttl, or returned them with one before them. "
        "They are delivered again.",
        stream=stream,
        group=group,
        offsets=tuple(offsets),
    )


def lease_not_held(stream: str, group: str) -> LeaseLost:
    return LeaseLost(
        f"This subscriber has lost or given up the lease of group {group!r} of stream {stream!r}, "
        "so it can confirm nothing; the records will be read again by whoever holds it.",
        stream=stream,
        group=group,
    )


def confirm_not_sent(stream: str, group: str, address: str) -> ConnectionFailed:
    return ConnectionFailed(
        f"Group {group!r} of stream {stream!r} was left before the server at {address} had "
        "answered the last confirm; what is not confirmed will be read again."
    )


def group_not_found(stream: str, group: str) -> GroupNotFound:
    return GroupNotFound(
        f"Stream {stream!r} has no group {group!r}, or it was deleted; open a subscriber of it to "
        "begin it anew.",
        stream=stream,
        group=group,
    )


def group_is_shared(stream: str, group: str) -> GroupConfigMismatch:
    return GroupConfigMismatch(
        f"Group {group!r} of stream {stream!r} is a shared one: its consumers settle records one "
        "by one, so it cannot be moved, nor read by one member at a time; choose another name.",
        stream=stream,
        group=group,
    )


def group_active(stream: str, group: str, lease: bytes) -> GroupActive:
    owner = lease.decode(errors="replace").partition(" ")[0]
    return GroupActive(
        f"Group {group!r} of stream {stream!r} is active: {owner} has its lease. Close that "
        "subscriber first, or use force=True to take the group from it.",
        stream=stream,
        group=group,
        owner=owner,
    )


def corrupt_stream(stream: str) -> CorruptStream:
    return CorruptStream(
        f"Nothing can be appended to stream {stream!r}: an entry that no publisher of ours wrote "
        "lies above its end. Delete the stream, and let only publishers write its log "
        "(docs/acl.md).",
        stream=stream,
    )


def corrupt_group(stream: str, group: str) -> CorruptStream:
    return CorruptStream(
        f"Where group {group!r} of stream {stream!r} stands cannot be read: something else has "
        "written its key. Delete the group, and let only members write it (docs/acl.md).",
        stream=stream,
    )


def outcome_unknown(stream: str, reason: MeteorError | None) -> OutcomeUnknown:
    because = f" The reason: {reason}" if reason else ""
    return OutcomeUnknown(
        f"The record was sent to stream {stream!r}, but whether it arrived could not be learnt; "
        f"publishing it again may double it.{because}",
        stream=stream,
    )


def publisher_failed(stream: str, error: BaseException) -> PublishError:
    failure = PublishError(
        f"The publisher of stream {stream!r} failed unexpectedly: {error!r}.", stream=stream
    )
    failure.__cause__ = error
    return failure
