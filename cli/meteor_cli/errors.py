"""The library's error messages, with hints that suggest commands instead of methods."""

from __future__ import annotations

import meteor_py
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.text import counted


def explain(error: Exception) -> str:
    """Return what happened, and what to do about it on the command line."""
    match error:
        case meteor_py.GroupNotFound():
            return (
                f"Stream {error.stream!r} has no group {error.group!r}. "
                f"`meteor groups ls {error.stream}` lists its groups."
            )
        case meteor_py.StreamNotFound():
            guess = f" Did you mean {' or '.join(map(repr, error.similar))}?"
            return (
                f"There is no stream {error.stream!r}.{guess if error.similar else ''} `meteor "
                f"streams ls` lists all streams; `meteor streams create {error.stream}` creates it."
            )
        case meteor_py.PeerGroupNotFound():
            return f"There is no peer group {error.group!r}. `meteor peers ls` lists all groups."
        case meteor_py.MemberUnknown() if error.member:
            return (
                f"There is no member {error.member!r} in group {error.group!r}. "
                f"`meteor peers members {error.group}` lists the members."
            )
        case meteor_py.GroupActive():
            role = "consumes from it" if error.shared else "holds its lease"
            kind = "Shared group" if error.shared else "Group"
            return (
                f"{kind} {error.group!r} of stream {error.stream!r} is active: "
                f"{sanitize(error.owner)} {role}. Stop it first, or use --force."
            )
        case meteor_py.LogTruncated() | meteor_py.RecordsLost() | meteor_py.CorruptSegment():
            return _explain_loss(error)
        case OSError() if error.strerror and not error.filename:  # for example, the disk is full
            return f"{error.strerror}."
        case meteor_py.PeerGroupActive():
            return (
                f"Peer group {error.group!r} has {counted(error.alive, 'live member')}. Stop all "
                "members first, or delete the group with --force."
            )
        case meteor_py.MeteorError() if error.hint:
            return f"{error.problem} {_hint(error)}"
        case meteor_py.MeteorError() | ValueError() | ImportError() | TimeoutError() | OSError():
            return str(error)
    return f"Unexpected error: {type(error).__name__}: {error} (--debug shows the traceback)."


def _hint(error: meteor_py.MeteorError) -> str:
    match error:
        case meteor_py.StreamConfigMismatch(changeable=True):
            return (
                "Omit the option, or change the setting with "
                f"`meteor streams configure {error.stream}`."
            )
        case meteor_py.StoreMismatch(missing="store"):
            return "Create a stream with a store: `meteor streams create NAME --store DIR`."
        case meteor_py.StoreMismatch(missing="address"):
            return "Pass the store's address to `meteor archive` with --store."
        case meteor_py.StreamFull():
            return f"Start an archiver: `meteor archive run {error.stream}`."
        case meteor_py.StoreUnavailable():
            return "Check that `meteor archive run` is running and can write to the store."
        case meteor_py.CorruptFrame():
            return f"Continue after them with `-o {error.last + 1}`."
        case meteor_py.RecordTooLarge():
            return "Publish a reference to the data, split it, or raise --max-bytes."
    return error.hint


def _explain_loss(
    error: meteor_py.LogTruncated | meteor_py.RecordsLost | meteor_py.CorruptSegment,
) -> str:
    records = f"records {error.first} to {error.last} of stream {error.stream!r}"
    if not isinstance(error, meteor_py.LogTruncated):
        state = "gone" if isinstance(error, meteor_py.RecordsLost) else "damaged in the store"
        return f"R{records[1:]} are {state}. Continue after them with `-o {error.last + 1}`."
    lost = "records" if error.last < error.first else records
    return (
        f"The server lost {lost}, or stream {error.stream!r} was deleted and recreated. The same "
        "offsets may now belong to other records. Run the command again to read the current ones."
    )
