"""Everything meteor_py raises, besides ``ValueError`` and ``TypeError`` for wrong arguments.

    MeteorError                     .problem .hint .retriable: the same call may succeed later
    ├── ConnectionFailed            no server there, or it went away                    retriable
    ├── ServerRefused               .code: the server replied with an error (rights, memory)
    │   ├── AccessDenied            wrong password, or the ACL forbids it
    │   └── OutOfMemory             maxmemory is reached                                retriable
    ├── ServerNotFound              no server program to start an embedded one with
    ├── ServerStartFailed           the embedded server did not come up
    ├── StreamError                 .stream
    │   ├── StreamNotFound          no stream of that name
    │   ├── StreamConfigMismatch    .setting .changeable: it exists, with other settings
    │   ├── CorruptStream           something in its log is not ours
    │   ├── StreamFull              publishing waits for the archiver                   retriable
    │   ├── StoreUnavailable        the store cannot be reached or written to now       retriable
    │   ├── StoreMismatch           .missing: not the store that holds the stream's history
    │   └── GroupError              .group
    │       ├── GroupNotFound       no group of that name
    │       ├── GroupActive         .owner .shared: a member has its lease              retriable
    │       ├── GroupConfigMismatch it exists, with other settings, or is of the other kind
    │       ├── LeaseLost           lost or given up; nothing was confirmed
    │       ├── Fenced              .offsets: they were given to another consumer
    │       ├── NoConfirmedOffset   InitialOffset.NONE, and nothing confirmed yet
    │       └── NotGrouped          only a subscriber of a group can do this
    ├── PublishError                .stream
    │   ├── RecordTooLarge          over the limit; also a ValueError
    │   ├── PublisherFull           max_pending_bytes are waiting already               retriable
    │   ├── PublisherClosed         not sent: the publisher was closed
    │   ├── OutcomeUnknown          may or may not be in the log
    │   └── NotReplicated           in the log, but not on enough replicas in time
    ├── PeerError                   .group: of a peer group
    │   ├── PeerGroupNotFound       there is no such group, or not any more
    │   ├── PeerGroupActive         .alive: it has live members
    │   ├── MemberTaken             somebody has that name
    │   ├── MembershipLost          expelled, removed, or replaced by the same name elsewhere
    │   ├── StaleTerm               not the leader of that term any more
    │   ├── NoLeader                the group has none now                              retriable
    │   ├── ClockTooUncertain       the time of the group is not known well enough      retriable
    │   ├── ActionRefused           too late for it, or it is decided on already
    │   └── MessageFailed           .member
    │       ├── MemberUnknown       there is no such member, or none at all
    │       ├── MemberLeft          it left before it had answered
    │       ├── HandlerFailed       its handler raised, or failed it
    │       ├── MessageExpired      .timeout: no reply in time                          retriable
    │       ├── InboxFull           it has as many messages as it may                   retriable
    │       └── PartialFailure      .values .failed: not all of those it was sent to took it
    └── ReadError                   .stream
        ├── RecordsLost             .first .last: gone from the ring and not in a store
        ├── CorruptSegment          .first .last: damaged in the store
        ├── LogTruncated            .first .last: the server lost what it had acknowledged
        ├── CorruptFrame            .first .last: bytes that are not a frame
        ├── UnsupportedFrame        .first .last: written by a newer version
        ├── DecodeError             .record: the codec could not read a value
        └── InvalidInitialOffset    an ungrouped subscriber needs a place to start

Each message is one full sentence and, where something can be done, a hint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from meteor_py.records.record import Record


class MeteorError(Exception):
    """Root of all errors of this package.

    ``problem`` says what happened. ``hint`` says what to do about it in Python; it is empty if the
    problem says all. The text of the error is both.
    """

    #: Whether the same call may succeed later without anything being changed.
    retriable: ClassVar[bool] = False

    def __init__(self, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{problem} {hint}" if hint else problem)
        self.problem = problem
        self.hint = hint


class ConnectionFailed(MeteorError):
    """The server could not be reached, or went away before it answered."""

    retriable = True
    #: It did answer: that it cannot do this now, or not here. So it did nothing.
    answered = False


class ServerRefused(MeteorError):
    """The server replied with an error that repeating the command will not cure.

    ``code`` is the first word of its reply, such as ``WRONGTYPE``; empty if the library refused.
    """

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class AccessDenied(ServerRefused):
    """The password is wrong, or the ACL of this user forbids the command or key."""


class OutOfMemory(ServerRefused):
    """The server has reached ``maxmemory`` and takes no new record."""

    retriable = True


class ServerNotFound(MeteorError):
    """No server program was found to start an embedded server with."""


class ServerStartFailed(MeteorError):
    """The embedded server did not start; the message ends with what it logged."""


class _OfStream(MeteorError):
    """An error about one stream."""

    def __init__(self, problem: str, *, stream: str, hint: str = "") -> None:
        super().__init__(problem, hint=hint)
        self.stream = stream


class StreamError(_OfStream):
    """Something is wrong with the stream itself."""


class StreamNotFound(StreamError):
    """There is no stream of that name, or it was deleted."""


class StreamConfigMismatch(StreamError):
    """The stream exists with settings other than those asked for.

    ``setting`` is the first that differs; None if the stream has no store. ``changeable``: whether
    ``stream.configure()`` can change it.
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
    """The log holds an entry that no publisher of ours wrote."""


class StreamFull(StreamError):
    """The unarchived part has reached ``max_unarchived``; publishing waits for the archiver."""

    retriable = True


class StoreUnavailable(StreamError):
    """The store could not be read or written: no connection, no space, no rights."""

    retriable = True


class StoreMismatch(StreamError):
    """What lies at the store's address is not the history of this stream, or nothing is.

    ``missing`` is "store" if the stream has none, "address" if it must be given when the stream is
    opened, and None otherwise.
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
    """Something about a subscriber group; ``group`` is None for an ungrouped subscriber."""

    def __init__(self, message: str, *, stream: str, group: str | None) -> None:
        super().__init__(message, stream=stream)
        self.group = group


class GroupNotFound(GroupError):
    """The stream has no group of that name, or it was deleted."""


class GroupActive(GroupError):
    """A member holds the group's lease, or consumers share the group (``shared``).

    ``owner`` is the name of the member, or of one of the consumers.
    """

    retriable = True

    def __init__(
        self, message: str, *, stream: str, group: str, owner: str, shared: bool = False
    ) -> None:
        super().__init__(message, stream=stream, group=group)
        self.owner = owner
        self.shared = shared


class LeaseLost(GroupError):
    """The lease was lost or given up, so this confirm was refused and changed nothing.

    The records will be, or have been, given to the member that has the lease now.
    """


class GroupConfigMismatch(GroupError):
    """The group exists with settings other than those asked for, or as a group of another kind."""


class Fenced(GroupError):
    """Records of a shared group, ``offsets``, are not this consumer's any more.

    It was taken for dead, or they went back with one before them in their group. They will be, or
    have been, delivered again; what was said of them here was refused and changed nothing.
    """

    def __init__(self, message: str, *, stream: str, group: str, offsets: tuple[int, ...]) -> None:
        super().__init__(message, stream=stream, group=group)
        self.offsets = offsets


class NoConfirmedOffset(GroupError):
    """``InitialOffset.NONE`` needs a group that has confirmed something."""


class NotGrouped(GroupError):
    """This subscriber belongs to no group, so there is nothing to confirm or to hold."""


class PublishError(_OfStream):
    """A record was not published as asked."""


class RecordTooLarge(PublishError, ValueError):
    """The record is over the limit; nothing was sent."""


class PublisherFull(PublishError):
    """``max_pending_bytes`` are waiting already; this record was not taken."""

    retriable = True


class PublisherClosed(PublishError):
    """The publisher was closed before this record was sent."""


class OutcomeUnknown(PublishError):
    """The record was sent, and whether it arrived could not be learnt before the deadline.

    Publishing it again may put it into the log twice.
    """


class NotReplicated(PublishError):
    """The record is in the log, but fewer replicas than asked for confirmed it in time."""

    def __init__(self, why: str, *, stream: str, offset: int) -> None:
        super().__init__(f"Record {offset} of stream {stream!r} {why}", stream=stream)
        self.why = why
        self.offset = offset

    def at(self, offset: int) -> NotReplicated:
        """The same of another record of the batch."""
        error = NotReplicated(self.why, stream=self.stream, offset=offset)
        error.__cause__ = self.__cause__
        return error


class PeerError(MeteorError):
    """Something about a peer group: ``group``."""

    def __init__(self, message: str, *, group: str) -> None:
        super().__init__(message)
        self.group = group


class PeerGroupNotFound(PeerError):
    """There is no such peer group: none was to be begun, or it was deleted, or lost."""


class PeerGroupActive(PeerError):
    """The group has live members: ``alive`` of them."""

    def __init__(self, problem: str, *, group: str, alive: int) -> None:
        super().__init__(problem, group=group)
        self.alive = alive


class MemberTaken(PeerError):
    """Another member has that name, and is alive; or it is the id of one without a name."""


class MembershipLost(PeerError):
    """This is not a member any more: it was expelled, removed, or joined again elsewhere."""


class StaleTerm(PeerError):
    """The writer is not the leader of that term any more; nothing was written."""


class NoLeader(PeerError):
    """The group has no leader now."""

    retriable = True


class ClockTooUncertain(PeerError):
    """The time of the group is not known as well as was asked for."""

    retriable = True


class ActionRefused(PeerError):
    """There is not enough time left for a vote, or the same action is decided on already."""


class MessageFailed(PeerError):
    """A message was not delivered, or not answered; ``member`` is who failed, if it is known."""

    def __init__(self, message: str, *, group: str, member: str | None = None) -> None:
        super().__init__(message, group=group)
        self.member = member


class MemberUnknown(MessageFailed):
    """There is no such member, or the group is empty."""


class MemberLeft(MessageFailed):
    """The member left before it had answered."""


class HandlerFailed(MessageFailed):
    """The handler raised, or failed the message."""


class MessageExpired(MessageFailed):
    """No reply arrived in time.

    ``timeout`` is how many seconds the sender waited. None: the member found that the message had
    expired, or it was never sent.
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
    """The member has as many unsettled messages as it may have."""

    retriable = True


class PartialFailure(MessageFailed):
    """Some members did not take a message to all: ``failed`` has their errors, by member.

    ``values`` has what the others said: None for each that acknowledged it.
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
    """Records could not be read as asked."""


class _OfRange(ReadError):
    """An error about the records ``first`` to ``last``, both included."""

    def __init__(self, message: str, *, stream: str, first: int, last: int) -> None:
        super().__init__(message, stream=stream)
        self.first = first
        self.last = last


class RecordsLost(_OfRange):
    """The ring has dropped these records, and no store holds them."""


class CorruptSegment(_OfRange):
    """The store holds these records, and they are damaged; others stay readable."""


class LogTruncated(_OfRange):
    """The server lost these records after it had acknowledged or delivered them.

    A fail-over to a replica that lagged, a restart without full persistence, or a stream that
    was deleted and created anew. Offsets from ``first`` on may now name other records.
    """


class CorruptFrame(_OfRange):
    """The bytes of this frame are not what a publisher wrote."""


class UnsupportedFrame(_OfRange):
    """The frame has a format that this version does not know; a newer one wrote it."""


class DecodeError(ReadError):
    """The codec could not decode a value; ``record`` has the raw bytes."""

    def __init__(self, message: str, *, stream: str, record: Record) -> None:
        super().__init__(message, stream=stream)
        self.record = record


class InvalidInitialOffset(ReadError):
    """``InitialOffset.NONE`` says nothing about where an ungrouped subscriber starts."""
