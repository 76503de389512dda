"""The Lua scripts. They are constant package data, and clients call them by hash.

Each script is the file ``lua/<name>.lua``, or the parts in ``lua/<name>/`` joined in order. Its
header states its purpose, keys, arguments and replies, and why it must be atomic. Libraries, whose
names start with ``_``, are inserted before the scripts that use them, or in place of a line
``-- Library <name> is inserted here.`` If a script refuses a request, it never replies with an
error, but with a list whose first item is a fixed code. An error reply therefore means that the
server did not run the script, or stopped it.

``shared/step`` is far longer than the others. It settles records, claims records and scans the
index. All three change the same ordering keys, and every client must see them as one change. As
separate scripts, each would read and write that state again, and a consumer would need three round
trips. Work that can be split, such as taking back a dead consumer's records, is in
``shared/maintain``.

**The guard key.** While a cluster moves a slot, some of its keys are on one node and some on
another. A node checks the keys of each ``redis.call`` separately, so it could stop a script in the
middle, after its first writes. On a cluster, every script therefore declares one more key, which
never exists. If a slot is moving, a node refuses any command with a declared key that it does not
have. It thus refuses the script before the script starts. In a stable slot, the key has no effect.
The guarded text drops it in its first statement, because scripts count their keys.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache, lru_cache
from importlib.resources import files
from typing import NamedTuple

_DROP_GUARD = b"KEYS[#KEYS] = nil "
#: Number of guarded texts to remember: more than there are scripts.
_CACHED = 256
#: The line that a library replaces.
_INSERTED = re.compile(rb"^ *-- Library (\S+) is inserted here\.$", re.MULTILINE)


class GuardedText(NamedTuple):
    """The text of a script that expects a guard key, and the hash of this text."""

    text: bytes
    sha: str

    @classmethod
    @lru_cache(_CACHED)
    def of(cls, source: bytes) -> GuardedText:
        """Add the statement that drops the guard key, without changing any line number."""
        flags, newline, body = source.partition(b"\n")
        start = flags + newline if flags.startswith(b"#!") else b""
        text = start + _DROP_GUARD + (body if start else source)
        return cls(text, _sha(text))


class Script:
    """One script: its text, and the hash by which the server knows it."""

    def __init__(self, name: str, *libraries: str) -> None:
        self.name = name
        self.source = _read(name)
        if libraries:  # insert them after the first line, which may hold flags
            first, body = self.source.split(b"\n", 1)
            self.source = b"\n".join((first, *map(_read, libraries), body))
        self.sha = _sha(self.source)
        #: Whether EVALSHA_RO can run the script, on replicas and for users with read-only access.
        self.read_only = self.source.startswith(b"#!lua flags=no-writes")
        # fakeredis would parse the '#!lua' line as Lua, and lacks two of the server's libraries.
        self.plain_source = (
            self.source.split(b"\n", 1)[1] if self.source.startswith(b"#!") else self.source
        )
        if b"struct." in self.source or b"cmsgpack." in self.source:
            self.plain_source = _read("_fake") + self.plain_source

    @property
    def guarded(self) -> GuardedText:
        """The text to run on a cluster, and its hash. Its first statement drops the guard key."""
        return GuardedText.of(self.source)

    def __repr__(self) -> str:
        return f"Script({self.name!r})"


def _sha(source: bytes) -> str:
    return hashlib.sha1(source, usedforsecurity=False).hexdigest()


@cache  # most scripts share libraries
def _read(name: str) -> bytes:
    lua = files("meteor_py.redis").joinpath("lua")
    folder = lua.joinpath(*name.split("/"))
    if folder.is_dir():
        parts = sorted(folder.iterdir(), key=lambda part: part.name)
        text = b"\n".join(part.read_bytes() for part in parts)
    else:
        text = lua.joinpath(*f"{name}.lua".split("/")).read_bytes()
    return _INSERTED.sub(lambda found: _read(found[1].decode()), text)


_APPEND = "log/_append"
_INDEX = "log/_index"
_META = "log/_meta"
_PEER_MESSAGES = ("peers/_members", "peers/_messages")
_PEER_STATE = ("peers/_members", "peers/_clock", "peers/_messages", "peers/_group_state")
_PEER_WORK = ("peers/_members", "peers/_clock", "peers/_due_work")
_SETTINGS = "log/_settings"
_SHARED_ADMIN = "shared/_admin"
_SHARED_NEW = "shared/_new_group"
_SHARED_STATE = ("shared/_group", "shared/_keys")

APPLY_LIMITS = Script("log/apply_limits", _INDEX)
CONFIGURE_STREAM = Script("log/configure_stream", _INDEX, _SETTINGS)
CONVERT_SETTINGS = Script("log/convert_settings", _SETTINGS)
CREATE_STREAM = Script("log/create_stream", _SETTINGS)
DELETE_STREAM = Script("log/delete_stream", _META)
DESCRIBE_STREAM = Script("log/describe_stream")
MEASURE_RING = Script("log/measure_ring")
NEW_EPOCH = Script("log/new_epoch", _META)
OFFSET_AT_TIME = Script("log/offset_at_time")
PUBLISH = Script("log/publish", _INDEX, _APPEND)
REPAIR_LOG = Script("log/repair_log")
SPLIT_POINTS = Script("log/split_points")

DISCARD_STAGES = Script("transaction/discard_stages")
EXPIRE_FENCES = Script("transaction/expire_fences", _META)
MOVE_STAGED = Script("transaction/move_staged", _INDEX, _APPEND)
PLAN_COMMIT = Script("transaction/plan_commit", _META)

ACQUIRE_LEASE = Script("group/acquire_lease", _META)
CONFIRM_OFFSET = Script("group/confirm_offset", _META)
DELETE_GROUP = Script("group/delete_group", _META)
OPEN_GROUP = Script("group/open_group", _META)
RELEASE_LEASE = Script("group/release_lease")
RENEW_LEASE = Script("group/renew_lease", _META)
SEEK_GROUP = Script("group/seek_group", _META)

ADVANCE_ARCHIVED = Script("archive/advance_archived", _INDEX)
EXPIRE_HISTORY = Script("archive/expire_history", _META)
READ_STATE = Script("archive/read_state", _META)
REQUEST_FLUSH = Script("archive/request_flush", _META)
RESUME_STREAM = Script("archive/resume_stream", _SETTINGS)

SHARED_CONVERT = Script("shared/convert", _SHARED_NEW)
SHARED_DESCRIBE = Script("shared/describe")
SHARED_JOIN = Script("shared/join")
SHARED_MAINTAIN = Script("shared/maintain", *_SHARED_STATE)
SHARED_OPEN = Script("shared/open", _SHARED_NEW)
SHARED_PURGE = Script("shared/purge", _SHARED_ADMIN)
SHARED_RESUME = Script("shared/resume", _SHARED_ADMIN)
SHARED_STEP = Script("shared/step", *_SHARED_STATE)

PEERS_DELETE = Script("peers/delete", *_PEER_STATE)
PEERS_DESCRIBE = Script("peers/describe", *_PEER_WORK)
PEERS_GUARDED_WRITE = Script("peers/guarded_write", *_PEER_WORK)
PEERS_HEARTBEAT = Script("peers/heartbeat", *_PEER_WORK)
PEERS_JOIN = Script("peers/join", *_PEER_STATE)
PEERS_LEAVE = Script("peers/leave", *_PEER_STATE)
PEERS_OPEN = Script("peers/open")
PEERS_PROPOSE = Script("peers/propose", *_PEER_STATE)
PEERS_READ_POLLS = Script("peers/read_polls", *_PEER_STATE)
PEERS_SEND = Script("peers/send", *_PEER_MESSAGES)
PEERS_SET_PROPERTY = Script("peers/set_property", *_PEER_STATE)
PEERS_SETTLE = Script("peers/settle", *_PEER_MESSAGES)
PEERS_UPDATE_MEMBER = Script("peers/update_member", *_PEER_STATE)
PEERS_VOTE = Script("peers/vote", *_PEER_STATE)

#: All scripts. An administrator can load them for users who are allowed to run only EVALSHA.
ALL = tuple(script for script in list(globals().values()) if isinstance(script, Script))
