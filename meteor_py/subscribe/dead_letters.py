"""Dead letters: records that cannot be handled, each published to another stream exactly once.

Duplicates: a member may publish a dead letter and crash before it confirms the record. The next
member would then publish it again. To prevent this, each dead letter has a producer of its own,
which publishes only this batch. The producer's id is derived from the record (stream, incarnation,
epoch and offset) and from the group, with the group's incarnation if it has one. The server
remembers that producer and refuses a second batch from any sender.

Losses: a failover may lose a dead letter, and then the record must not be confirmed. Replicas apply
writes in order. So if the confirm follows the dead letter on the same server and in the same
replication history, no replica has the confirm without the dead letter. ``bury`` returns that
history, and its callers confirm the record only if the server's history has not changed.

A dead letter has its record's value, key, timestamp and headers, plus the text headers below. If
the record already has headers with these names (it may be a dead letter itself), they are replaced.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from meteor_py.errors import ConnectionFailed, MeteorError, ServerRefused, StreamNotFound
from meteor_py.log.catalog import create_stream, find_stream
from meteor_py.log.epochs import begin_epoch
from meteor_py.log.handle import StreamHandle
from meteor_py.publish.sender import PRODUCER_TTL_MS
from meteor_py.publish.validation import to_bytes
from meteor_py.records.config import StreamConfig
from meteor_py.records.frame import Columns, encode
from meteor_py.records.record import Headers, Record
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import PUBLISH
from meteor_py.runtime.backoff import pause_s

#: The stream that the record comes from, and the record's offset there.
STREAM_HEADER = "meteor-stream"
OFFSET_HEADER = "meteor-offset"
#: The group that gave up on the record, the number of tries, and the reason.
GROUP_HEADER = "meteor-group"
TRIES_HEADER = "meteor-tries"
REASON_HEADER = "meteor-reason"

#: Ring capacity of a dead-letter stream that meteor_py creates, in records. It is larger than the
#: default, because the records that the letters copy are settled and may be gone.
LETTERS_CAPACITY = 1_000_000
#: Maximum length of a reason in UTF-8 bytes. Longer reasons are cut, because an error message may
#: quote a whole record.
REASON_BYTES_MAX = 1024

#: Shortest and longest pause between attempts, in seconds. The pause doubles each time.
_BACKOFF_S = (0.01, 0.5)
#: Seconds that one attempt waits for replicas. The client's connection is busy during the wait.
_REPLICAS_S = 1.0

_log = logging.getLogger(__name__)


class _Letter(NamedTuple):
    """A dead letter in the form that ``publish.lua`` expects."""

    keys: list[str]
    form: str
    payload: Any
    index_entry: list[bytes]


class _Sent(NamedTuple):
    """The server's reply to a dead letter."""

    reply: list[Any]
    #: The server's replication history; '' if the server hides it.
    history: str
    #: Number of replicas that have the dead letter; 0 if the caller did not ask for any.
    replicas: int


def bury(
    target: StreamHandle,
    source: StreamHandle,
    group: str | None,
    record: Record,
    *,
    epoch: int,
    member: str = "",
    incarnation: str = "",
    reason: str,
    tries: int,
    acks: int = 0,
    timeout_s: float = 30.0,
    stop: Callable[[], bool] = lambda: False,
) -> str:
    """Publish ``record`` to the dead-letter stream ``target``, exactly once even after retries.

    The caller may repeat the call after any error, even in another process. The server keeps only
    the first copy, even if a later call has a different reason or number of tries. After a day
    without calls, the server forgets the producer, and another call makes a second copy.

    Args:
        group: The group that read the record; None if ``member`` read it without a group.
        record: The record as stored in ``source``, without decoding.
        epoch: The epoch of ``source`` in which the record was appended. After a failover, another
            record may have the same offset.
        incarnation: The group's incarnation, if it has one: a group that was deleted and created
            again may give up on the same record again.
        tries: Number of times that the handler was called with the record.
        acks: Number of replicas that must have the dead letter.
        timeout_s: Seconds to retry while the server is unreachable or full. The last attempt may
            exceed it by up to twice the target client's timeout.
        stop: Called after each failed attempt; True ends the retries.

    Returns:
        The replication history in which the dead letter is stored; '' if the server hides it.

    Raises:
        ConnectionFailed, OutOfMemory, StreamFull: The server, or enough replicas, did not
            acknowledge the dead letter before the timeout or ``stop``. It may have been stored.
        StreamNotFound: The target was deleted.
        LogTruncated: The target was recreated. Open it again.
        ServerRefused: The server refused the dead letter, and a retry would not help.
    """
    headers = _headers(source, group, record.offset, reason, tries)
    reader = f"{group or member}\0{incarnation}" if incarnation else group or member
    producer = _producer_id(source, reader, epoch, record)
    compose = partial(_compose, target, producer, record, headers)
    deadline = time.monotonic() + timeout_s
    failures = 0
    while True:
        try:
            return _store(target, compose, acks)
        except MeteorError as error:
            left_s = deadline - time.monotonic()
            if not error.retriable or left_s <= 0 or stop():
                raise
        failures += 1
        time.sleep(min(pause_s(failures, *_BACKOFF_S), left_s))


def _store(target: StreamHandle, compose: Callable[[], _Letter], acks: int) -> str:
    """Publish a dead letter once; return the replication history in which it is stored."""
    sent = target.use(partial(_send, target=target, letter=compose(), acks=acks))
    if sent.reply[0] == b"ORDERED":  # the target now has an ordering key: add index entries
        target.adopt_ordering_key(sent.reply[1].decode())
        sent = target.use(partial(_send, target=target, letter=compose(), acks=acks))
    _check(target, sent.reply)
    if sent.replicas < acks:
        raise _not_replicated(target, sent.replicas, acks)
    return sent.history


def open_letters(connector: Connector, name: str) -> StreamHandle:
    """Open the dead-letter stream ``name``, creating it if it does not exist.

    A created stream keeps the newest ``LETTERS_CAPACITY`` letters.
    """
    keys.check_name(name)
    try:
        meta = find_stream(connector, name)
    except StreamNotFound:
        config = StreamConfig(capacity=LETTERS_CAPACITY)
        created, meta = create_stream(connector, name, config)
        if created:
            _log.info(
                "Created stream %r, which keeps the newest %d dead letters.", name, LETTERS_CAPACITY
            )
    return StreamHandle(connector, name, meta)


def reason_of(error: BaseException) -> str:
    """Format an error that a handler raised, as the reason in a dead letter."""
    return f"{type(error).__name__}: {error}"


def _compose(target: StreamHandle, producer: str, record: Record, headers: Headers) -> _Letter:
    columns = Columns(
        values=[to_bytes(record.value)],
        keys=None if record.key is None else [record.key],
        headers=[(record.headers or {}) | headers],
        timestamps=[record.timestamp],
    )
    rule = target.config.ordering_rule
    return _Letter(
        [*target.keys, keys.producer(target.name, producer), *target.index_keys],
        *encode(columns, target.config.compression),
        [] if rule is None else rule.index(columns),
    )


def _send(connection: Connection, target: StreamHandle, letter: _Letter, acks: int) -> _Sent:
    """Send a dead letter and return the reply.

    Retries are safe, because the producer's epoch and sequence are always the same.
    """
    form, payload = letter.form, letter.payload
    epoch, sequence, count = 0, 0, 1
    fingerprint = 0  # the same for any payload, because a retry may give another reason
    numbers = (epoch, sequence, count, fingerprint, PRODUCER_TTL_MS)
    checksum = crc32(payload) if target.config.checksum else ""
    connection.refresh_history()  # the server may have been promoted since the last call
    for _ in range(2):
        known_epoch = ""  # so that the reply is always a list
        head = (target.incarnation, connection.history, *numbers, form, payload, checksum)
        args = [*head, known_epoch, *letter.index_entry]
        reply: list[Any] = connection.run(PUBLISH, letter.keys, args)
        if reply[0] != b"HISTORY":
            break
        begin_epoch(connection, target.name, target.incarnation, reply[1].decode())
    history, replicas = connection.history, 0
    if acks and reply[0] == b"OK":
        # WAIT must use this connection: it covers only the connection's own writes. A duplicate,
        # which the server does not append again, also causes a write.
        wait = ("WAIT", acks, int(_REPLICAS_S * 1000))
        replicas = int(connection.call(*wait, timeout_s=_REPLICAS_S + connection.timeout_s))
    return _Sent(reply, history, replicas)


def _check(target: StreamHandle, reply: list[Any]) -> None:
    """Raise unless the dead letter is in the log."""
    code = reply[0]
    if code == b"OK":
        return
    if code in (b"NOSTREAM", b"INCARNATION"):
        raise reply_errors.stream_gone(target.name, code)
    if code == b"FULL":
        raise reply_errors.stream_full(target.name, reply[1])
    if code == b"HISTORY":
        raise ConnectionFailed(f"The server for stream {target.name!r} is failing over. Try again.")
    raise ServerRefused(f"Stream {target.name!r} refused a dead letter: {code.decode()}.")


def _not_replicated(target: StreamHandle, seen: int, wanted: int) -> ConnectionFailed:
    return ConnectionFailed(
        f"Only {seen} of {wanted} replicas confirmed a dead letter in stream {target.name!r} in "
        "time. Check the replicas."
    )


def _producer_id(source: StreamHandle, reader: str, epoch: int, record: Record) -> str:
    identity = f"{source.name}\0{source.incarnation}\0{epoch}\0{record.offset}\0{reader}"
    return f"dl-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def _headers(
    source: StreamHandle, group: str | None, offset: int, reason: str, tries: int
) -> Headers:
    # A str may hold lone surrogates, which UTF-8 cannot encode, and the cut may split a character.
    clipped = reason.encode(errors="backslashreplace")[:REASON_BYTES_MAX]
    return {
        STREAM_HEADER: source.name.encode(),
        **({} if group is None else {GROUP_HEADER: group.encode()}),
        OFFSET_HEADER: b"%d" % offset,
        REASON_HEADER: clipped.decode(errors="ignore").encode(),
        TRIES_HEADER: b"%d" % tries,
    }
