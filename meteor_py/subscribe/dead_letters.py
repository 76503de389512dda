"""Dead letters: a record that could not be handled goes to another stream, exactly once.

A member that gives a record up may crash before that is noted anywhere, and the next one gives it
up again. So a letter is the only batch of a producer whose id follows from the record: the server
remembers it and takes no second one, from any sender and however often.

A letter has the value, key, timestamp and headers of its record, and the headers named below, all
text. Where the record had one of the same name, as a letter that is buried again, it is replaced.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable
from typing import Any

from meteor_py.errors import ConnectionFailed, MeteorError, ServerRefused, StreamNotFound
from meteor_py.log.catalog import create_stream, find_stream
from meteor_py.log.epochs import begin_epoch
from meteor_py.log.handle import StreamHandle
from meteor_py.publish.sender import PRODUCER_TTL_MS
from meteor_py.publish.validation import to_bytes
from meteor_py.records.config import StreamConfig
from meteor_py.records.frame import Columns, encode, fingerprint
from meteor_py.records.record import Headers, Record
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import PUBLISH
from meteor_py.runtime.backoff import pause_s

#: The stream that the record comes from.
STREAM_HEADER = "meteor-stream"
#: The group that gave it up.
GROUP_HEADER = "meteor-group"
#: Its offset in that stream.
OFFSET_HEADER = "meteor-offset"
#: Why, in at most ``REASON_BYTES_MAX`` bytes of UTF-8.
REASON_HEADER = "meteor-reason"
#: How often it was tried.
TRIES_HEADER = "meteor-tries"

#: Bytes of the reason that are kept: it may quote the record, which the letter has anyway.
REASON_BYTES_MAX = 1024

#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.01, 0.5)


def bury(
    target: StreamHandle,
    source: StreamHandle,
    group: str | None,
    record: Record,
    *,
    member: str = "",
    reason: str,
    tries: int,
    timeout_s: float = 30.0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Publish ``record`` to the dead-letter stream ``target``; return None once a copy is there.

    May be repeated after any error, and by another process: the first copy stays the only one,
    even if a repeat has another reason or count. That holds for a day, for which the server
    remembers an idle producer; a repeat after that makes a second copy.

    Args:
        group: Whose record it is; None for an ungrouped subscriber, which ``member`` then names.
        record: As it lies in ``source``, of any size: its value is bytes that no codec decoded.
        tries: How often it was tried.
        timeout_s: Seconds to go on while the server is away or full. The last try may last
            longer, up to twice the timeout of the target's client.
        stop: Asked after each try that failed; True gives up.

    Raises:
        ConnectionFailed, OutOfMemory, StreamFull: Not confirmed in time, or not before ``stop``;
            a copy may be there all the same.
        StreamNotFound: The target was deleted.
        LogTruncated: The target was deleted and recreated: open it again.
        ServerRefused: For a reason that trying again will not cure.
    """
    producer = keys.producer(target.name, _producer_id(source, group or member, record.offset))
    names = [keys.log(target.name), keys.meta(target.name), producer, *target.index_keys]
    letter = Columns(
        values=[to_bytes(record.value)],
        keys=None if record.key is None else [record.key],
        headers=[(record.headers or {}) | _headers(source, group, record.offset, reason, tries)],
        timestamps=[record.timestamp],
    )
    frame = encode(letter, target.config.compression)
    ordering_rule = target.config.ordering_rule
    index = [] if ordering_rule is None else ordering_rule.index(letter)
    deadline = time.monotonic() + timeout_s
    failures = 0
    while True:
        try:
            reply = target.connector.use(
                lambda connection: _send(connection, target, names, frame, index)
            )
            return _check(target, reply)
        except MeteorError as error:
            left_s = deadline - time.monotonic()
            if not error.retriable or left_s <= 0 or stop():
                raise
        failures += 1
        time.sleep(min(pause_s(failures, *_BACKOFF_S), left_s))


def open_letters(connector: Connector, name: str) -> StreamHandle:
    """The stream of that name; made if there is none, which not everybody may do."""
    keys.check_name(name)
    try:
        meta = find_stream(connector, name)
    except StreamNotFound:
        meta = create_stream(connector, name, StreamConfig())[1]
    return StreamHandle(connector, name, meta)


def _send(
    connection: Connection,
    target: StreamHandle,
    names: list[str],
    frame: tuple[str, Any],
    index: list[bytes],
) -> list[Any]:
    """Send the letter and return the reply; its numbers are always the same: safe to repeat."""
    form, payload = frame
    epoch, sequence, count = 0, 0, 1
    numbers = (epoch, sequence, count, fingerprint(payload), PRODUCER_TTL_MS)
    checksum = zlib.crc32(payload) if target.config.checksum else ""
    connection.refresh_history()  # a server can be demoted and promoted under an idle connection
    for _ in range(2):
        args = (target.incarnation, connection.history, *numbers, form, payload, checksum, *index)
        reply: list[Any] = connection.run(PUBLISH, names, args)
        if reply[0] != b"HISTORY":
            break
        begin_epoch(connection, target.name, target.incarnation, reply[1].decode())
    return reply


def _check(target: StreamHandle, reply: list[Any]) -> None:
    """Raise what kept the letter out, if it is not in the log."""
    code = reply[0]
    if code == b"OK" or reply == [b"OUTOFSEQ", 1]:
        return  # out of sequence: a copy with other bytes, say another reason, was there first
    if code in (b"NOSTREAM", b"INCARNATION"):
        raise reply_errors.stream_gone(target.name, code)
    if code == b"FULL":
        raise reply_errors.stream_full(target.name, reply[1])
    if code == b"HISTORY":
        raise ConnectionFailed(f"The server of stream {target.name!r} is just failing over.")
    raise ServerRefused(f"Stream {target.name!r} does not take a dead letter: {code.decode()}.")


def _producer_id(source: StreamHandle, reader: str, offset: int) -> str:
    identity = f"{source.name}\0{source.incarnation}\0{offset}\0{reader}"
    return f"dl-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def _headers(
    source: StreamHandle, group: str | None, offset: int, reason: str, tries: int
) -> Headers:
    # Not every str can be UTF-8, and the cut may have left half a character at the end.
    clipped = reason.encode(errors="backslashreplace")[:REASON_BYTES_MAX]
    return {
        STREAM_HEADER: source.name.encode(),
        **({} if group is None else {GROUP_HEADER: group.encode()}),
        OFFSET_HEADER: b"%d" % offset,
        REASON_HEADER: clipped.decode(errors="ignore").encode(),
        TRIES_HEADER: b"%d" % tries,
    }
