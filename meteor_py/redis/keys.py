"""Every key in Redis and its contents. This docstring is the data model.

All keys of a stream ``s`` share the hash tag ``{s}``, and all keys of a peer group ``g`` share the
tag ``{g}``. On a cluster they are in one slot, so a script can access several of them. Each entry
gives the key's type and the scripts in ``redis/lua`` that write and delete it. Scripts without a
slash are in the folders ``log``, ``group``, ``transaction`` and ``archive``.

**Streams**

``meteor:{s}:log`` (stream): The ring. Each entry is a frame of n records, with the ID ``<last
    offset>-<n>``. Its fields are ``t`` (append time, ms), the payload under the name of the frame's
    format, and ``crc`` if ``checksum=True``. Written and trimmed by ``publish`` and
    ``move_staged``, trimmed by ``configure_stream``, ``apply_limits`` and ``advance_archived``,
    replaced by ``repair_log``.
``meteor:{s}:meta`` (hash): ``version`` of this layout; ``incarnation``, a random id of the stream
    from its creation to its deletion; ``next``, the offset of the next record; ``appended``, the
    last append time in ms; ``epoch``, ``history`` and ``epochs`` (see records/position.py);
    ``capacity``; ``large``, which tells readers how many frames to fetch at once (see
    log/_append.lua); ``unindexed`` if the stream got its ordering key after its creation, so that
    the index may lack records that are in the ring. Only with a limit on age or bytes: ``keep``,
    both limits as ``ms:bytes``, one of which may be empty; ``bytes`` and ``marks`` (see
    log/_append.lua). Only with a store: ``archived``, the offset below which the store has all
    records; ``expired``, the offset below which records were deleted from the store; the setting
    ``max_unarchived``; ``flush``, the offset up to which the archiver should archive without
    waiting for more records. Also copies of ``settings``, for releases before 0.3, for clients that
    may not read ``settings``, and for scripts (``group_by``, ``store``). Written by
    ``create_stream``, ``resume_stream``, ``configure_stream``, ``apply_limits``, ``publish``,
    ``move_staged``, ``new_epoch``, ``advance_archived``, ``expire_history``, ``request_flush``.
``meteor:{s}:settings`` (hash): Settings that readers and archivers rely on. They are in a separate
    key so that an ACL can allow only administrators to change them.
    ``incarnation`` of the stream; ``compression``, ``checksum``, ``codec``, and ``group_by`` if the
    stream has an ordering key. Only with a store: its id ``store`` (``store_before``: its id until
    the stream was resumed), its address ``store_uri``, ``retain`` (ms) and ``retain_bytes``.
    Written by ``create_stream``, ``resume_stream``, ``configure_stream``, and by
    ``convert_settings`` for a stream from an older release.
``meteor:{s}:producer:<id>`` (hash): One publisher: its ``epoch``, its ``last`` sequence number, and
    in the fields 0 to 7 its last eight batches as ``sequence:first offset:n:fingerprint``.
    Written by ``publish``; expires a day after the last batch.
``meteor:{s}:index`` (stream): Only with an ordering key. One entry for every 64 records of a frame,
    with their ordering keys but no payload (see records/ordering_index.py). Written and trimmed
    with the log, by ``publish``, ``move_staged``, ``configure_stream``, ``apply_limits`` and
    ``advance_archived``; replaced by ``repair_log``.
``meteor:{s}:repair:<id>`` (stream): An unfinished copy of the log or the index. Written by
    ``repair_log``, which renames it when it is complete. Expires after an hour.
``meteor:streams`` (set): The names of all streams. The key has its own slot, and is written before
    ``create_stream`` and after ``delete_stream``. It may therefore include names that have no
    ``meta``. ``Client.streams`` leaves them out.

**Groups**

``meteor:{s}:group:<g>`` (hash): One group: ``incarnation`` of its stream; ``start``, its first
    position; ``confirmed``, the next offset to process, which is set by the first confirm;
    ``term``, ``nonce`` and ``owner`` of the last lease (a release clears ``owner``, and also
    ``nonce`` unless the member may reclaim the lease); ``floating`` and ``ended``, see
    ``acquire_lease``; ``sought``, the last ``seek_group`` request. Written by ``open_group``,
    ``acquire_lease``, ``renew_lease``, ``release_lease``, ``confirm_offset``, ``seek_group``;
    restored by ``resume_stream``; deleted by ``delete_group``. The archivers of a stream form a
    group with the reserved name ``.archiver``.
``meteor:{s}:lease:<g>`` (string): Exists while a member holds the lease. Contains the member's
    name, the term, and the number of renewals. Set by ``acquire_lease`` and ``renew_lease``;
    expires, or is deleted by ``release_lease``, ``seek_group``, ``delete_group``.
``meteor:{s}:groups`` (set): The names of the groups. Written with ``group:<g>``.
``meteor:{s}:events`` (stream): About the last thousand group changes; ``event`` is assigned,
    released, sought or deleted. Wakes members that wait for a lease. Written and trimmed by the
    scripts that make the changes.

**Transactions**

``meteor:{s}:stage:<id>`` (hash): Frames that wait for a commit (publish/transaction.py). For frame
    i, the fields are ``<i>n`` (number of records), ``<i>f`` (format), ``<i>p`` (payload), ``<i>c``
    (crc), and, if the stream has an index, ``<i>g`` (index entry, see records/ordering_index.py).
    Written by a worker; emptied by ``move_staged``, deleted by ``discard_stages``; otherwise
    expires after six hours, or a week if it is part of a plan.
``meteor:{s}:stage:/<writer>`` (hash): The stages of a writer that may still exist: the id of each
    stage, and the ``version:run`` for which it was written. A commit, or the writer's next run,
    uses this to find the stages that a dead process left behind. Written with each stage;
    ``discard_stages`` removes fields; expires with the last stage.
``meteor:{s}:plan:<writer>`` (list): The stages of the version that is being moved into the log, as
    ``id:frames``. Written by ``plan_commit``, deleted by ``move_staged``; otherwise expires with
    its stages.
``meteor:{s}:fences`` (hash): For each writer, its last version, and for that version the number of
    frames moved to the log, the total number of frames, and the number of records. Written by
    ``plan_commit`` and ``move_staged``, restored by ``resume_stream``. A fence is kept until its
    writer is known not to return, so that nothing is written twice.
``meteor:{s}:fences:times`` (zset): Writers whose fences expire, by expiry time (ms). Written by
    ``expire_fences``, which also deletes expired fences; ``forget`` in ``publish.transaction``
    removes a writer.

**Shared groups**

``meteor:{s}:shared`` (set): The names of the shared groups. Written by ``shared/open``;
    ``SharedGroup.delete`` removes a name.
``meteor:{s}:shared:<g>:...``: The state of one shared group, in the parts below. There, "key" means
    an ordering key, and a line is a string of ascending offsets, seven bytes each. Written by
    ``shared/step`` and ``shared/maintain`` unless stated otherwise; ``SharedGroup.delete`` deletes
    all of them. ``shared/group_state.py`` reads the packed values.
``...:meta`` (hash): ``incarnation`` of the stream, a dot, and a random id of this incarnation of
    the group; ``start``, its first position; settings (shared/config.py); the last gap,
    ``lost_last``; ``progress``, packed: the next offset to scan, clocks, times at which something
    is due, counters (see lua/shared/_group.lua). Created by ``shared/open``; also written by
    ``shared/join``, ``shared/purge``, ``shared/resume``. While ``shared/convert`` converts the
    state of a release before 0.3: ``converting``, ``converted``, ``returning``,
    ``letters_cursor``.
``...:state`` (string): A notice for releases before 0.3, which expect a hash here and so refuse the
    group without changing it. Written by ``shared/open`` and ``shared/convert``.
``...:members`` (hash): For each consumer id, a packed value: the last step and its result, the end
    of the lease, the number of records held, the batches of that step, flags, a key reserved for a
    record's last delivery attempt, and the name. Added by ``shared/join``; removed when the
    consumer leaves, or ten times ``lease_ttl`` after it died.
``...:keys`` (hash): An entry for each key: the owner, the number of records that the owner holds,
    and the line of waiting offsets. Keys that are stopped, suspected, or have many waiting records
    have further fields (see lua/shared/_keys.lua). An entry is removed with the key's last record.
    Also written by ``shared/purge``, ``shared/resume``.
``...:waiting`` (hash): Further waiting offsets of keys that have more than 128: a line for each
    ``<key>:<number>``. Also written by ``shared/purge``.
``...:batches:<consumer>`` (hash): The records that a consumer holds: for each delivery batch
    number, up to 32 offsets and their keys. Removed when the records are settled or taken back.
``...:more:<consumer>`` (list): Keys from which a consumer may claim more records. Also written by
    ``shared/resume``. Deleted when the consumer leaves or dies.
``...:wake:<consumer>`` (stream): At most one entry, which wakes the consumer. Also written by
    ``shared/purge``, ``shared/resume``. Deleted when the consumer leaves or dies.
``...:ready`` (zset): Free keys with waiting records, by the first waiting offset. Also written by
    ``shared/purge``, ``shared/resume``.
``...:blocked`` (zset): Delayed keys, parked keys, and keys whose waiting records are older than
    their held records, by the first waiting offset.
``...:unsettled`` (zset): ``<consumer>:<batch>`` and ``letter:<offset>`` by the lowest unsettled
    offset. The lowest score in ``ready``, ``blocked`` and ``unsettled`` is the confirmed offset.
``...:delayed`` (zset): Delayed keys, by the end of the delay (ms on the group's clock).
``...:leases`` (zset): Live consumers by the time at which they count as dead, and dead consumers by
    the time at which they are forgotten (ms of the group's tick, see lua/shared/_group.lua). Also
    written by ``shared/join``.
``...:idle`` (zset): Consumers that wait to be woken, by the start of their wait.
``...:purges`` (zset): For each purged key, the offset below which its records are dropped when they
    are scanned. Written by ``shared/purge``; ``shared/step`` removes a key once it has scanned up
    to that offset.
``...:failures`` (hash): For the offset of each unsettled record that has failed, its failure count.
    A field is removed when its record is settled.
``...:letters`` (hash): For the offset of each record that the group has given up on but not yet
    published as a dead letter: ``failures:length of the key in bytes:``, then the key and the
    reason.
``...:dying`` (zset): The offsets in ``letters``, by the time (ms on the group's clock) from which
    any consumer may publish the dead letter.

**Peer groups**

``meteor:groups`` (set): The names of the peer groups, kept like ``meteor:streams``.
``meteor:group:{g}:...``: The state of one peer group, in the parts below; ``g`` is its name, or
    ``name/instance``. Written by the scripts ``peers/...``. Most of them also do the work that is
    due in the group (``peers/_group_state``). ``PeerProtocol.delete`` deletes all of these keys.
``...:config`` (hash): Settings (peers/config.py). Written by ``peers/open``.
``...:state`` (hash): ``life``, a random id of this incarnation; ``view``, the number of the last
    event, and ``mark``, an id of that event, because after a failover another event can have the
    same number; ``term``, ``leader`` and its ``session``; ``joins``, the highest index of a member
    so far; ``last``, the time (ms) of the last script call other than sending and settling;
    ``due``, the time before which no work is due (ms); ``graces``, the number of times that members
    got more time after an outage; ``moves``, a counter that numbers deliveries of messages for any
    member; ``stranded``, set if dead members kept those messages because no other was alive.
``...:members`` (hash): For each member ``index:session:persistent:alive:priority:joined:metadata``.
``...:deadlines`` (zset): Live members, by the time (ms) at which they count as dead.
``...:graced`` (zset): Live members that got more time and have sent no heartbeat since, by
    the time (ms) at which they got it.
``...:expirations`` (zset): Dead named members, by the time (ms) at which they are to be removed.
``...:candidates`` (zset): Members that can be elected, in the order of election.
``...:leaving`` (zset): Members that are finishing their work and get no new messages, by the time
    (ms) at which they began to leave.
``...:removed`` (zset): The last thousand removed members, by the time (ms) of their removal.
    Expires a day after the last removal.
``...:events`` (stream): About the last ten thousand events, with the ID ``<view>-0``.
``...:guarded`` (hash): Values that leaders wrote with ``term.guard``.
``...:properties`` (hash): The properties of the group, as JSON.
``...:handlers`` (hash): For each live member, its session and the queues that it handles, separated
    by spaces. Only the session if the member has not declared any queues.
``...:inbox:<member>`` (stream): Unsettled messages to a member. Removed with the member.
``...:movable:<member>`` (zset): The IDs of the inbox entries that hold messages for any member, in
    the order of delivery.
``...:awaited:<member>`` (zset): ``<entry ID> <message id>`` for each message in the inbox whose
    sender waits for a reply, by the end of the wait (ms).
``...:shared:<member>`` (zset): The ids of messages in the inbox whose body is in ``body:<id>``.
``...:begun:<member>`` (hash): For the ID of an inbox entry, ``count token``: the number of times
    that this member got the message again, and the token of the last time.
``...:body:<id>`` (hash): A long ``body`` for several receivers, and ``holders``, the number of
    receivers that have not settled the message. Removed when the last one has settled it.
``...:orphans`` (zset): Dead members, and ``~<mark>~<member>`` for removed ones, whose messages are
    being handed over, by the time (ms) at which that began.
``...:message:<id>`` (hash): The receivers of a message whose sender waits for replies, and their
    replies. Expires a minute after the sender stops waiting.
``...:sender:<session>`` (string): The number of the last batch of messages that was stored in this
    session, and its results. Expires an hour after the senders stop waiting.
``...:replies:<session>`` (stream): The ids of a handle's messages that have got all their replies;
    a short reply from a single receiver is included. Expires an hour after the last entry.
``...:dead`` (stream): About the last thousand dead letters: messages that no member could handle.
``...:polls`` (zset): Open votes, by their end (ms).
``...:limits`` (zset): Open votes on an action, by the latest time (ms) at which they can end.
``...:pending`` (hash): For the name of each action that was agreed or is being voted on,
    ``poll:when``. ``...:agenda`` (zset) has the names by that time. An entry is dropped an hour
    after its time.
``...:poll:<id>`` (hash): One vote. ``...:votes:<id>`` (hash) has the vote of each member. Both
    expire an hour after the vote was decided, or an hour after its action is due if that is later.

``delete_stream`` deletes every key of its stream. Its caller finds the keys by the prefix from
:func:`everything`.
"""

from __future__ import annotations

import re

#: The set of all stream names.
STREAMS = "meteor:streams"
#: The set of all peer group names.
PEERS = "meteor:groups"
#: The group that a stream's archivers form. It has a lease, but is not listed.
ARCHIVERS = ".archiver"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def check_name(name: str, what: str = "stream") -> str:
    """Return ``name`` if it can be used in keys and paths; otherwise raise ``ValueError``, or
    ``TypeError`` if it is not a str."""
    if not isinstance(name, str):
        raise TypeError(f"The name of a {what} must be a str, not {type(name).__name__}.")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:200]!r} cannot be the name of a {what}. Use 1 to 128 of the characters "
            "A-Z a-z 0-9 . _ - and do not start with a dot."
        )
    return name


def log(stream: str) -> str:
    return f"meteor:{{{stream}}}:log"


def meta(stream: str) -> str:
    return f"meteor:{{{stream}}}:meta"


def settings(stream: str) -> str:
    return f"meteor:{{{stream}}}:settings"


def index(stream: str) -> str:
    return f"meteor:{{{stream}}}:index"


def repair(stream: str, repair_id: str) -> str:
    return f"meteor:{{{stream}}}:repair:{repair_id}"


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


def stages(stream: str, writer: str) -> str:
    return f"meteor:{{{stream}}}:stage:/{writer}"


def plan(stream: str, writer: str) -> str:
    return f"meteor:{{{stream}}}:plan:{writer}"


def fences(stream: str) -> str:
    return f"meteor:{{{stream}}}:fences"


def fence_times(stream: str) -> str:
    return f"meteor:{{{stream}}}:fences:times"


def shared_groups(stream: str) -> str:
    return f"meteor:{{{stream}}}:shared"


def shared(stream: str, group: str, part: str) -> str:
    return f"meteor:{{{stream}}}:shared:{group}:{part}"


def peers(name: str, part: str = "") -> str:
    """Return a peer group's key. Without a part, return the prefix of all its keys."""
    return f"meteor:group:{{{name}}}:{part}"


def everything(stream: str) -> str:
    """Return the prefix of all of a stream's keys."""
    return f"meteor:{{{stream}}}:"


def guard(key: str | bytes) -> str:
    """Return the guard key for the slot of ``key``. No client and no script ever writes it.

    >>> guard("meteor:{orders}:log")
    'meteor:{orders}:guard'
    """
    name = key if isinstance(key, str) else key.decode(errors="replace")
    tagged, closed, _ = name.partition("}")
    return f"{tagged}}}:guard" if closed else f"{{{name}}}:guard"
