"""Transactions: several processes, each of which may die, write many frames exactly once.

Workers put their frames into *stages*, keys beside the stream that readers do not see; any number
of them may do the same work. Then one process, the committer, says which stages make up a *version*
of a *writer* (a batch of a query). The first plan that is made for a version counts. Its frames are
moved into the log in order, some megabytes at a time, and each is counted as it is moved. If a
committer is asked for a version again, it finishes the existing plan, or learns that it is done.

    worker      Stage(stream, "q.17.0").write(frames)  ->  its name and number of frames
    committer   commit(stream, "q", 17, [those])

Stages that are not committed expire. Versions never go back: one below the last is refused, because
its records may differ from those that were written under that number. The last one is known by its
number of records: with another number, it is not the same.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meteor_py.errors import MeteorError, NotReplicated, PublishError, ServerRefused
from meteor_py.log.epochs import begin_epoch
from meteor_py.records.frame import Columns, encode
from meteor_py.records.ordering_index import packed
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import DISCARD_STAGES, MOVE_STAGED, PLAN_COMMIT
from meteor_py.runtime.backoff import pause_s

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle
    from meteor_py.redis.connection import Connection

#: Seconds that a stage lives before it is part of a plan, and from then on.
STAGE_S = 6 * 3600
PLANNED_S = 7 * 86_400
#: Bytes that one call moves at least, if there are so many: others wait as long.
MOVE_BYTES = 4 * 1024 * 1024
#: Bytes that are sent to a stage at a time.
_SEND_BYTES = 1024 * 1024
#: Seconds that a commit waits for the archiver of a full stream, and for replicas.
_FULL_S = 30.0
_REPLICAS_S = 30.0
_BACKOFF_S = (0.02, 0.5)


class VersionPassed(PublishError):
    """The stream has a later version of this writer, ``known``, so nothing was written."""

    def __init__(self, stream: str, writer: str, version: int, known: int) -> None:
        super().__init__(
            f"Version {version} of the writer {writer} was not written to stream {stream!r}, which "
            f"has version {known}.",
            stream=stream,
        )
        self.writer = writer
        self.version = version
        self.known = known


class VersionDiffers(PublishError):
    """The stream has this version with ``known`` records, not ``records``; nothing was added."""

    def __init__(self, stream: str, writer: str, version: int, known: int, records: int) -> None:
        super().__init__(
            f"Version {version} of the writer {writer} was not written to stream {stream!r}, which "
            f"has it with {known} records, not {records}.",
            stream=stream,
        )
        self.writer = writer
        self.version = version
        self.known = known
        self.records = records


class Staged(NamedTuple):
    """A stage that was written."""

    name: str
    frames: int
    records: int


class Stage:
    """Frames that wait for a commit. ``name`` must be unique; for one thread."""

    def __init__(self, stream: StreamHandle, name: str) -> None:
        self._stream = stream
        self._name = name
        self._key = keys.stage(stream.name, name)
        self._ordering = stream.config.ordering_rule
        self._frames = 0
        self._records = 0
        self._fields: list[Any] = []
        self._bytes = 0

    def write(self, columns: Columns) -> None:
        """Add a frame."""
        config = self._stream.config
        kind, payload = encode(columns, config.compression)
        frame = self._frames
        crc = zlib.crc32(payload) if config.checksum else ""
        if self._ordering is not None:
            self._fields += [f"{frame}g", packed(self._ordering.index(columns))]
        data = bytes(payload)  # of which the stage needs a copy anyway
        self._fields += [f"{frame}n", len(columns), f"{frame}f", kind]
        self._fields += [f"{frame}p", data, f"{frame}c", crc]
        self._frames += 1
        self._records += len(columns)
        self._bytes += len(data)
        if self._bytes >= _SEND_BYTES:
            self._send()

    def finish(self) -> Staged:
        """Have it all on the server."""
        self._send()
        return Staged(self._name, self._frames, self._records)

    def abandon(self) -> None:
        """Delete what was sent, because it will not be committed; else it expires."""
        try:
            self._stream.connector.call("UNLINK", self._key)
        except MeteorError:
            pass  # there is a failure under way that says more

    def _send(self) -> None:
        if self._fields:
            # A hash, and not a list: sending it again changes nothing. Together, or a worker that
            # dies in between leaves frames that never expire.
            hset = ("HSET", self._key, *self._fields)
            pexpire = ("PEXPIRE", self._key, STAGE_S * 1000)
            self._stream.connector.pipeline([("MULTI",), hset, pexpire, ("EXEC",)])
        self._fields, self._bytes = [], 0


def commit(
    stream: StreamHandle,
    writer: str,
    version: int,
    stages: Sequence[Staged],
    *,
    begun: bool = False,
    records: int | None = None,
    replicas: int = 0,
) -> bool:
    """Put the frames of stages into the log, in order, if that was not done for this version.

    Args:
        begun: The stages are not all there is to write, as a worker found that it was done: so it
            has to be, or to be finished by the plan there is.
        records: How many this version has, to compare with what was written; None: do not.
        replicas: How many must have it all.

    Returns:
        Whether anything was left to do.

    Raises:
        VersionPassed: A later version was committed.
        VersionDiffers: This one was, now or before, with another number of records.
        PublishError: Staged frames are gone, or that it was ``begun`` is.
        NotReplicated: It is in the log, and not on so many replicas in time.
        StreamFull: The stream waits for its archiver.
        LogTruncated: The stream was created anew since it was opened.
        StreamNotFound: It was deleted.
    """
    mine = [stage for stage in stages if stage.frames]
    names = [stage.name for stage in mine]
    moved = False
    while True:
        reply = _plan(stream, writer, version, mine, begun, replicas)
        match reply[0]:
            case b"DONE":
                known = int(reply[1])
                break
            case b"PASSED":
                discard(stream, writer, names)
                raise VersionPassed(stream.name, writer, version, int(reply[1]))
            case b"UNFINISHED":  # by a committer that died, and was not asked again
                _carry_out(stream, writer, *map(int, reply[1:]))
            case b"OK":
                moved = True
                _carry_out(stream, writer, version, *map(int, reply[1:]))
            case b"UNKNOWN":
                raise _version_lost(stream, writer, version)
            case b"LOST":
                raise _lost(stream, reply[1].decode(), "Write them again.")
            case _:
                raise reply_errors.stream_gone(stream.name, reply[0])
    discard(stream, writer, names)  # of another try; ours are empty
    if records is not None and known not in (records, _UNCOUNTED):
        raise VersionDiffers(stream.name, writer, version, known, records)
    return moved


def is_done(stream: StreamHandle, writer: str, version: int, records: int | None = None) -> bool:
    """Return whether a version is in the log; False also if that is not known yet.

    Args:
        records: How many it has, to compare with what was written; None: do not.

    Raises:
        VersionPassed: A later version is, or has begun to be.
        VersionDiffers: It is, with another number of records.
    """
    last = _last(stream, writer)
    if last.version > version:
        raise VersionPassed(stream.name, writer, version, last.version)
    if last.version < version or not last.whole:
        return False
    if records is not None and last.records not in (records, _UNCOUNTED):
        raise VersionDiffers(stream.name, writer, version, last.records, records)
    return True


class _Last(NamedTuple):
    """The last version that was begun, -1 if none was, and whether it is in the log."""

    version: int
    whole: bool
    records: int


#: The records of a version that was written by a release that did not count them.
_UNCOUNTED = -1


def _last(stream: StreamHandle, writer: str) -> _Last:
    found = stream.connector.call("HGET", keys.fences(stream.name), writer)
    if found is None:
        return _Last(-1, False, _UNCOUNTED)
    version, done, total, *records = map(int, found.split(b":"))
    return _Last(version, done == total, records[0] if records else _UNCOUNTED)


def discard(stream: StreamHandle, writer: str, names: Iterable[str]) -> None:
    """Delete stages that will not be committed; those in a plan stay, for it must be finished."""
    gone = list(names)
    if gone:
        script_keys = [keys.stage(stream.name, name) for name in gone]
        stream.connector.run(DISCARD_STAGES, [keys.plan(stream.name, writer), *script_keys], gone)


def abandon(stream: StreamHandle, writer: str, names: Iterable[str]) -> None:
    """Forget a writer that failed and will not come again, with its plan and these stages, too.

    What it has moved into the log stays there. No committer may be running for it.
    """
    plan = keys.plan(stream.name, writer)
    planned = [name for name, _, _ in _spans(stream.connector.call("LRANGE", plan, 0, -1))]
    gone = [keys.stage(stream.name, name) for name in {*names, *planned}]
    hdel = ("HDEL", keys.fences(stream.name), writer)
    stream.connector.pipeline([("MULTI",), ("UNLINK", plan, *gone), hdel, ("EXEC",)])


def forget(stream: StreamHandle, writer: str) -> None:
    """Forget a writer that is done and will not come again."""
    stream.connector.call("HDEL", keys.fences(stream.name), writer)


def _plan(
    stream: StreamHandle,
    writer: str,
    version: int,
    stages: Sequence[Staged],
    begun: bool = False,
    replicas: int = 0,
) -> list[Any]:
    name = stream.name
    script_keys = [keys.meta(name), keys.fences(name), keys.plan(name, writer)]
    script_keys += [keys.stage(name, stage.name) for stage in stages]
    per_frame = 4 if stream.config.ordering_key is None else 5
    args: list[Any] = [stream.incarnation, writer, version, PLANNED_S * 1000, per_frame]
    args += [0 if begun else 1, sum(stage.records for stage in stages)]
    for stage in stages:
        args += [stage.name, stage.frames]

    def plan(connection: Connection) -> list[Any]:
        reply: list[Any] = connection.run(PLAN_COMMIT, script_keys, args)
        if replicas and reply[0] == b"DONE":
            # On this connection, because WAIT is about what the connection has written.
            _wait(connection, name, replicas)
        return reply

    return stream.connector.use(plan)


def _wait(connection: Connection, stream: str, replicas: int) -> None:
    timeout_s = _REPLICAS_S + connection.timeout_s
    seen = int(connection.call("WAIT", replicas, int(_REPLICAS_S * 1000), timeout_s=timeout_s))
    if seen < replicas:
        last = int(connection.call("HGET", keys.meta(stream), "next") or 0) - 1
        why = (
            f"and those before it are in the log, but {seen} of {replicas} replicas confirmed that "
            "in time; check the replicas."
        )
        raise NotReplicated(why, stream=stream, offset=last)


def _carry_out(stream: StreamHandle, writer: str, version: int, done: int, total: int) -> None:
    """Move what is left of a plan; other committers may be doing the same."""
    plan = stream.connector.call("LRANGE", keys.plan(stream.name, writer), 0, -1)
    spans = _spans(plan)
    full_until: float | None = None
    tries = 0
    while done < total:
        found = next(((name, at, size) for name, at, size in spans if at <= done < at + size), None)
        if found is None:
            if _last(stream, writer)[:2] >= (version, True):
                return  # another committer has done it, and deleted the plan
            stream.end()  # raises if it was deleted, too
            raise _lost(stream, writer, _stuck(writer, version, done, total))
        name, at, size = found
        reply = _move(stream, writer, version, done, name, (done - at, size))
        match reply[0]:
            case b"OK" | b"AT":
                done, full_until, tries = int(reply[1]), None, 0
            case b"FULL":
                full_until = full_until or time.monotonic() + _FULL_S
                if time.monotonic() >= full_until:
                    raise reply_errors.stream_full(stream.name, int(reply[1]))
                tries += 1
                time.sleep(pause_s(tries, *_BACKOFF_S))
            case b"FENCED":
                return  # another one did it; or a fail-over has lost the plan: the next one tells
            case b"LOST":
                raise _lost(stream, name, _stuck(writer, version, done, total))
            case b"EXHAUSTED":
                raise ServerRefused(f"Stream {stream.name!r} has used up its offsets.")
            case _:
                raise reply_errors.stream_gone(stream.name, reply[0])


def _move(
    stream: StreamHandle, writer: str, version: int, done: int, name: str, frames: tuple[int, int]
) -> list[Any]:
    names = stream.name
    script_keys = [keys.log(names), keys.meta(names), keys.fences(names)]
    script_keys += [keys.plan(names, writer), keys.stage(names, name)]
    if stream.config.ordering_key is not None:
        script_keys.append(keys.index(names))

    def move(connection: Connection) -> list[Any]:
        for _ in range(_HISTORIES):
            args = [
                stream.incarnation,
                connection.history,
                writer,
                version,
                done,
                *frames,
                MOVE_BYTES,
            ]
            reply: list[Any] = connection.run(MOVE_STAGED, script_keys, args)
            if reply[0] != b"HISTORY":
                return reply
            begin_epoch(connection, names, stream.incarnation, reply[1].decode())
        return reply

    return stream.connector.use(move)


#: Times that the history of a server may change while one call is tried.
_HISTORIES = 5


def _spans(plan: list[bytes]) -> list[tuple[str, int, int]]:
    """The stages of a plan: name, frames before it, and frames in it."""
    spans: list[tuple[str, int, int]] = []
    at = 0
    for entry in plan:
        name, _, size = entry.decode().rpartition(":")
        spans.append((name, at, int(size)))
        at += int(size)
    return spans


def _version_lost(stream: StreamHandle, writer: str, version: int) -> PublishError:
    return PublishError(
        f"Version {version} of the writer {writer} was in stream {stream.name!r}, and the server "
        "has lost it, by a fail-over to a replica that lagged. Nothing was written; write all of "
        "it again.",
        stream=stream.name,
    )


def _lost(stream: StreamHandle, what: str, remedy: str) -> PublishError:
    return PublishError(
        f"Frames that were staged for stream {stream.name!r} are gone ({what}): they have expired, "
        f"or the server has lost them. {remedy}",
        stream=stream.name,
    )


def _stuck(writer: str, version: int, done: int, total: int) -> str:
    return (
        f"Of version {version}, {done} of {total} frames are in the log, and the others cannot be "
        f"told from new ones: look what is there, then delete the field {writer} of the key fences "
        "of the stream to write all of it again."
    )
