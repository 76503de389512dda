"""The Lua scripts: constant package data, called by hash.

Each lives in ``lua/<name>.lua``, or in the parts of ``lua/<name>/`` one after the other, with its
purpose, keys, arguments, answers and the reason for being atomic at its head; those of distributed
groups have ``lua/peers/books.lua`` before them. A script answers with a list whose first item is a
fixed code; an error reply therefore always comes from the server, before or instead of the script.

``shared_step`` is far longer than the others: settling, the death of others, claiming and looking
ahead change the same groups, and must be seen as one by everybody; as scripts of their own each
would read and write these groups again, and a consumer would pay for four round trips, not for one.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files


class Script:
    """One script: its text, and the hash that the server knows it by."""

    def __init__(self, name: str, library: str = "") -> None:
        self.name = name
        self.source = _read(name)
        if library:  # after the line that says how to run it
            flags, body = self.source.split(b"\n", 1)
            self.source = b"\n".join((flags, _read(library), body))
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        #: Runs by EVALSHA_RO too: on replicas, and for users who may only read.
        self.read_only = self.source.startswith(b"#!lua flags=no-writes")
        # fakeredis takes the '#!lua' line for Lua.
        self.plain_source = (
            self.source.split(b"\n", 1)[1] if self.source.startswith(b"#!") else self.source
        )

    def __repr__(self) -> str:
        return f"Script({self.name!r})"


def _read(name: str) -> bytes:
    lua = files("meteor_py").joinpath("lua")
    folder = lua.joinpath(name)
    if not folder.is_dir():
        return lua.joinpath(*f"{name}.lua".split("/")).read_bytes()
    parts = sorted(folder.iterdir(), key=lambda part: part.name)
    return b"\n".join(part.read_bytes() for part in parts)


ACQUIRE = Script("acquire")
ADVANCE_ARCHIVED = Script("advance_archived")
BORDERS = Script("borders")
CONFIGURE = Script("configure")
CONFIRM = Script("confirm")
CREATE_STREAM = Script("create_stream")
DELETE_GROUP = Script("delete_group")
DELETE_STREAM = Script("delete_stream")
DESCRIBE = Script("describe")
DISCARD = Script("discard")
EXPIRE = Script("expire")
FLUSH = Script("flush")
LOCATE = Script("locate")
MOVE = Script("move")
NEW_EPOCH = Script("new_epoch")
OPEN_GROUP = Script("open_group")
PEERS_OPEN = Script("peers_open")
PEERS_BEAT = Script("peers_beat", "peers/books")
PEERS_DELETE = Script("peers_delete", "peers/books")
PEERS_GUARD = Script("peers_guard", "peers/books")
PEERS_JOIN = Script("peers_join", "peers/books")
PEERS_LEAVE = Script("peers_leave", "peers/books")
PEERS_LOOK = Script("peers_look", "peers/books")
PEERS_POLLS = Script("peers_polls", "peers/books")
PEERS_PROPOSE = Script("peers_propose", "peers/books")
PEERS_SEND = Script("peers_send", "peers/books")
PEERS_SETTLE = Script("peers_settle", "peers/books")
PEERS_UPDATE = Script("peers_update", "peers/books")
PEERS_VOTE = Script("peers_vote", "peers/books")
PLAN = Script("plan")
PUBLISH = Script("publish")
RELEASE = Script("release")
SEEK_GROUP = Script("seek_group")
SHARED_JOIN = Script("shared_join")
SHARED_LOOK = Script("shared_look")
SHARED_OPEN = Script("shared_open")
SHARED_PURGE = Script("shared_purge")
SHARED_RESUME = Script("shared_resume")
SHARED_STEP = Script("shared_step")
TOUCH = Script("touch")

#: All of them, for a loader that may SCRIPT LOAD where the others may only EVALSHA.
ALL = (
    ACQUIRE,
    ADVANCE_ARCHIVED,
    BORDERS,
    CONFIGURE,
    CONFIRM,
    CREATE_STREAM,
    DELETE_GROUP,
    DELETE_STREAM,
    DESCRIBE,
    DISCARD,
    EXPIRE,
    FLUSH,
    LOCATE,
    MOVE,
    NEW_EPOCH,
    OPEN_GROUP,
    PEERS_OPEN,
    PEERS_BEAT,
    PEERS_DELETE,
    PEERS_GUARD,
    PEERS_JOIN,
    PEERS_LEAVE,
    PEERS_LOOK,
    PEERS_POLLS,
    PEERS_PROPOSE,
    PEERS_SEND,
    PEERS_SETTLE,
    PEERS_UPDATE,
    PEERS_VOTE,
    PLAN,
    PUBLISH,
    RELEASE,
    SEEK_GROUP,
    SHARED_JOIN,
    SHARED_LOOK,
    SHARED_OPEN,
    SHARED_PURGE,
    SHARED_RESUME,
    SHARED_STEP,
    TOUCH,
)
