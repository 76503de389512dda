"""Errors of the library, said in the language of the command line."""

from __future__ import annotations

import meteor_py
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.text import counted


def explain(error: Exception) -> str:
    """One sentence, and a hint that names commands in place of methods."""
    match error:
        case meteor_py.GroupNotFound():
            return (
                f"Stream {error.stream!r} has no group {error.group!r}; `meteor groups ls "
                f"{error.stream}` shows those it has."
            )
        case meteor_py.StreamNotFound():
            return (
                f"There is no stream {error.stream!r}; `meteor streams ls` shows those there are, "
                f"and `meteor streams create {error.stream}` makes it."
            )
        case meteor_py.PeerGroupNotFound():
            return (
                f"There is no peer group {error.group!r}; `meteor peers ls` shows those there are."
            )
        case meteor_py.MemberUnknown() if error.member:
            return (
                f"There is no member {error.member!r} in group {error.group!r}; `meteor peers "
                f"members {error.group}` shows who is."
            )
        case meteor_py.GroupActive(shared=True):
            return (
                f"Shared group {error.group!r} of stream {error.stream!r} is active: "
                f"{sanitize(error.owner)} is one of its consumers. Stop them first, or use --force."
            )
        case meteor_py.GroupActive():
            return (
                f"Group {error.group!r} of stream {error.stream!r} is active: "
                f"{sanitize(error.owner)} has its lease. Stop that member first, or take the group "
                "from it with --force."
            )
        case meteor_py.LogTruncated() | meteor_py.RecordsLost() | meteor_py.CorruptSegment():
            return _explain_loss(error)
        case OSError() if error.strerror and not error.filename:  # as of a full disk
            return f"{error.strerror}."
        case meteor_py.PeerGroupActive():
            return (
                f"Peer group {error.group!r} has {counted(error.alive, 'live member')}. Stop them "
                "first, or delete the group with --force."
            )
        case meteor_py.MeteorError() if error.hint:
            return f"{error.problem} {_hint(error)}"
        case meteor_py.MeteorError() | ValueError() | ImportError() | TimeoutError() | OSError():
            return str(error)
    return (
        f"Something unexpected went wrong: {type(error).__name__}: {error} (--debug shows where)."
    )


def _hint(error: meteor_py.MeteorError) -> str:
    """What to do about it at a shell."""
    match error:
        case meteor_py.StreamConfigMismatch(changeable=True):
            return f"Omit the option, or change it with `meteor streams configure {error.stream}`."
        case meteor_py.StoreMismatch(missing="store"):
            return "Give a stream its store with `meteor streams create NAME --store DIR`."
        case meteor_py.StoreMismatch(missing="address"):
            return "`meteor archive` takes the address of the store with --store."
        case meteor_py.StreamFull():
            return f"Start an archiver: `meteor archive run {error.stream}`."
        case meteor_py.StoreUnavailable():
            return "Does `meteor archive run` run somewhere, and can it write to the store?"
        case meteor_py.RecordTooLarge():
            return "Publish a reference to it, cut it into pieces, or raise --max-bytes."
    return error.hint


def _explain_loss(
    error: meteor_py.LogTruncated | meteor_py.RecordsLost | meteor_py.CorruptSegment,
) -> str:
    what = f"records {error.first} to {error.last} of stream {error.stream!r}"
    if not isinstance(error, meteor_py.LogTruncated):
        state = "gone" if isinstance(error, meteor_py.RecordsLost) else "damaged in the store"
        return f"R{what[1:]} are {state}; start at {error.last + 1}, with `-o {error.last + 1}`."
    if error.last < error.first:
        return (
            f"Stream {error.stream!r} was deleted and created anew, or the server has lost records "
            "of it; what is there now may be other records. Start again."
        )
    return (
        f"The server has lost {what}, or the stream was created anew; what is there now may be "
        "other records. Start again to read them."
    )
