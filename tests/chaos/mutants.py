"""Planted bugs, each of which the checker or another test must find.

A bug exists only in the process that plants it. The mutant alters the text of a script or a
function. Planting it fails if the text to replace is missing. Otherwise a mutant could silently
equal the original, and the checker would seem to miss a bug.
"""

from __future__ import annotations
import __future__

import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import redis

import meteor_py as meteor
from meteor_py.redis import scripts
from meteor_py.redis.connection import Connection, ScriptMissing
from tests.chaos.violation import ViolationKind


@dataclass(frozen=True)
class Mutant:
    """One planted bug: the change to the source text, and the violations that it causes."""

    what: str
    #: The name of a script, or of a function as "module:Class.method", inside meteor_py.
    where: str
    changes: tuple[tuple[str, str], ...]
    #: The checker must find at least one of these violations.
    shows_as: frozenset[ViolationKind] = frozenset()
    #: Settings for a run that soon reveals the bug.
    plan: dict[str, Any] = field(default_factory=dict)


#: Settings for a run with few workers and a store that is always available and never merged.
QUIET_STORE: dict[str, Any] = {
    "store": True,
    "compact_pause_s": 0.0,
    "groups": 2,
    "members": 1,
    "readers": 1,
}
#: Settings for a run in which publishers fill the ring while the active archiver is paused.
LATE_ARCHIVERS = QUIET_STORE | {
    "kinds": ("pause_archiving",),
    "pauses": (3.0,),
    "batch_pause_s": 0.02,
    "seconds": 3.0,
}
#: Settings for a run in which one archiver stops after an append, its successor stops before its
#: commit, and the first one continues, so that their segments overlap.
STOPPING_ARCHIVERS = QUIET_STORE | {
    "kinds": ("stop_at_commit",),
    "every_s": (0.02, 0.08),
    "lease_ttl_s": 0.4,
    "archivers": 4,
    "seconds": 5.0,
}

MUTANTS = {
    "unfenced-confirm": Mutant(
        "confirms are not checked against term and nonce",
        "CONFIRM_OFFSET",
        (("if g[2] ~= ARGV[3] or g[3] ~= ARGV[4] then", "if false then"),),
        frozenset({ViolationKind.STALE_CONFIRM, ViolationKind.WENT_BACK}),
        {
            # A session renews before it confirms, so after a pause it soon learns that it lost the
            # lease. If the application hangs, the session releases the lease and stops renewing, so
            # that a later confirm from the old term reaches the server.
            "kinds": ("pause_owner",),
            "hang": 0.1,
            "seconds": 4.0,
        },
    ),
    "greedy-trim": Mutant(
        "trimming removes one record too many from the ring",
        "PUBLISH",
        (("format('%d', floor)", "format('%d', floor + 1)"),),
        frozenset({ViolationKind.OVERTRIMMED}),
        {"small_ring": True, "kinds": ("cut",), "batch_pause_s": 0.02, "groups": 2, "seconds": 3.0},
    ),
    "ignored-lease": Mutant(
        "every member that asks gets the lease",
        "ACQUIRE_LEASE",
        (
            ("elseif left ~= -2 then", "elseif false then"),
            ("elseif g[4] and g[4] ~= '' and g[2] ~= ARGV[6] then", "elseif false then"),
        ),
        frozenset({ViolationKind.STALE_DELIVERY}),
        {"kinds": ("cut",), "groups": 4, "seconds": 3.0},
    ),
    "unchecked-sequence": Mutant(
        "a batch that is resent is written again",
        "PUBLISH",
        (("elseif seq ~= tonumber(p[2]) + 1 then", "elseif false then"),),
        frozenset({ViolationKind.DUPLICATED}),
        {
            "kinds": ("lose_reply", "cut", "stall"),
            "every_s": (0.1, 0.3),
            "groups": 2,
            "seconds": 6.0,
        },
    ),
    "skipping-take-over": Mutant(
        "a new term begins one record late",
        "ACQUIRE_LEASE",
        (
            (
                "local position = tonumber(g[5] or g[6])",
                "local position = math.min(tonumber(g[5] or g[6]) + 1, next_offset)",
            ),
        ),
        frozenset({ViolationKind.SKIPPED}),
        {"kinds": ("kill_member", "pause_owner"), "groups": 4, "seconds": 6.0},
    ),
    "false-refusal": Mutant(
        "a confirm without a reply is reported as having had no effect",
        "subscribe.offset_confirms:OffsetConfirms.doubt_sent",
        (("confirmation.in_doubt |= confirmation.sent", "pass"),),
        frozenset({ViolationKind.FALSE_REFUSAL}),
        {"kinds": ("lose_reply_and_lease",), "every_s": (0.05, 0.15), "seconds": 5.0},
    ),
    "unfenced-archiver": Mutant(
        "archiver commits are not checked against term and nonce",
        "ADVANCE_ARCHIVED",
        (("if g[1] ~= ARGV[3] or g[2] ~= ARGV[4] then", "if false then"),),
        frozenset({ViolationKind.STALE_COMMIT, ViolationKind.LOST, ViolationKind.DAMAGED}),
        STOPPING_ARCHIVERS | {"seconds": 3.0},
    ),
    "careless-publish": Mutant(
        "the ring is trimmed to its capacity, even if the records are not archived",
        "PUBLISH",
        (("floor = math.min(floor, archived)", "floor = floor"),),
        frozenset({ViolationKind.UNARCHIVED}),
        LATE_ARCHIVERS,
    ),
    "careless-archiver": Mutant(
        "every archiver commit trims the ring to its capacity",
        "ADVANCE_ARCHIVED",
        (("math.min(tonumber(m[4]) - tonumber(m[5]), to)", "tonumber(m[4]) - tonumber(m[5])"),),
        frozenset({ViolationKind.UNARCHIVED}),
        LATE_ARCHIVERS,
    ),
    "early-commit": Mutant(
        "archivers commit before they append",
        "archive.archive_term:ArchiveTerm._commit",
        (("    self._store.append(", "    self._advance(end) or self._store.append("),),
        frozenset({ViolationKind.LOST, ViolationKind.STALE_COMMIT}),
        QUIET_STORE | {"kinds": ("cut",), "die": 0.1, "seconds": 3.0},
    ),
    "termless-layout": Mutant(
        "all segments in a store count, whatever their term",
        "store.segment:SegmentTable.__init__",
        (("limit, term = floor, segment.term", "term = segment.term"),),
        frozenset({ViolationKind.UNEXPECTED, ViolationKind.WRONG_GAP}),
        STOPPING_ARCHIVERS,
    ),
}

#: Bugs that show while slots move. cluster_moves.py and spark_moves.py plant them.
CLUSTER_MUTANTS = {
    "unguarded-scripts": Mutant(
        "scripts do not declare the guard key",
        "redis.connection:Connection.script_call",
        (("if self.topology.guards_slots:", "if False:"),),
    ),
    "followed-ask": Mutant(
        "a command that a node refuses with ASK runs on the node that imports the slot",
        "redis.connection:Connection.call",
        (
            (
                "return self.read(timeout_s)",
                "return __import__('tests.chaos.mutants').chaos.mutants.follow_ask(self, command)",
            ),
        ),
    ),
    "renamed-writer": Mutant(
        "a writer that restarts has another name, so its repeated version is not recognised",
        "publish.transaction:commit",
        (
            (
                "names = [stage.name for stage in staged]",
                "names, writer = [stage.name for stage in staged], "
                "writer + str(__import__('os').getppid())",
            ),
        ),
    ),
}


class Text(Protocol):
    """A text that a mutant alters."""

    def get(self) -> str: ...

    def set(self, source: str) -> None: ...


class ScriptText:
    def __init__(self, name: str) -> None:
        self.script: scripts.Script = getattr(scripts, name)

    def get(self) -> str:
        return self.script.source.decode()

    def set(self, source: str) -> None:
        self.script.source = source.encode()
        self.script.sha = hashlib.sha1(self.script.source, usedforsecurity=False).hexdigest()
        first, _, rest = source.partition("\n")
        self.script.plain_source = (rest if first.startswith("#!") else source).encode()


class FunctionText:
    """A function whose code is replaced in place, so that all importers get the mutant."""

    def __init__(self, where: str) -> None:
        module, _, path = where.partition(":")
        found: Any = importlib.import_module(f"meteor_py.{module}")
        for name in path.split("."):
            found = getattr(found, name)
        assert isinstance(found, FunctionType), where
        self.function = found

    def get(self) -> str:
        planted: str | None = self.function.__dict__.get("planted")
        return planted or textwrap.dedent(inspect.getsource(self.function))

    def set(self, source: str) -> None:
        names = dict(self.function.__globals__)
        flags = __future__.annotations.compiler_flag
        exec(compile(source, "<mutant>", "exec", flags), names)
        self.function.__code__ = names[self.function.__name__].__code__
        self.function.__dict__["planted"] = source


def text_of(name: str) -> Text:
    """Return the text that a mutant alters."""
    where = (MUTANTS | CLUSTER_MUTANTS)[name].where
    return FunctionText(where) if ":" in where else ScriptText(where)


def plant(name: str) -> None:
    """Plant a bug in this process."""
    mutant = (MUTANTS | CLUSTER_MUTANTS)[name]
    text = text_of(name)
    source = text.get()
    for old, new in mutant.changes:
        if source.count(old) != 1:
            count = source.count(old)
            raise AssertionError(f"{name}: {mutant.where} contains {old!r} {count} times.")
        source = source.replace(old, new)
    text.set(source)


def follow_ask(connection: Connection, command: Sequence[Any]) -> Any:
    """Read the reply; if it is ASK, run the command on the node that imports the slot."""
    try:
        return connection.read()
    except meteor.ConnectionFailed as error:
        ask = error.__cause__
        if not isinstance(ask, redis.exceptions.AskError):
            raise
        with redis.Redis(host=ask.host, port=ask.port, protocol=2) as client:
            other = client.connection_pool.get_connection()
            other.send_packed_command(other.pack_commands([("ASKING",), command]))
            other.read_response()
            try:
                return other.read_response(disable_decoding=True)
            except redis.exceptions.NoScriptError as missing:
                raise ScriptMissing(str(missing)) from missing
            except (redis.exceptions.TryAgainError, redis.exceptions.AskError):
                raise error from None
            finally:
                other.disconnect()
