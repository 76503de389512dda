"""Errors for script replies, and other errors that several packages raise."""

from __future__ import annotations

from collections.abc import Sequence

from meteor_py.errors import (
    AckTimeout,
    ConnectionFailed,
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
    Rewound,
    StoreMismatch,
    StoreUnavailable,
    StreamFull,
    StreamNotFound,
)


def stream_full(stream: str, archived: int) -> StreamFull:
    return StreamFull(
        f"Stream {stream!r} has reached its limit on unarchived records: only the records below "
        f"{archived} are in the store.",
        stream=stream,
        hint="Is an archiver running?",
    )


def stream_gone(
    stream: str, code: bytes, last: int = -1, *, data_lost: bool = False
) -> MeteorError:
    """Return the error for the codes NOSTREAM and INCARNATION.

    Args:
        stream: The name of the stream.
        code: The code in the server's reply.
        last: The last known offset of the old stream.
        data_lost: Whether the server is known to have lost all its data.
    """
    if data_lost:
        return LogTruncated(
            f"The private server stopped and was restarted without its data, so the records of "
            f"stream {stream!r} are gone. Open the stream again to create it. If its records must "
            "survive a restart, use a server that keeps its data (embedded:///directory).",
            stream=stream,
            first=0,
            last=last,
        )
    if code == b"NOSTREAM":
        return StreamNotFound(
            f"Stream {stream!r} no longer exists. Open a publisher to create it again.",
            stream=stream,
        )
    return LogTruncated(
        f"Stream {stream!r} has been deleted and recreated since it was opened. Open it again.",
        stream=stream,
        first=0,
        last=last,
    )


def check_incarnation(
    stream: str,
    incarnation: str,
    found: bytes | None,
    last: int = -1,
    *,
    data_lost: bool = False,
) -> None:
    """Compare the incarnation in ``meta`` with the expected one.

    Raises:
        StreamNotFound, LogTruncated: See ``stream_gone``.
    """
    if found is None:
        raise stream_gone(stream, b"NOSTREAM", last, data_lost=data_lost)
    if found.decode() != incarnation:
        raise stream_gone(stream, b"INCARNATION", last, data_lost=data_lost)


def acknowledged_records_lost(stream: str, first: int, last: int) -> LogTruncated:
    return LogTruncated(
        f"The server has lost the acknowledged records {first} to {last} of stream {stream!r}: it "
        "failed over to a lagging replica, or restarted without its last writes. If you still have "
        "the records, publish them again.",
        stream=stream,
        first=first,
        last=last,
    )


def log_truncated(stream: str, first: int, last: int) -> LogTruncated:
    return LogTruncated(
        f"The server has lost records {first} to {last} of stream {stream!r}, which this reader "
        "had passed: it failed over to a lagging replica, or restarted without its last writes. "
        "Call skip_gap() to continue with the records that the server still has.",
        stream=stream,
        first=first,
        last=last,
    )


def delivered_records_lost(stream: str, group: str, first: int, last: int) -> LogTruncated:
    return LogTruncated(
        f"The server has lost records {first} to {last} of stream {stream!r}, some of which this "
        f"consumer of shared group {group!r} may have processed: it failed over to a lagging "
        "replica, or restarted without its last writes. Undo the effects of these records. The "
        "next poll continues with the records that the server still has.",
        stream=stream,
        first=first,
        last=last,
    )


def records_lost(stream: str, first: int, last: int) -> RecordsLost:
    return RecordsLost(
        f"Records {first} to {last} of stream {stream!r} are in neither its ring nor its store: "
        f"they have expired, or a file was removed. Call skip_gap() on a subscriber to continue "
        f"after them, or start other readers at {last + 1}.",
        stream=stream,
        first=first,
        last=last,
    )


def opened_before_fork(stream: str) -> MeteorError:
    return MeteorError(
        f"This shared subscriber for stream {stream!r} belongs to the parent process. Open another "
        "one here with stream.shared_subscriber()."
    )


def not_archived(
    stream: str, archived: int, end: int, timeout: float, error: Exception | None
) -> StoreUnavailable:
    why = "" if error is None else f" {error}"
    return StoreUnavailable(
        f"Stream {stream!r} was archived only up to offset {archived} of {end} within "
        f"{timeout:g} seconds.{why}",
        stream=stream,
        hint="" if error else "Is an archiver running, and can it write to the store?",
    )


def no_store(stream: str) -> StoreMismatch:
    return StoreMismatch(
        f"Stream {stream!r} was created without a store, so it has only the records in its ring.",
        stream=stream,
        hint="Pass the store when you create the stream: client.stream(name, store=...).",
        missing="store",
    )


def store_continued_elsewhere(stream: str) -> StoreMismatch:
    return StoreMismatch(
        f"Another archiver has continued archiving stream {stream!r} after a failover that "
        "this server has not seen. Is this server still the primary?",
        stream=stream,
    )


def store_address_unknown(stream: str, *, verified: bool) -> StoreMismatch:
    hint = "Open the stream with client.stream(name, store=...)."
    if verified:
        problem = "whose address is not recorded, so this client cannot open it by itself"
    else:
        problem = (
            "whose address this client does not trust, because publishers can write to the key "
            "that holds it"
        )
        hint += (
            " Or have an administrator open the stream once with this release, and allow this user "
            "to read its settings (docs/acl.md)."
        )
    return StoreMismatch(
        f"Older records of stream {stream!r} are in a store {problem}.",
        stream=stream,
        hint=hint,
        missing="address",
    )


def lease_lost(stream: str, group: str, term: int) -> LeaseLost:
    return LeaseLost(
        f"The lease for group {group!r} of stream {stream!r} was lost: another member has taken "
        f"it, or seek_group() has moved the group, which is now in term {term}. Unconfirmed "
        "records will be read again. poll() waits until it can acquire the lease again.",
        stream=stream,
        group=group,
    )


def records_fenced(stream: str, group: str, offsets: Sequence[int]) -> Fenced:
    return Fenced(
        f"This consumer in shared group {group!r} of stream {stream!r} no longer holds "
        f"{_shown(offsets)}: it was silent for longer than lease_ttl, left the group, or lost them "
        "in a failover. The group delivers them again, unless LogTruncated reports them as lost.",
        stream=stream,
        group=group,
        offsets=tuple(offsets),
    )


def settlements_unknown(stream: str, group: str, offsets: Sequence[int]) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"This consumer's lease in shared group {group!r} of stream {stream!r} expired before "
        f"the server replied about {_shown(offsets)}, and the server no longer remembers whether "
        "these settlements took effect. If not, the records will be delivered again.",
        stream=stream,
    )


def records_rewound(stream: str, group: str, offsets: Sequence[int]) -> Rewound:
    return Rewound(
        f"This consumer in shared group {group!r} of stream {stream!r} has returned "
        f"{_shown(offsets)} together with an earlier record that has the same ordering key. The "
        "group will deliver them again, in order. Skip them here.",
        stream=stream,
        group=group,
        offsets=tuple(offsets),
    )


def records_timed_out(
    stream: str, group: str, offsets: Sequence[int], setting: str, seconds: float
) -> AckTimeout:
    return AckTimeout(
        f"This consumer in shared group {group!r} of stream {stream!r} did not settle "
        f"{_shown(offsets)} within {seconds:g} seconds ({setting}). The group will deliver them "
        "again. Settle records sooner, or call record.extend() in time.",
        stream=stream,
        group=group,
        offsets=tuple(offsets),
        setting=setting,
        seconds=seconds,
    )


def _shown(offsets: Sequence[int]) -> str:
    noun = "record" if len(offsets) == 1 else "records"
    return f"{noun} {', '.join(map(str, offsets[:5]))}" + (", ..." if len(offsets) > 5 else "")


def lease_not_held(stream: str, group: str) -> LeaseLost:
    return LeaseLost(
        f"This subscriber has lost or released the lease for group {group!r} of stream {stream!r}, "
        "so it cannot confirm. The lease's owner will read the records again.",
        stream=stream,
        group=group,
    )


def confirm_not_sent(stream: str, group: str, address: str) -> ConnectionFailed:
    return ConnectionFailed(
        f"This member left group {group!r} of stream {stream!r} before the server at {address} "
        "replied to its last confirm. Unconfirmed records will be read again."
    )


def letters_in_doubt(stream: str, group: str, first: int) -> LeaseLost:
    return LeaseLost(
        f"The server for stream {stream!r} failed over and may have lost dead letters from group "
        f"{group!r} that it had acknowledged. The group will read its records from {first} again.",
        stream=stream,
        group=group,
    )


def confirm_unknown(stream: str, group: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"The lease for group {group!r} of stream {stream!r} was lost before the server replied to "
        "this confirm, so its outcome is unknown. If it had no effect, the records will be read "
        "again.",
        stream=stream,
    )


def group_not_found(stream: str, group: str) -> GroupNotFound:
    return GroupNotFound(
        f"Stream {stream!r} has no group {group!r}, or the group was deleted. Open a subscriber "
        "with this group to create it.",
        stream=stream,
        group=group,
    )


def group_is_shared(stream: str, group: str) -> GroupConfigMismatch:
    return GroupConfigMismatch(
        f"Group {group!r} of stream {stream!r} is a shared group: its consumers settle records one "
        "by one. A shared group cannot be moved, or read by one member at a time. Choose another "
        "name.",
        stream=stream,
        group=group,
    )


def group_active(stream: str, group: str, lease: bytes) -> GroupActive:
    owner = lease.decode(errors="replace").partition(" ")[0]
    return GroupActive(
        f"Group {group!r} of stream {stream!r} is active: {owner} holds its lease. Close that "
        "subscriber first, or use force=True to take the group from it.",
        stream=stream,
        group=group,
        owner=owner,
    )


def corrupt_stream(stream: str) -> CorruptStream:
    return CorruptStream(
        f"Nothing can be appended to stream {stream!r}: another program has written an entry "
        "beyond the end of its log. Repair it with stream.repair(dry_run=False) or `meteor streams "
        "repair`, and allow only publishers to write to the log (docs/acl.md).",
        stream=stream,
    )


def corrupt_group(stream: str, group: str) -> CorruptStream:
    return CorruptStream(
        f"The position of group {group!r} of stream {stream!r} cannot be read: another program has "
        "written to its key. Delete the group, and allow only its members to write to the key "
        "(docs/acl.md).",
        stream=stream,
    )


def outcome_unknown(stream: str, reason: MeteorError | None) -> OutcomeUnknown:
    because = f" Reason: {reason}" if reason else ""
    return OutcomeUnknown(
        f"The record was sent to stream {stream!r}, but it is unknown whether it arrived. "
        f"Publishing it again may duplicate it.{because}",
        stream=stream,
    )


def publisher_failed(stream: str, error: BaseException) -> PublishError:
    failure = PublishError(
        f"The publisher for stream {stream!r} failed unexpectedly: {error!r}.", stream=stream
    )
    failure.__cause__ = error
    return failure
