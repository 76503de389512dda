"""Transactions: several processes, any of which may die, write many frames exactly once.

Workers write frames into *stages*: keys that readers of the stream do not see. Several workers may
do the same work. Then one process, the committer, plans a commit: it names the stages that make up
one *version* from a *writer* (such as one batch of a query). Only a version's first plan counts.
The committer moves the planned frames into the log in order, a few megabytes at a time, and the
server counts the moved frames. If the same version is committed again, the committer finishes the
existing plan, or finds that the version is complete.

    worker      stage = Stage(stream, "q.17.0"); stage.write(columns); staged = stage.finish()
    committer   commit(stream, "q", 17, [staged, ...])

Stages that are not committed expire. A version older than the last one is refused, because its
records may differ from those already written under that number. A repeated commit of the last
version is refused only if the number of records differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from meteor_py.errors import (
    AccessDenied,
    MeteorError,
    NotReplicated,
    PublishError,
    ServerRefused,
)
from meteor_py.log.epochs import begin_epoch
from meteor_py.records.frame import Columns, encode
from meteor_py.records.ordering_index import packed
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import DISCARD_STAGES, EXPIRE_FENCES, MOVE_STAGED, PLAN_COMMIT
from meteor_py.runtime.backoff import pause_s
from meteor_py.store.state import IN_DOUBT

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle
    from meteor_py.redis.connection import Connection

#: Seconds until a stage expires: ``STAGE_S`` at first, ``PLANNED_S`` once it is part of a plan.
STAGE_S = 6 * 3600
PLANNED_S = 7 * 86_400
#: Maximum number of fences that one call to ``let_expire`` deletes.
_EXPIRE_MAX = 20
#: Bytes after which a script call stops moving frames, because the call blocks other clients.
MOVE_BYTES = 4 * 1024 * 1024
#: Bytes of frames to collect before they are sent to a stage.
_SEND_BYTES = 1024 * 1024
#: Seconds that a commit waits for the archiver when the stream is full, and for replicas.
_FULL_S = 30.0
_REPLICAS_S = 30.0
#: First and longest pause between attempts while the stream is full, in seconds.
_BACKOFF_S = (0.02, 0.5)
#: Maximum number of attempts to move frames while the server's replication id keeps changing.
_EPOCHS_MAX = 5
#: The record count of a version that an older release committed without storing the count.
_UNCOUNTED = -1


class VersionPassed(PublishError):
    """The commit of a later version from this writer, ``known``, has at least begun."""

    def __init__(self, stream: str, writer: str, version: int, known: int) -> None:
        super().__init__(
            f"Version {version} from writer {writer} was not written to stream {stream!r}: the "
            f"stream already has version {known}.",
            stream=stream,
        )
        self.writer = writer
        self.version = version
        self.known = known


class VersionDiffers(PublishError):
    """The stream has this version, but with ``known`` records instead of ``records``."""

    def __init__(self, stream: str, writer: str, version: int, known: int, records: int) -> None:
        super().__init__(
            f"Version {version} from writer {writer} was not written to stream {stream!r}: the "
            f"stream already has it, with {known} records instead of {records}.",
            stream=stream,
        )
        self.writer = writer
        self.version = version
        self.known = known
        self.records = records


class Staged(NamedTuple):
    """A completely written stage."""

    name: str
    frames: int
    records: int


class StageOwner(NamedTuple):
    """A stage's writer and version, and the current run of the writing program.

    If the program restarts with the same writer, its ``run`` changes.
    """

    writer: str
    version: int
    run: str


def _call(work: Callable[[], None]) -> None:
    work()


class Stage:
    """One worker's frames, waiting for a commit. Not thread-safe.

    Args:
        name: A unique name.
        retry: Calls the function that sends frames, and may call it again if it fails. Sending the
            same frames twice is harmless.
        owner: The owner of the stage, so that other processes can delete it if this one dies.
    """

    def __init__(
        self,
        stream: StreamHandle,
        name: str,
        retry: Callable[[Callable[[], None]], None] = _call,
        owner: StageOwner | None = None,
    ) -> None:
        self._stream = stream
        self._retry = retry
        self._owner = owner
        self._failed_sends = 0
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
        crc = crc32(payload) if config.checksum else ""
        if self._ordering is not None:
            self._fields += [f"{frame}g", packed(self._ordering.index(columns))]
        data = bytes(payload)
        self._fields += [f"{frame}n", len(columns), f"{frame}f", kind]
        self._fields += [f"{frame}p", data, f"{frame}c", crc]
        self._frames += 1
        self._records += len(columns)
        self._bytes += len(data)
        if self._bytes >= _SEND_BYTES:
            self._send()

    def finish(self) -> Staged:
        """Send the remaining frames, and return the complete stage.

        Raises:
            PublishError: The server failed in the meantime and lost frames that were already sent.
        """
        self._send()
        if self._failed_sends and self._frames:
            self._retry(self._check_whole)
        return Staged(self._name, self._frames, self._records)

    def abandon(self) -> None:
        """Delete a stage that will not be committed, instead of waiting until it expires."""
        try:
            commands: list[tuple[Any, ...]] = [("UNLINK", self._key)]
            if self._owner is not None:
                index = keys.stages(self._stream.name, self._owner.writer)
                commands.append(("HDEL", index, self._name))
            self._stream.connector.pipeline(commands)
        except MeteorError:
            pass  # the error that made the caller abandon the stage matters more

    def _send(self) -> None:
        if self._fields:
            # Use a hash instead of a list, so that a retry changes nothing. Set the expiry in the
            # same MULTI: a worker that died in between would leave frames that never expire.
            hset = ("HSET", self._key, *self._fields)
            pexpire = ("PEXPIRE", self._key, STAGE_S * 1000)
            commands = [("MULTI",), hset, pexpire, *self._index_commands(), ("EXEC",)]
            self._retry(lambda: self._send_once(commands))
        self._fields, self._bytes = [], 0

    def _index_commands(self) -> list[tuple[Any, ...]]:
        if self._owner is None:
            return []
        writer, version, run = self._owner
        index = keys.stages(self._stream.name, writer)
        return [
            ("HSET", index, self._name, f"{version}:{run}"),
            ("PEXPIRE", index, STAGE_S * 1000),
        ]

    def _send_once(self, commands: list[tuple[Any, ...]]) -> None:
        try:
            self._stream.connector.pipeline(commands)
        except MeteorError:
            self._failed_sends += 1
            raise

    def _check_whole(self) -> None:
        """Raise if frames are missing. The commit would notice too late to write them again."""
        found = self._stream.connector.call("HLEN", self._key)
        if found != self._frames * (4 if self._ordering is None else 5):
            raise _lost(self._stream, f"stage {self._name!r}", "Write them again.")


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
    """Append the stages' frames to the log, in order, unless the log has this version already.

    Args:
        begun: Whether the stages are incomplete because a worker found the version already written.
            The server must then have the version, or a plan for it, which this call finishes.
        records: The number of records in this version, to compare with the number in the log.
            None skips the comparison.
        replicas: Number of replicas that must have the whole version.

    Returns:
        False if the log already had the whole version, else True.

    Raises:
        VersionPassed: A later version was committed, or its commit has begun.
        VersionDiffers: This version was committed with a different number of records.
        PublishError: Staged frames are gone, or the server lost the ``begun`` version.
        NotReplicated: The version is in the log, but too few replicas confirmed it in time.
        StreamFull: The stream is full, and its archiver did not make room in time.
        StreamNotFound: The stream was deleted.
        LogTruncated: The stream was deleted and recreated.
    """
    staged = [stage for stage in stages if stage.frames]
    names = [stage.name for stage in staged]
    moved = False
    while True:
        reply = _plan(stream, writer, version, staged, begun, replicas)
        match reply[0]:
            case b"DONE":
                known = int(reply[1])
                break
            case b"PASSED":
                discard(stream, writer, names)
                raise VersionPassed(stream.name, writer, version, int(reply[1]))
            case b"UNFINISHED":  # finish the plan of an earlier version before planning this one
                _carry_out(stream, writer, *map(int, reply[1:]))
            case b"OK":
                moved = True
                _carry_out(stream, writer, version, *map(int, reply[1:]))
            case b"UNKNOWN":
                raise _version_lost(stream, writer, version)
            case b"LOST" | b"INVALID":
                raise _lost(stream, f"stage {reply[1].decode()!r}", "Write them again.")
            case _:
                raise reply_errors.stream_gone(stream.name, reply[0])
    # Also discard the stages that other attempts and dead processes left behind.
    discard(stream, writer, {*names, *_stale(stream, writer, version)})
    if records is not None and known not in (records, _UNCOUNTED):
        raise VersionDiffers(stream.name, writer, version, known, records)
    return moved


def is_done(stream: StreamHandle, writer: str, version: int, records: int | None = None) -> bool:
    """Return whether a version is completely in the log.

    Args:
        records: The number of records in this version, to compare with the number in the log.
            None skips the comparison.

    Raises:
        VersionPassed: A later version was committed, or its commit has begun.
        VersionDiffers: The version is in the log with a different number of records.
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
    """The last version whose commit has begun (-1: none), and whether all of it is in the log."""

    version: int
    whole: bool
    records: int


def _last(stream: StreamHandle, writer: str) -> _Last:
    found = stream.connector.call("HGET", keys.fences(stream.name), writer)
    if found is None:
        return _Last(-1, False, _UNCOUNTED)
    version, done, total, *records = map(int, found.split(b":"))
    return _Last(version, done == total, records[0] if records else _UNCOUNTED)


def discard(stream: StreamHandle, writer: str, names: Iterable[str]) -> None:
    """Delete stages that will not be committed. Keep planned ones: the plan must be finished."""
    stages = list(names)
    if stages:
        script_keys = [keys.plan(stream.name, writer), keys.stages(stream.name, writer)]
        script_keys += [keys.stage(stream.name, name) for name in stages]
        stream.connector.run(DISCARD_STAGES, script_keys, stages)


def discard_stale(stream: StreamHandle, owner: StageOwner) -> None:
    """Delete the stages that earlier runs of a writer left behind, up to the owner's version.

    If a process from an earlier run is still alive, it can no longer commit: its frames are gone.
    """
    discard(stream, owner.writer, _stale(stream, owner.writer, owner.version, owner.run))


def _stale(stream: StreamHandle, writer: str, version: int, run: str | None = None) -> list[str]:
    """Return a writer's stages for versions up to ``version``, except those from ``run``."""
    found = stream.connector.call("HGETALL", keys.stages(stream.name, writer))
    names: list[str] = []
    for name, value in zip(found[::2], found[1::2], strict=True):
        for_version, _, of_run = value.decode().partition(":")
        if int(for_version) <= version and of_run != run:
            names.append(name.decode())
    return names


def abandon(stream: StreamHandle, writer: str, names: Iterable[str]) -> None:
    """Delete the fence, the plan and the stages of a permanently failed writer.

    Frames that were moved into the log stay there. The writer must have no running committer.
    """
    plan = keys.plan(stream.name, writer)
    planned = [name for name, _, _ in _spans(stream.connector.call("LRANGE", plan, 0, -1))]
    index = keys.stages(stream.name, writer)
    listed = [name.decode() for name in stream.connector.call("HGETALL", index)[::2]]
    stages = [keys.stage(stream.name, name) for name in {*names, *planned, *listed}]
    hdel = ("HDEL", keys.fences(stream.name), writer)
    stream.connector.pipeline([("MULTI",), ("UNLINK", plan, index, *stages), hdel, ("EXEC",)])
    forget(stream, writer)  # also deletes the expiry time


def forget(stream: StreamHandle, writer: str) -> None:
    """Delete the fence of a writer that will not write again, and the fence's expiry time."""
    stream.connector.call("HDEL", keys.fences(stream.name), writer)
    with suppress(AccessDenied):  # an ACL that denies this has also denied setting an expiry time
        stream.connector.call("ZREM", keys.fence_times(stream.name), writer)


def let_expire(stream: StreamHandle, writer: str, lifetime_s: float) -> None:
    """Let a writer's fence expire ``lifetime_s`` seconds from now.

    Call this before each commit, so that every fence has an expiry time. A later call replaces that
    time. Each call also deletes some expired fences.
    """
    name = stream.name
    script_keys = [keys.meta(name), keys.fences(name), keys.fence_times(name)]
    args = [stream.incarnation, writer, int(lifetime_s * 1000), _EXPIRE_MAX]
    reply = stream.connector.run(EXPIRE_FENCES, script_keys, args)
    if reply[0] != b"OK":
        raise reply_errors.stream_gone(name, reply[0])


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
    args: list[Any] = [stream.incarnation, writer, version, PLANNED_S * 1000]
    args += [0 if begun else 1, sum(stage.records for stage in stages)]
    for stage in stages:
        args += [stage.name, stage.frames]

    def plan(connection: Connection) -> list[Any]:
        reply: list[Any] = connection.run(PLAN_COMMIT, script_keys, args)
        if replicas and reply[0] == b"DONE":
            # WAIT must use this connection: it covers only the connection's own writes.
            _wait(connection, name, replicas)
        return reply

    return stream.use(plan)


def _wait(connection: Connection, stream: str, replicas: int) -> None:
    timeout_s = _REPLICAS_S + connection.timeout_s
    seen = int(connection.call("WAIT", replicas, int(_REPLICAS_S * 1000), timeout_s=timeout_s))
    if seen < replicas:
        last = int(connection.call("HGET", keys.meta(stream), "next") or 0) - 1
        why = (
            f"and those before it are in the log, but only {seen} of {replicas} replicas confirmed "
            "them in time. Check the replicas."
        )
        raise NotReplicated(why, stream=stream, offset=last)


def _carry_out(stream: StreamHandle, writer: str, version: int, done: int, total: int) -> None:
    """Move a plan's remaining frames into the log. Other committers may do so concurrently."""
    spans = _spans(stream.connector.call("LRANGE", keys.plan(stream.name, writer), 0, -1))
    full_until: float | None = None
    tries = 0
    while done < total:
        found = next(((name, at, size) for name, at, size in spans if at <= done < at + size), None)
        if found is None:
            if _last(stream, writer)[:2] >= (version, True):
                return  # another committer has finished, and deleted the plan
            stream.end()  # raises if the stream was deleted
            remedy = _stuck(stream, writer, version, done, total)
            raise _lost(stream, f"writer {writer!r}", remedy)
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
                return  # another committer finished, or the plan was lost: the caller plans again
            case b"LOST" | b"INVALID":
                remedy = _stuck(stream, writer, version, done, total)
                raise _lost(stream, f"stage {name!r}", remedy)
            case b"EXHAUSTED":
                raise ServerRefused(
                    f"Stream {stream.name!r} has used up its offsets. Write to a new stream."
                )
            case _:
                raise reply_errors.stream_gone(stream.name, reply[0])


def _move(
    stream: StreamHandle, writer: str, version: int, done: int, name: str, frames: tuple[int, int]
) -> list[Any]:
    script_keys = [*stream.keys, keys.fences(stream.name), keys.plan(stream.name, writer)]
    script_keys += [keys.stage(stream.name, name), *stream.index_keys]
    place = [writer, version, done, *frames, MOVE_BYTES]

    def move(connection: Connection) -> list[Any]:
        for _ in range(_EPOCHS_MAX):
            args = [stream.incarnation, connection.history, *place]
            reply: list[Any] = connection.run(MOVE_STAGED, script_keys, args)
            if reply[0] != b"HISTORY":
                return reply
            begin_epoch(connection, stream.name, stream.incarnation, reply[1].decode())
        return reply

    return stream.use(move)


def _spans(plan: list[bytes]) -> list[tuple[str, int, int]]:
    """Return each stage in a plan as (name, number of frames before it, number of frames in it)."""
    spans: list[tuple[str, int, int]] = []
    at = 0
    for entry in plan:
        name, _, size = entry.decode().rpartition(":")
        spans.append((name, at, int(size)))
        at += int(size)
    return spans


def _version_lost(stream: StreamHandle, writer: str, version: int) -> PublishError:
    return PublishError(
        f"Version {version} from writer {writer} was in stream {stream.name!r}, but the server "
        "lost it in a failover to a lagging replica. This commit wrote nothing. Write the whole "
        "version again.",
        stream=stream.name,
    )


def _lost(stream: StreamHandle, what: str, remedy: str) -> PublishError:
    return PublishError(
        f"Frames that were staged for stream {stream.name!r} are gone ({what}). They expired, a "
        f"newer run of their writer deleted them, or the server lost them. {remedy}",
        stream=stream.name,
    )


def _stuck(stream: StreamHandle, writer: str, version: int, done: int, total: int) -> str:
    key = keys.fences(stream.name)
    if total == IN_DOUBT:
        found = (
            f"The stream was resumed, and version {version} may or may not be in the log. Compare "
            "the log with your data. "
        )
    else:
        found = (
            f"Only {done} of the {total} frames in version {version} are in the log. The others "
            f"cannot be recovered. To continue without them, run HSET {key} {writer} "
            f"{version}:{total}:{total}. "
        )
    return (
        f"{found}To write the whole version again, which duplicates its frames in the log, run "
        f"HDEL {key} {writer}."
    )
