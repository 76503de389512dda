"""Every key in Redis, and what it holds. This docstring is the data model.

All keys of a stream share the hash tag ``{stream}``: one slot, so a script may touch several of
them, and the whole runs on a cluster.

=============================  ======  ==========================================================
key                            type    what, who writes it, who deletes it
=============================  ======  ==========================================================
``meteor:{s}:log``             stream  The ring. One entry is one frame of n records, with the ID
                                       ``<last offset>-<n>`` and the fields ``t`` (append time, ms),
                                       one named after the frame's format, and with
                                       ``checksum=True`` ``crc``. Written and trimmed by
                                       ``publish``, trimmed by ``configure`` and
                                       ``advance_archived``.
``meteor:{s}:meta``            hash    ``version`` of this layout; ``incarnation``, a random id of
                                       this stream's life; ``next``, the offset of the next record;
                                       ``appended``, the last append time in ms; ``epoch``,
                                       ``history`` and ``epochs`` (see history.py); settings:
                                       ``capacity``, ``compression``, ``checksum``, ``codec``, and
                                       ``group_by`` if it has groups.
                                       Only with a store: its id ``store`` (``store_before``: until
                                       the stream was resumed) and address ``store_uri``;
                                       ``archived``: all below is in it; ``expired``: all below was
                                       deleted from it again;
                                       ``max_unarchived``, a setting; ``flush``: up to where the
                                       archiver is asked not to wait. Written by ``create_stream``,
                                       ``configure``, ``publish``, ``new_epoch``,
                                       ``advance_archived``, ``expire``, ``flush``.
``meteor:{s}:producer:<id>``   hash    One publisher: ``epoch``, ``last`` sequence, and in the
                                       fields 0 to 7 the batches of the last eight sequences as
                                       ``sequence:first offset:n:fingerprint``. Written by
                                       ``publish``; expires after a day without one.
``meteor:{s}:group:<g>``       hash    One group: ``incarnation`` of the stream it belongs to;
                                       ``start``, where it began; ``confirmed``, the next offset to
                                       process, once there is one; ``term``, ``nonce`` and ``owner``
                                       of whoever had the lease last (``owner`` is empty after it
                                       was given up, ``nonce`` too unless it may be taken up again);
                                       ``floating``, see ``acquire``; ``sought``, the last request
                                       of ``seek_group``. Written by ``open_group``, ``acquire``,
                                       ``touch``, ``release``, ``confirm``, ``seek_group``; deleted
                                       by ``delete_group``. The archivers are a group, too, of
                                       a name that no other can have: ``.archiver``.
``meteor:{s}:lease:<g>``       string  Present while a member holds the lease: its name, the term,
                                       and how often it was renewed.
                                       Set by ``acquire`` and ``touch``; expires, or is deleted by
                                       ``release``, ``seek_group``, ``delete_group``.
``meteor:{s}:groups``          set     The names of the groups. Written with ``group:<g>``.
``meteor:{s}:events``          stream  The last thousand or so changes of groups, ``event`` being
                                       assigned, released, sought or deleted. Wakes who waits for a
                                       lease. Written and trimmed by the scripts that make them.
``meteor:{s}:stage:<id>``      hash    Frames that wait for a commit (see transaction.py): for frame
                                       i the fields ``in`` records, ``if`` format, ``ip`` payload,
                                       ``ic`` crc, and ``ig`` its entry of the index if the stream
                                       has one (``grouping.packed``).
                                       Written by a worker; emptied by ``move``,
                                       deleted by ``discard``; else expires after six hours, or a
                                       week if it is part of a plan.
``meteor:{s}:plan:<writer>``   list    The stages of the version that is being moved into the log,
                                       as ``id:frames``. Written by ``plan``, deleted by ``move``;
                                       else expires as its stages do.
``meteor:{s}:fences``          hash    For each writer its last version, how many frames of that are
                                       in the log, how many it has, and how many records. Written
                                       by ``plan`` and ``move``; kept, so that nothing is written
                                       twice, but for writers that will not come again.
``meteor:{s}:index``           stream  Only with an ordering key: for each frame of the log an entry
                                       of the same ID, with the groups of its records (grouping.py)
                                       and no payload. Written and trimmed with the log, by
                                       ``publish``, ``move``, ``configure`` and
                                       ``advance_archived``.
``meteor:{s}:shared``          set     The names of the shared groups. Written by ``shared_open``;
                                       a name leaves with ``SharedGroup.delete``.
``meteor:{s}:shared:<g>:...``          The books of one shared group, in the parts below. Written by
                                       ``shared_step`` unless it says otherwise; deleted, all at
                                       once, by ``SharedGroup.delete``.
``...:state``                  hash    ``incarnation`` of the stream, a dot, and a random id of
                                       this life of the group; ``start``, where it began;
                                       ``next``, all below was looked at; ``waiting``, how many
                                       records wait; ``bell``, the number of its last ringing;
                                       ``last``, when a consumer was last heard of (ms); settings
                                       (shared/config.py); counters ``acked``, ``dead``, ``lost``,
                                       ``purged``, ``returned``, ``reaped``; the last gap,
                                       ``lost_last``. Begun by ``shared_open``; also written by
                                       ``shared_purge`` and ``shared_resume``.
``...:groups``                 hash    For each group of records with something open
                                       ``owner[:waiting:state:head]``: the consumer that holds
                                       some, or nobody; how many wait; ``d`` delayed, ``p`` parked;
                                       the offset of the first that waits. A field goes with the
                                       last record. Also ``shared_purge``, ``shared_resume``.
``...:ready``                  zset    Groups that are free and have waiting records, by the offset
                                       of the first. Also ``shared_purge``, ``shared_resume``.
``...:blocked``                zset    The same for groups that are delayed or parked.
``...:delayed``                zset    Delayed groups, by the time (ms) at which they go on.
``...:leases``                 zset    Consumers, by the time (ms) at which they are taken for dead.
                                       Begun by ``shared_join``; one that leaves or is dead is
                                       removed.
``...:consumers``              hash    The same: ``step:alone:name``, the number of the last step,
                                       whether it has a last try (``alone``), or keeps a group for
                                       one (``reserved``), and a name for people.
``...:failures``               hash    Offsets of open records that have failed: how often. A field
                                       goes when its record is settled.
``...:suspects``               set     Offsets of open records that were with a consumer when it
                                       died: of a group they are given out one at a time.
``...:letters``                hash    Offsets of records that were given up, and are not published
                                       as dead letters yet: ``failures:bytes of group:``, then group
                                       and reason.
``...:dying``                  zset    The same offsets, by the time (ms) from which on the letter
                                       is given to whoever comes.
``...:bell``                   stream  The last eight ringings: consumers wait for one. Also
                                       ``shared_purge``, ``shared_resume``.
``...:held:<consumer>``        hash    What a consumer holds: for each group ``offset,offset...``,
                                       rising; empty if the group is kept for a last try. Deleted
                                       when it leaves, or is dead.
``...:more:<consumer>``        zset    Of its groups those of which it may have more, by the offset
                                       of the first that waits. Also ``shared_purge``,
                                       ``shared_resume``.
``...:waiting:<group id>``     list    The offsets of the group that wait, rising. Ids are any
                                       bytes. Goes with its last record. Also ``shared_purge``.
``meteor:group:{g}:...``               The state of one peer group, ``g`` being its name, or
                                       ``name/instance``, in the parts below. Written by the scripts
                                       in ``lua/peers``, which share ``_group_state.lua``; deleted,
                                       all at once, by ``peers/delete``.
``...:config``                 hash    Settings (peers/config.py). Written by ``peers_open``.
``...:state``                  hash    ``life``, a random id of this life of the group; ``view``,
                                       the number of the last event, and ``mark``, which of that
                                       number it was; ``term``, ``leader`` and its ``session``;
                                       ``joins``, how many have joined; ``last``, when a script ran
                                       last (ms); ``graces``, how often all got more time;
                                       ``moves``, which numbers what is for anybody; ``stranded``,
                                       whether the dead have some of it.
``...:members``                hash    For each member ``index:session:persistent:alive:priority:
                                       joined:metadata``.
``...:deadlines``              zset    Members that are alive, by the time (ms) at which they are
                                       taken for dead.
``...:graced``                 zset    Those of them who got more time, and were not heard of since,
                                       by when (ms).
``...:expirations``            zset    Named members that are dead, by the time (ms) at which they
                                       are removed.
``...:candidates``             zset    Who can be elected, the first first.
``...:leaving``                zset    Members that end what they have begun, and get nothing new,
                                       by since when (ms).
``...:removed``                zset    Who was removed on purpose, by when (ms): the last thousand.
                                       Expires after a day without one.
``...:events``                 stream  The last ten thousand events or so, with the ID ``<view>-0``.
``...:guarded``                hash    What leaders wrote with ``term.guard``.
``...:inbox:<member>``         stream  Messages to a member that are not settled. Goes with it.
``...:movable:<member>``       zset    Places in its inbox of what is for anybody, in their order.
``...:awaited:<member>``       zset    ``place id`` of what somebody waits for, by how long (ms).
``...:orphans``                zset    Members who are dead, or ``~<mark>~<member>`` for one who is
                                       gone, whose messages are handed over, by since when (ms).
``...:message:<id>``           hash    Who has got a message, and the answers. Expires a minute
                                       after nobody waits for it any more.
``...:replies:<session>``      stream  Messages of a handle that are answered. Expires in an hour.
``...:dead``                   stream  Messages that nobody could take.
``...:polls``                  zset    Votes that are open, by their end (ms).
``...:limits``                 zset    Those of them on an action, by the latest end (ms).
``...:pending``                hash    Actions that are decided on, or voted on, by their names:
                                       ``poll:when``; ``...:agenda``, a zset, has the names by when.
                                       Dropped an hour after that.
``...:poll:<id>``              hash    One vote; ``...:votes:<id>``, a hash, has who voted, and how.
                                       Both expire an hour after it is decided, and done.
``meteor:streams``             set     The names of all streams, in a slot of its own: written
                                       before ``create_stream`` and after ``delete_stream``, so a
                                       name without ``meta`` may be left over; listing drops it.
``meteor:groups``              set     The same for the names of the peer groups.
=============================  ======  ==========================================================

``delete_stream`` deletes every key of its stream, found by the pattern of :func:`everything`.
"""

from __future__ import annotations

import re

#: The set of all stream names.
STREAMS = "meteor:streams"
#: The set of the names of all peer groups.
PEERS = "meteor:groups"
#: The group of the archivers of a stream: it has a lease, but no place among the groups.
ARCHIVERS = ".archiver"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def check_name(name: str, what: str = "stream") -> str:
    """Return ``name`` if it may be used in keys and paths, else raise ``ValueError``."""
    if not isinstance(name, str):
        raise TypeError(f"The name of a {what} must be a str, not {type(name).__name__}.")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:200]!r} cannot be the name of a {what}: use 1 to 128 of the characters "
            "A-Z a-z 0-9 . _ - and do not start with a dot."
        )
    return name


def log(stream: str) -> str:
    return f"meteor:{{{stream}}}:log"


def meta(stream: str) -> str:
    return f"meteor:{{{stream}}}:meta"


def index(stream: str) -> str:
    return f"meteor:{{{stream}}}:index"


def producer(stream: str, producer_id: str) -> str:
    return f"meteor:{{{stream}}}:producer:{producer_id}"


def group(stream: str, name: str) -> str:
    return f"meteor:{{{stream}}}:group:{name}"


def lease(stream: str, name: str) -> str:
    return f"meteor:{{{stream}}}:lease:{name}"


def groups(stream: str) -> str:
    return f"meteor:{{{stream}}}:groups"


def events(stream: str) -> str:
    return f"meteor:{{{stream}}}:events"


def stage(stream: str, name: str) -> str:
    return f"meteor:{{{stream}}}:stage:{name}"


def plan(stream: str, writer: str) -> str:
    return f"meteor:{{{stream}}}:plan:{writer}"


def fences(stream: str) -> str:
    return f"meteor:{{{stream}}}:fences"


def shared_groups(stream: str) -> str:
    return f"meteor:{{{stream}}}:shared"


def shared(stream: str, group: str, part: str) -> str:
    return f"meteor:{{{stream}}}:shared:{group}:{part}"


def peers(name: str, part: str = "") -> str:
    """A key of a peer group; without a part, what all of them begin with."""
    return f"meteor:group:{{{name}}}:{part}"


def everything(stream: str) -> str:
    """The pattern of all keys of a stream."""
    return f"meteor:{{{stream}}}:*"
