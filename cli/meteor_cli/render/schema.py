"""Other commands print the JSON objects below. As with records, later versions may add fields, but
never remove one or change its meaning.

Times are in ms since 1970, except in ``watch`` and ``peers watch``, which use RFC 3339. Durations
are in seconds, sizes in bytes, and rates per second. An unknown or missing value is ``null``;
``bench`` omits it. If ``resync`` is true in a ``peers watch`` event, the server had lost or trimmed
the event, and the command derived it from the group's state. Such events share one ``view``.
``peers ask`` prints the reply itself, except with ``--to all``.
"""

from __future__ import annotations

_GROUP = ("name", "confirmed", "lag", "owner", "term", "kind", "consumers")
_STREAM = (
    "name", "first", "next", "length", "frames", "bytes", "appended", "archived", "archiver",
    "capacity", "compression", "checksum", "codec", "ordering_key", "store", "max_unarchived",
    "max_age", "max_bytes", "retain", "retain_bytes",
    "incarnation", "epoch", "epoch_first", "groups",
)  # fmt: skip
_SHARED = (
    "stream", "name", "confirmed", "lag", "scanned", "waiting", "ready", "blocked",
    "dead_letters_pending", "acked", "dead", "lost", "purged", "returned", "reaped", "lost_last",
    "consumers", "max_per_key", "lease_ttl", "max_deliveries", "dead_letter", "on_poison",
    "default_key", "keyless",
)  # fmt: skip
_MEMBER = ("status", "leads", "persistent", "priority", "joined", "metadata")

#: The fields of each object, by command.
FIELDS = {
    "server info": (
        "address", "product", "version", "role", "memory", "memory_max", "memory_policy",
        "append_only", "clients", "uptime", "slots", "streams", "stream_bytes",
    ),
    "streams ls": _STREAM,
    "streams info": _STREAM,
    "groups ls": ("stream", *_GROUP),
    "groups info": ("stream", *_GROUP),
    "shared ls": _SHARED,
    "shared info": (*_SHARED, "keys", "keys_total", "reasons"),
    "shared fsck": ("stream", "group", "flaw"),
    "peers ls": (
        "name", "members", "alive", "leader", "term", "view", "ttl", "member_expiration",
        "election", "min_size", "max_inbox", "max_deliveries",
    ),
    "peers members": ("group", "id", *_MEMBER),
    "peers watch": ("time", "group", "view", "event"),
    "peers leader": ("group", "leader", "term", *_MEMBER),
    "peers dead": (
        "group", "failed", "reason", "member", "id", "queue", "verb", "sender", "sent", "type",
        "body",
    ),
    "peers ask --to all": ("member", "reply", "error"),
    "peers propose": (
        "group", "poll", "passed", "reason", "yes", "no", "abstained", "missing", "topic", "by",
        "kind", "decided",
    ),
    "seek": (
        "stream", "group", "from", "to", "records_skipped", "records_repeated", "owner", "done",
    ),
    "archive ls": ("stream", "first", "last", "records", "size", "epoch", "term", "file"),
    "archive verify": ("stream", "kind", "first", "last", "place", "problem", "harmless"),
    "top --once": (*_STREAM, "rate", "unarchived", "archive_rate"),
    "bench": (
        "what", "server", "records", "size", "seconds", "records_per_s", "megabytes_per_s",
        "p50_ms", "p99_ms",
    ),
    "watch": ("time", "stream", "group", "event"),
}  # fmt: skip

#: The fields of an object in ``groups``.
GROUP_FIELDS = {"streams ls": _GROUP, "streams info": _GROUP, "top --once": (*_GROUP, "rate")}
#: The fields of an object in ``keys`` of ``shared info``.
KEY_FIELDS = ("key", "count", "acquired", "waiting", "owner", "oldest", "state")
#: The fields of an object in ``consumers`` of ``shared ls`` and ``shared info``.
CONSUMER_FIELDS = ("id", "name", "keys", "records", "lease")

#: The events of ``watch``, with their additional fields.
EVENTS = {
    "created": ("next",), "recreated": ("next",), "deleted": (), "unreadable": ("reason",),
    "readable": (), "epoch_changed": ("epoch", "before"), "log_truncated": ("first", "last"),
    "records_dropped": ("first", "last"), "group_created": ("confirmed", "lag"),
    "group_moved_back": ("confirmed", "before"), "group_deleted": ("confirmed",),
    "lease_taken": ("owner", "term"), "lease_taken_over": ("owner", "before", "term"),
    "lease_ended": ("before", "term"), "consumers_changed": ("consumers", "before"),
    "lag_high": ("lag", "limit"), "lag_normal": ("lag", "limit"),
    "archiver_taken": ("owner", "before"), "archiver_ended": ("before",),
    "archiver_missing": ("unarchived", "before"), "server_gone": ("reason",), "server_back": (),
}  # fmt: skip

#: The events of ``peers watch``, with their additional fields.
PEER_EVENTS = {
    "state": ("leader", "term", "members"), "joined": ("member", "resync"),
    "updated": ("member", "resync"), "left": ("member", "reason", "resync"),
    "dead": ("member", "reason", "resync"), "alive": ("member", "resync"),
    "property": ("property", "value", "resync"),
    "elected": ("member", "term", "resync"), "resigned": ("member", "term", "reason", "resync"),
    "proposed": ("member", "poll", "kind", "action", "topic"),
    "decided": (
        "member", "poll", "passed", "reason", "action", "yes", "no", "abstained", "missing",
    ),
    "reset": ("resync",), "server_gone": ("reason",), "server_back": (),
}  # fmt: skip
#: The fields of an object in ``members`` of the ``state`` event.
MEMBER_FIELDS = ("id", *_MEMBER)
