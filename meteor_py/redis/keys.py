"""Every key in Redis, and what it holds. This docstring is the data model.

All keys of a stream share the hash tag ``{stream}``. They are in one slot, so a script may touch
several of them. (Cluster mode itself is not supported yet.) The names in the table are scripts of
``redis/lua``: those without a slash are in its folders ``log``, ``group``, ``transaction`` and
``archive``.

=============================  ======  ==========================================================
key                            type    contents, the scripts that write it and delete it
=============================  ======  ==========================================================
``meteor:{s}:log``             stream  The ring. One entry is one frame of n records, with the ID
                                       ``<last offset>-<n>`` and the fields ``t`` (append time, ms),
                                       one named after the frame's format, and with
                                       ``checksum=True`` ``crc``. Written and trimmed by
                                       ``publish`` and ``move_staged``, trimmed by
                                       ``configure_stream`` and ``advance_archived``.
``meteor:{s}:meta``            hash    ``version`` of this layout; ``incarnation``, a random id of
                                       the stream from its creation to its deletion; ``next``, the
                                       offset of the next record; ``appended``, the last append
                                       time in ms; ``epoch``, ``history`` and ``epochs`` (see
                                       records/position.py); settings: ``capacity``,
                                       ``compression``, ``checksum``, ``codec``, and ``group_by``
                                       if it has an ordering key.
                                       Only with a store: its id ``store`` (``store_before``: until
                                       the stream was resumed) and address ``store_uri``;
                                       ``archived``: all below is in it; ``expired``: all below was
                                       deleted from it again;
                                       ``max_unarchived``, a setting; ``flush``: up to where the
                                       archiver is asked not to wait. Written by ``create_stream``,
                                       ``configure_stream``, ``publish``, ``move_staged``,
                                       ``new_epoch``, ``advance_archived``, ``expire_history``,
                                       ``request_flush``.
``meteor:{s}:producer:<id>``   hash    One publisher: ``epoch``, ``last`` sequence, and in the
                                       fields 0 to 7 the batches of the last eight sequences as
                                       ``sequence:first offset:n:fingerprint``. Written by
                                       ``publish``; expires after a day without one.
``meteor:{s}:group:<g>``       hash    One group: ``incarnation`` of the stream it belongs to;
                                       ``start``, where it began; ``confirmed``, the next offset to
                                       process, once there is one; ``term``, ``nonce`` and ``owner``
                                       of the last lease (``owner`` is empty after a release,
                                       ``nonce`` too unless its member may acquire it again);
                                       ``floating``, see ``acquire_lease``; ``sought``, the last
                                       request of ``seek_group``. Written by ``open_group``,
                                       ``acquire_lease``, ``renew_lease``, ``release_lease``,
                                       ``confirm_offset``, ``seek_group``; deleted by
                                       ``delete_group``. The archivers of a stream are a group, too,
                                       with a name that no other can have: ``.archiver``.
``meteor:{s}:lease:<g>``       string  Present while a member holds the lease: its name, the term,
                                       and how often it was renewed.
                                       Set by ``acquire_lease`` and ``renew_lease``; expires, or is
                                       deleted by ``release_lease``, ``seek_group``,
                                       ``delete_group``.
``meteor:{s}:groups``          set     The names of the groups. Written with ``group:<g>``.
``meteor:{s}:events``          stream  The last thousand or so changes of groups, ``event`` being
                                       assigned, released, sought or deleted. Wakes members that
                                       wait for a lease. Written and trimmed by the scripts that
                                       make the changes.
``meteor:{s}:stage:<id>``      hash    Frames that wait for a commit (publish/transaction.py):
                                       for frame i the fields ``in`` records, ``if`` format, ``ip``
                                       payload, ``ic`` crc, and ``ig`` its entry of the index if the
                                       stream has one (see records/ordering_index.py).
                                       Written by a worker; emptied by ``move_staged``, deleted by
                                       ``discard_stages``; else expires after six hours, or a week
                                       if it is part of a plan.
``meteor:{s}:plan:<writer>``   list    The stages of the version that is being moved into the log,
                                       as ``id:frames``. Written by ``plan_commit``, deleted by
                                       ``move_staged``; else expires as its stages do.
``meteor:{s}:fences``          hash    For each writer its last version, how many frames of that are
                                       in the log, how many it has, and how many records. Written
                                       by ``plan_commit`` and ``move_staged``; kept, so that
                                       nothing is written twice, except for writers that will not
                                       return.
``meteor:{s}:index``           stream  Only with an ordering key: for each frame of the log an entry
                                       of the same ID, with the ordering keys of its records (see
                                       records/ordering_index.py) and no payload. Written and
                                       trimmed with the log, by ``publish``, ``move_staged``,
                                       ``configure_stream`` and ``advance_archived``.
``meteor:{s}:shared``          set     The names of the shared groups. Written by ``shared/open``;
                                       ``SharedGroup.delete`` removes a name.
``meteor:{s}:shared:<g>:...``          The state of one shared group, in the parts below. "Key"
                                       means an ordering key here. Written by ``shared/step``
                                       unless it says otherwise; deleted, all at once, by
                                       ``SharedGroup.delete``.
``...:state``                  hash    ``incarnation`` of the stream, a dot, and a random id of
                                       this incarnation of the group; ``start``, where it began;
                                       ``next``, all below was scanned; ``waiting``, how many
                                       records wait; ``bell``, the number of its last entry;
                                       ``last``, when a consumer last called (ms); settings
                                       (shared/config.py); counters ``acked``, ``dead``, ``lost``,
                                       ``purged``, ``returned``, ``reaped``; the last gap,
                                       ``lost_last``. Created by ``shared/open``; also written by
                                       ``shared/purge`` and ``shared/resume``.
``...:groups``                 hash    For each key with unsettled records
                                       ``owner[:waiting:state:head]``: the consumer that holds
                                       some, or none; how many wait; ``d`` delayed, ``p`` parked;
                                       the offset of the first that waits. A field goes with the
                                       last record. Also ``shared/purge``, ``shared/resume``.
``...:ready``                  zset    Keys that are free and have waiting records, by the offset
                                       of the first. Also ``shared/purge``, ``shared/resume``.
``...:blocked``                zset    The same for keys that are delayed or parked.
``...:delayed``                zset    Delayed keys, by the time (ms) at which the delay ends.
``...:leases``                 zset    Consumers, by the time (ms) at which they count as dead.
                                       Added by ``shared/join``; removed when they leave or die.
``...:consumers``              hash    The same: ``step:alone:name``, the number of the last step,
                                       whether it has a last try (``alone``), or keeps a key for
                                       one (``reserved``), and a name for people.
``...:failures``               hash    Offsets of open records that have failed: how often. A field
                                       goes when its record is settled.
``...:suspects``               set     Offsets of open records that were with a consumer when it
                                       died: of a key they are delivered one at a time.
``...:letters``                hash    Offsets of records that were given up, and are not published
                                       as dead letters yet: ``failures:bytes of key:``, then key
                                       and reason.
``...:dying``                  zset    The same offsets, by the time (ms) from which on any consumer
                                       may publish the letter.
``...:bell``                   stream  The last eight wake-ups, for which consumers wait. Also
                                       ``shared/purge``, ``shared/resume``.
``...:held:<consumer>``        hash    What a consumer holds: for each key ``offset,offset...``,
                                       rising; empty if the key is kept for a last try. Deleted
                                       when it leaves, or is dead.
``...:more:<consumer>``        zset    Those of its keys of which it may have more, by the offset
                                       of the first that waits. Also ``shared/purge``,
                                       ``shared/resume``.
``...:waiting:<key>``          list    The offsets of the key that wait, rising. Keys are any
                                       bytes. Goes with its last record. Also ``shared/purge``.
``meteor:group:{g}:...``               The state of one peer group, ``g`` being its name, or
                                       ``name/instance``, in the parts below. Written by the scripts
                                       ``peers/...``, which start with ``peers/_group_state``;
                                       deleted, all at once, by ``peers/delete``.
``...:config``                 hash    Settings (peers/config.py). Written by ``peers/open``.
``...:state``                  hash    ``life``, a random id of this incarnation; ``view``,
                                       the number of the last event, and ``mark``, which of that
                                       number it was; ``term``, ``leader`` and its ``session``;
                                       ``joins``, how many have joined; ``last``, when a script ran
                                       last (ms); ``graces``, how often all got more time;
                                       ``moves``, which numbers messages for any member;
                                       ``stranded``, whether dead members have some of them.
``...:members``                hash    For each member ``index:session:persistent:alive:priority:
                                       joined:metadata``.
``...:deadlines``              zset    Members that are alive, by the time (ms) at which they count
                                       as dead.
``...:graced``                 zset    Those of them that got more time and have sent no heartbeat
                                       since, by when (ms).
``...:expirations``            zset    Named members that are dead, by the time (ms) at which they
                                       are removed.
``...:candidates``             zset    Members that can be elected, in the order of election.
``...:leaving``                zset    Members that finish their work and get nothing new, by since
                                       when (ms).
``...:removed``                zset    Members that were removed, by when (ms): the last thousand.
                                       Expires after a day without one.
``...:events``                 stream  The last ten thousand events or so, with the ID ``<view>-0``.
``...:guarded``                hash    Values that leaders wrote with ``term.guard``.
``...:inbox:<member>``         stream  Messages to a member that are not settled. Goes with it.
``...:movable:<member>``       zset    Places in its inbox of messages for any member, in order.
``...:awaited:<member>``       zset    ``place id`` of messages that a sender waits for, by how long
                                       (ms).
``...:orphans``                zset    Members that are dead, or ``~<mark>~<member>`` for one that
                                       was removed, whose messages are handed over, by since when
                                       (ms).
``...:message:<id>``           hash    The receivers of a message, and their replies. Expires a
                                       minute after the last sender stopped waiting for it.
``...:replies:<session>``      stream  Messages of a handle that have replies. Expires in an hour.
``...:dead``                   stream  Messages that no member could take.
``...:polls``                  zset    Votes that are open, by their end (ms).
``...:limits``                 zset    Those of them on an action, by the latest end (ms).
``...:pending``                hash    Actions that are decided on, or voted on, by their names:
                                       ``poll:when``; ``...:agenda``, a zset, has the names by when.
                                       Dropped an hour after that.
``...:poll:<id>``              hash    One vote; ``...:votes:<id>``, a hash, has the vote of each.
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
