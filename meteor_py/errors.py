"""The errors of meteor_py. Wrong arguments raise ``ValueError`` or ``TypeError`` instead.

    MeteorError                     .problem .hint .retriable: the same call may succeed later
    ├── ConnectionFailed            the server cannot be reached, or went away          retriable
    ├── ServerRefused               .code: the server replied with an error
    │   ├── AccessDenied            the password is wrong, or the ACL forbids the command
    │   └── OutOfMemory             the server has reached maxmemory                    retriable
    ├── ServerNotFound              no server program found to run as an embedded server
    ├── ServerStartFailed           the embedded server did not start
    ├── StreamError                 .stream
    │   ├── StreamNotFound          .similar: no stream has that name
    │   ├── StreamConfigMismatch    .setting .changeable: the stream has different settings
    │   ├── CorruptStream           another program wrote to the stream's keys
    │   ├── StreamFull              publishing waits for the archiver                   retriable
    │   ├── StoreUnavailable        the store cannot be read or written                 retriable
    │   ├── StoreMismatch           .missing: not this stream's store
    │   └── GroupError              .group
    │       ├── GroupNotFound       no group has that name
    │       ├── GroupActive         .owner .shared: a member holds the lease            retriable
    │       ├── GroupConfigMismatch the group exists with other settings, or as the other kind
    │       ├── LeaseLost           the lease was lost or released; nothing was confirmed
    │       ├── Fenced              .offsets: records that this consumer no longer holds
    │       │   ├── Rewound         returned to the group, with an earlier record of their key
    │       │   └── AckTimeout      .setting .seconds: not settled in time
    │       ├── NoConfirmedOffset   InitialOffset.NONE, but nothing is confirmed yet
    │       └── NotGrouped          only a subscriber in a group can do this
    ├── PublishError                .stream
    │   ├── RecordTooLarge          the record exceeds the size limit; also a ValueError
    │   ├── PublisherFull           unacknowledged records fill max_pending_bytes       retriable
    │   ├── PublisherClosed         not sent: the publisher was closed
    │   ├── OutcomeUnknown          the publish, confirm or settlement may have taken effect
    │   └── NotReplicated           in the log, but not on enough replicas in time
    ├── PeerError                   .group: the peer group
    │   ├── PeerGroupNotFound       no peer group has that name, or it was deleted
    │   ├── PeerGroupActive         .alive: the group has live members
    │   ├── MemberTaken             another member has that name
    │   ├── MembershipLost          expelled, removed, or replaced under the same name
    │   ├── StaleTerm               no longer the leader of that term
    │   ├── NoLeader                the group currently has no leader                   retriable
    │   ├── ClockTooUncertain       the group's time is not known precisely enough      retriable
    │   ├── ActionRefused           too late to vote, or the action is already pending
    │   └── MessageFailed           .member
    │       ├── MemberUnknown       no such member, or the group is empty
    │       ├── MemberLeft          the member left before it replied
    │       ├── HandlerFailed       the receiver could not handle the message
    │       ├── NoHandler           .queue: no receiver has a handler for the queue
    │       ├── MessageExpired      .timeout: no reply in time                          retriable
    │       ├── InboxFull           the member's inbox is at its limit                  retriable
    │       └── PartialFailure      .values .failed: the message failed for some targets
    └── ReadError                   .stream
        ├── RecordsLost             .first .last: dropped by the ring and not in a store
        ├── CorruptSegment          .first .last: damaged in the store
        ├── LogTruncated            .first .last: the server lost acknowledged records
        ├── CorruptFrame            .first .last: the frame is damaged
        ├── UnsupportedFrame        .first .last: written by a newer version
        ├── DecodeError             .record: the codec could not decode a value
        └── InvalidInitialOffset    an ungrouped subscriber needs a place to start

A message says what happened and, if the caller can do something about it, what to do.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

if TYPE_CHECKING:
    from meteor_py.records.record import Record

_E = TypeVar("_E", bound=Exception)


class MeteorError(Exception):
    """Base class for all errors that meteor_py raises.

    ``problem`` says what happened. ``hint`` says what to do about it in Python, and may be empty.
    ``str(error)`` contains both.
    """

    #: Whether repeating the same call later may succeed.
    retriable: ClassVar[bool] = False

    def __init__(self, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{problem} {hint}" if hint else problem)
        self.problem = problem
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[MeteorError], args: tuple[Any, ...], fields: dict[str, Any]) -> MeteorError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def fresh(error: _E) -> _E:
    """Return a copy of a stored error, for the caller to raise.

    Raising the stored error itself would keep the caller's frame, and everything in its variables,
    alive for as long as the error is stored.
    """
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied


class ConnectionFailed(MeteorError):
    """The server could not be reached, or the connection ended before the server replied."""

    retriable = True
    #: Whether the server itself rejected the command, for example because it is loading its data.
    #: If so, the command had no effect.
    answered = False
    #: Whether another server has the keys, or a cluster is moving them. If so, the command had no
    #: effect, and a retry is likely to succeed soon.
    redirected = False


class ServerRefused(MeteorError):
    """The server replied with an error. A retry can help only after ``OutOfMemory``.

    ``code`` is the first word of the reply, such as ``WRONGTYPE``. It is empty if meteor_py, not
    the server, refused the operation.
    """

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class AccessDenied(ServerRefused):
    """The password is wrong, or the user's ACL forbids the command or key."""


class OutOfMemory(ServerRefused):
    """The server has reached ``maxmemory`` and refuses commands that need memory."""

    retriable = True


class ServerNotFound(MeteorError):
    """No server program was found to run as an embedded server."""


class ServerStartFailed(MeteorError):
    """The embedded server did not start. The message usually ends with its last log lines."""


class _OfStream(MeteorError):
    """An error about one stream."""

    def __init__(self, problem: str, *, stream: str, hint: str = "") -> None:
        super().__init__(problem, hint=hint)
        self.stream = stream


class StreamError(_OfStream):
    """Base class for errors about a stream as a whole."""


class StreamNotFound(StreamError):
    """No stream has that name, or the stream was deleted.

    ``similar`` lists streams with similar names.
    """

    def __init__(
        self, problem: str, *, stream: str, hint: str = "", similar: Sequence[str] = ()
    ) -> None:
        super().__init__(problem, stream=stream, hint=hint)
        self.similar = tuple(similar)


class StreamConfigMismatch(StreamError):
    """The stream exists with settings other than the requested ones.

    ``setting`` is the first setting that differs; None if the stream lacks a store. ``changeable``
    says whether ``stream.configure()`` can change it.
    """

    def __init__(
        self,
        problem: str,
        *,
        stream: str,
        hint: str = "",
        setting: str | None = None,
        changeable: bool = False,
    ) -> None:
        super().__init__(problem, stream=stream, hint=hint)
        self.setting = setting
        self.changeable = changeable


class CorruptStream(StreamError):
    """The stream's keys hold data that meteor_py did not write, such as a foreign log entry.

    Also raised if a newer version of meteor_py wrote the stream in another layout.
    """


class StreamFull(StreamError):
    """The stream has reached its limit ``max_unarchived``; publishing waits for the archiver."""

    retriable = True


class StoreUnavailable(StreamError):
    """The store could not be read or written: no connection, no space, or no permission.

    Also raised if the archiver does not finish in time, for example during ``store.flush()``.
    """

    retriable = True


class StoreMismatch(StreamError):
    """The store at this address does not hold this stream's records, or there is no store.

    ``missing`` is "store" if the stream has no store, "address" if the caller must pass the store
    when opening the stream, and None otherwise.
    """

    def __init__(
        self,
        problem: str,
        *,
        stream: str,
        hint: str = "",
        missing: Literal["store", "address"] | None = None,
    ) -> None:
        super().__init__(problem, stream=stream, hint=hint)
        self.missing = missing


class GroupError(StreamError):
    """Base class for errors about a subscriber group.

    ``group`` is None for an ungrouped subscriber.
    """

    def __init__(self, message: str, *, stream: str, group: str | None) -> None:
        super().__init__(message, stream=stream)
        self.group = group


class GroupNotFound(GroupError):
    """The stream has no group with that name, or the group was deleted."""


class GroupActive(GroupError):
    """A member holds the group's lease or, if ``shared``, the shared group has live consumers.

    ``owner`` names the member, or one of the consumers.
    """

    retriable = True

    def __init__(
        self, message: str, *, stream: str, group: str, owner: str, shared: bool = False
    ) -> None:
        super().__init__(message, stream=stream, group=group)
        self.owner = owner
        self.shared = shared


class LeaseLost(GroupError):
    """The lease was lost or released, so this confirm was refused and changed nothing.

    The records have been, or will be, delivered to the member that holds the lease next.
    """


class GroupConfigMismatch(GroupError):
    """The group exists with other settings, or as the other kind of group (shared or not)."""


class Fenced(GroupError):
    """Records of a shared group, listed in ``offsets``, no longer belong to this consumer.

    The consumer's lease expired, the consumer left the group, or the server failed over and lost
    the delivery, unless this is a ``Rewound`` or an ``AckTimeout``. The records have been, or will
    be, delivered again. Settling them here was refused and changed nothing.
    """

    def __init__(self, message: str, *, stream: str, group: str, offsets: tuple[int, ...]) -> None:
        super().__init__(message, stream=stream, group=group)
        self.offsets = offsets


class Rewound(Fenced):
    """This consumer returned these records to the group, with an earlier record of the same key.

    The consumer still has its lease. The group delivers the records again, in order.
    """


class AckTimeout(Fenced):
    """The records were not settled in time, so this consumer returned them to the group as failed.

    ``setting`` is the time limit that expired, such as "ack_timeout", and ``seconds`` its value.
    """

    def __init__(
        self,
        message: str,
        *,
        stream: str,
        group: str,
        offsets: tuple[int, ...],
        setting: str,
        seconds: float,
    ) -> None:
        super().__init__(message, stream=stream, group=group, offsets=offsets)
        self.setting = setting
        self.seconds = seconds


class NoConfirmedOffset(GroupError):
    """``InitialOffset.NONE`` was requested, but the group has no confirmed offset."""


class NotGrouped(GroupError):
    """This subscriber belongs to no group, so it has no lease and cannot confirm."""


class PublishError(_OfStream):
    """Base class for errors about publishing a record."""


class RecordTooLarge(PublishError, ValueError):
    """The record exceeds the size limit. Nothing was sent."""


class PublisherFull(PublishError):
    """Unacknowledged records fill ``max_pending_bytes``, so this record was not accepted."""

    retriable = True


class PublisherClosed(PublishError):
    """The publisher was closed before this record was sent."""


class OutcomeUnknown(PublishError):
    """The record was sent, but no reply arrived before the deadline.

    The record may be in the log. Publishing it again may append it twice.

    A confirm raises this error if its reply was lost, the member then lost its lease, and the
    server no longer remembers the term. Settling a record of a shared group raises it for a similar
    reason. In both cases, the group may or may not deliver the records again.
    """


class NotReplicated(PublishError):
    """The record is in the log, but fewer replicas than requested confirmed it in time."""

    def __init__(self, why: str, *, stream: str, offset: int) -> None:
        super().__init__(f"Record {offset} of stream {stream!r} {why}", stream=stream)
        self.why = why
        self.offset = offset

    def at(self, offset: int) -> NotReplicated:
        """Return the same error for another record in the batch."""
        error = NotReplicated(self.why, stream=self.stream, offset=offset)
        error.__cause__ = self.__cause__
        return error


class PeerError(MeteorError):
    """Base class for errors about the peer group ``group``."""

    def __init__(self, message: str, *, group: str) -> None:
        super().__init__(message)
        self.group = group


class PeerGroupNotFound(PeerError):
    """The peer group does not exist: it was never created, was deleted, or the server lost it."""


class PeerGroupActive(PeerError):
    """The group cannot be deleted: it has ``alive`` live members that joined elsewhere."""

    def __init__(self, problem: str, *, group: str, alive: int) -> None:
        super().__init__(problem, group=group)
        self.alive = alive


class MemberTaken(PeerError):
    """Another live member has that name, or the name is an unnamed member's id."""


class MembershipLost(PeerError):
    """The member was expelled or removed, or another session has taken over its name."""


class StaleTerm(PeerError):
    """The writer is no longer the leader of that term; nothing was written."""


class NoLeader(PeerError):
    """The group currently has no leader."""

    retriable = True


class ClockTooUncertain(PeerError):
    """The group's time is not known as precisely as requested."""

    retriable = True


class ActionRefused(PeerError):
    """Not enough time is left for a vote on the action, or the same action is already pending."""


class MessageFailed(PeerError):
    """A message was not delivered or got no reply. ``member`` is the target, if known."""

    def __init__(self, message: str, *, group: str, member: str | None = None) -> None:
        super().__init__(message, group=group)
        self.member = member


class MemberUnknown(MessageFailed):
    """The group has no such member, or is empty."""


class MemberLeft(MessageFailed):
    """The member left before it replied."""


class HandlerFailed(MessageFailed):
    """The receiver could not handle the message; the error's text says why.

    The handler raised an exception, took too long or called ``fail()``, its reply cannot be encoded
    or decoded, the receiver cannot read the message, or the message was delivered too often.
    """


class NoHandler(MessageFailed):
    """No receiver handles the queue ``queue``, so the message was not sent.

    If ``member`` is set, this applies only to that receiver.
    """

    def __init__(self, message: str, *, group: str, member: str | None = None, queue: str) -> None:
        super().__init__(message, group=group, member=member)
        self.queue = queue


class MessageExpired(MessageFailed):
    """No reply arrived in time.

    ``timeout`` is the number of seconds that the sender waited; None if the message was never sent,
    or if the member received it too late.
    """

    retriable = True

    def __init__(
        self,
        message: str,
        *,
        group: str,
        member: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(message, group=group, member=member)
        self.timeout = timeout


class InboxFull(MessageFailed):
    """The member has ``max_inbox`` unsettled messages."""

    retriable = True


class PartialFailure(MessageFailed):
    """A message failed for some of its targets.

    ``failed`` maps each of these targets to its error. ``values`` maps each other target to its
    reply, or to None if the target only acknowledged the message.
    """

    def __init__(
        self,
        message: str,
        *,
        group: str,
        values: dict[str, object],
        failed: dict[str, MessageFailed],
    ) -> None:
        super().__init__(message, group=group, member=next(iter(failed), None))
        self.values = values
        self.failed = failed


class ReadError(_OfStream):
    """Base class for errors about reading records."""


class _OfRange(ReadError):
    """An error about the records ``first`` to ``last``, inclusive."""

    def __init__(self, problem: str, *, stream: str, first: int, last: int, hint: str = "") -> None:
        super().__init__(problem, stream=stream, hint=hint)
        self.first = first
        self.last = last


class RecordsLost(_OfRange):
    """The ring has dropped these records, and no store holds them."""


class CorruptSegment(_OfRange):
    """These records are damaged in the store. Other records stay readable."""


class LogTruncated(_OfRange):
    """The server lost these records after it had acknowledged or delivered them.

    Causes: a failover to a lagging replica, a restart without full persistence, or a stream that
    was deleted and recreated. Offsets from ``first`` on may now refer to different records.
    """


class CorruptFrame(_OfRange):
    """The frame is damaged: it cannot be decoded, or does not match its checksum."""


class UnsupportedFrame(_OfRange):
    """A newer version wrote this frame, in a format that this version cannot read."""


class DecodeError(ReadError):
    """The codec could not decode a value. ``record`` has the raw bytes."""

    def __init__(self, message: str, *, stream: str, record: Record) -> None:
        super().__init__(message, stream=stream)
        self.record = record


class InvalidInitialOffset(ReadError):
    """``InitialOffset.NONE`` does not tell an ungrouped subscriber where to start."""
